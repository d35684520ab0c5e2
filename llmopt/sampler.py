"""Choice of tokens for independent requests: vectorised over rows, each row with its own parameters and seed.

The random number of a token depends on the request's seed and the token's place in the sequence, on nothing else, so
a request's output depends neither on its neighbours nor on speculation. Filters follow Hugging Face in order:
temperature, top-k, top-p, min-p (`llmopt.ops.sample`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from llmopt.errors import NonFiniteLogitsError, StageError
from llmopt.ops.argmax import argmax
from llmopt.ops.sample import sample_rows

if TYPE_CHECKING:
    from llmopt.request import Request

_MASK = (1 << 64) - 1


@dataclass(slots=True)
class Row:
    """One row of logits: the request, and the draft tokens assumed before this row."""

    request: Request
    drafts: list[int] = field(default_factory=list)

    @property
    def position(self) -> int:
        """Place in the sequence of the token to choose."""
        return self.request.num_tokens + len(self.drafts)

    @property
    def num_output(self) -> int:
        """Output tokens before the one to choose."""
        return self.request.num_output_tokens + len(self.drafts)

    def ids(self) -> np.ndarray:
        """All ids before the token to choose, ``[position]`` int64."""
        known = self.request.token_ids[: self.request.num_tokens]
        return np.concatenate([known, np.asarray(self.drafts, dtype=np.int64)]) if self.drafts else known


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on seed and position only.

    Two rounds of SplitMix64's mixing function (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators,
    2014), which passes BigCrush on consecutive inputs.
    """
    return (_mix(_mix(seed & _MASK) + position * 0x9E3779B97F4A7C15) >> 11) * 2.0**-53


def _mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def sample(
    rows: list[Row], logits: Tensor, places: list[int] | None = None
) -> tuple[list[int], dict[int, BaseException]]:
    """Choose one token per row.

    :param logits: ``[R, vocab]`` float32; not changed.
    :param places: which row of the logits belongs to each of ``rows``; None: they are the same.
    :returns: the tokens, and for rows (by index) that have none the error: their logits are not finite, or one of the
        request's own processors failed.
    """
    errors: dict[int, BaseException] = {}
    has_edits = is_random = False
    for row in rows:
        params = row.request.sampling
        is_random = is_random or not params.is_greedy
        if params.changes_logits or row.request.logits_processors:
            has_edits = is_random = True
            break
    if has_edits:
        logits = edit_logits(rows, logits if places is None else logits[places], errors, is_own=places is not None)
        places = None
    tokens, top = argmax(logits, places)
    if not all(map(math.isfinite, top)):
        for index, value in enumerate(top):
            if not math.isfinite(value) and index not in errors:
                errors[index] = not_finite(rows[index].request, value)
    if is_random:
        random = [i for i, row in enumerate(rows) if not row.request.sampling.is_greedy and i not in errors]
        if random:
            if len(random) < len(rows):
                places = random if places is None else [places[i] for i in random]
            chosen = _sample_random([rows[i] for i in random], logits, places)
            for index, token in zip(random, chosen, strict=True):
                tokens[index] = token
    return tokens, errors


def not_finite(request: Request, value: float) -> NonFiniteLogitsError:
    """Why no token can be chosen from a row whose best logit is this."""
    return NonFiniteLogitsError(
        f"request {request.request_id!r}: the best logit of its next token is {value}. "
        + ("Every token is forbidden." if value == -math.inf else "Check the model's weights and dtype.")
    )


def edit_logits(rows: list[Row], logits: Tensor, errors: dict[int, BaseException], is_own: bool = False) -> Tensor:
    """Apply penalties, biases, minimum length and the requests' own processors. Returns a copy where needed.

    :param errors: row index -> why a processor of that row failed; filled here.
    :param is_own: the logits are a copy already.
    """
    copied = is_own
    for index, row in enumerate(rows):
        request, params = row.request, row.request.sampling
        if not params.changes_logits and not request.logits_processors:
            continue
        if not copied:
            logits, copied = logits.clone(), True
        line = logits[index]
        if params.repetition_penalty != 1.0:
            seen = torch.from_numpy(np.unique(row.ids())).to(line.device)
            score = line[seen]
            line[seen] = torch.where(score < 0, score * params.repetition_penalty, score / params.repetition_penalty)
        if params.presence_penalty or params.frequency_penalty:
            ids, counts = np.unique(row.ids()[request.num_prompt_tokens :], return_counts=True)
            if ids.size:
                where = torch.from_numpy(ids).to(line.device)
                amount = torch.from_numpy(counts).to(line) * params.frequency_penalty + params.presence_penalty
                line[where] -= amount
        if params.logit_bias:
            for token_id, bias in params.logit_bias.items():
                line[token_id] += bias
        if row.num_output < params.min_new_tokens and request.eos_token_ids:
            line[[i for i in request.eos_token_ids if 0 <= i < line.shape[0]]] = -torch.inf
        try:
            for processor in request.logits_processors:
                logits[index] = processor(row.ids(), logits[index])
        except Exception as error:  # somebody's code: his request ends, the others go on
            told = StageError(f"a logits processor of request {request.request_id!r} failed: "
                              f"{type(error).__name__}: {error}")  # fmt: skip
            told.__cause__ = error
            errors[index] = told
    return logits


def _sample_random(rows: list[Row], logits: Tensor, places: list[int] | None) -> list[int]:
    """Draw every row's token at the row's own random number."""
    params = [row.request.sampling for row in rows]
    return sample_rows(
        logits,
        [p.temperature for p in params],
        [p.top_k for p in params],
        [p.top_p for p in params],
        [p.min_p for p in params],
        [uniform(row.request.seed, row.position) for row in rows],
        places,
    )

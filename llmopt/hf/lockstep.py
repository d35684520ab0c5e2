"""Rows of one `generate` call that choose their tokens together, exactly as transformers' own loop would.

Processors, criteria and streamers see all rows at once, pads included, and sampling draws one matrix of random numbers
for all rows. So the rows wait for each other: a token is chosen when every row has delivered its logits.
"""

from __future__ import annotations

import inspect
import math
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.generation import EosTokenCriteria, MaxLengthCriteria
from transformers.generation import logits_process as builtin

from llmopt.batch import AcceptedTokens
from llmopt.errors import NonFiniteLogitsError
from llmopt.ops.argmax import argmax

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
    from transformers.generation.streamers import BaseStreamer

    from llmopt.request import Request

_here = threading.local()

# Processors that look at scores only, so that the ids need not be put together for them.
_BLIND = {
    builtin.TemperatureLogitsWarper,
    builtin.TopKLogitsWarper,
    builtin.TopPLogitsWarper,
    builtin.TopHLogitsWarper,
    builtin.MinPLogitsWarper,
    builtin.TypicalLogitsWarper,
    builtin.EpsilonLogitsWarper,
    builtin.EtaLogitsWarper,
    builtin.LogitNormalization,
    builtin.InfNanRemoveLogitsProcessor,
}


def is_choosing() -> bool:
    """Whether this thread is in a processor, criterion or streamer of a caller, and so in the middle of a step."""
    return getattr(_here, "is_choosing", False)


@dataclass(slots=True)
class LockstepOptions:
    """What a `generate` call asks of its rows."""

    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    has_eos: bool  # finished rows are filled with the pad id
    pad_token_id: int | None
    keep_stepping: bool  # compute finished rows too: their logits are looked at, or they have no end
    streamer: BaseStreamer | None = None


@dataclass(slots=True)
class LockstepResult:
    """What the rows produced."""

    scores: list[Tensor] = field(default_factory=list)  # per step [B, vocab], processed
    logits: list[Tensor] = field(default_factory=list)  # per step [B, vocab], raw


class LockstepGroup:
    """The rows of one call; see `llmopt.request.Lockstep`.

    :param input_ids: ``[B, L]`` prompts, left pads included, as the processors expect them.
    :param requests: one per row.
    """

    def __init__(self, input_ids: Tensor, requests: list[Request], options: LockstepOptions) -> None:
        self._input_ids = input_ids
        self._new_ids: list[Tensor] = []  # [B] of the steps that `_input_ids` does not have yet
        self.requests = requests
        self.options = options
        self.result = LockstepResult()
        self.unfinished = [1] * len(requests)  # 0 for rows that are at their end
        self._row_of = {request: row for row, request in enumerate(requests)}
        self._missing = set(requests)  # rows whose logits are not here yet
        self._logits: Tensor | None = None  # [B, vocab] float32 of the coming choice
        config = options.config
        self._keeps_scores = bool(config.return_dict_in_generate and config.output_scores)
        self._keeps_logits = bool(config.return_dict_in_generate and config.output_logits)
        self._processors = [_two_arguments(p) for p in options.processors]
        self._needs_ids = not all(type(p) in _BLIND for p in options.processors)
        self._ends: _Ends | None = _Ends.of(options.criteria)
        self._thread = threading.get_ident()  # of the caller
        self._num_chosen = 0
        self._accepted = AcceptedTokens([], [], [])  # what was chosen last
        self._is_lost = False  # whether that has to be given again
        self._error: BaseException | None = None  # why this call cannot go on

    def put(self, request: Request, logits: Tensor) -> bool:
        if self._error is not None:
            return True
        if request.num_output_tokens < self._num_chosen:  # an interrupt came between the choice and its commit
            self._is_lost = True
            return True
        if len(self.requests) == 1 and not self._keeps_logits and not self._keeps_scores:
            self._logits = logits[None]  # chosen from at once, so no copy is needed
            return True
        if self._logits is None:
            with torch.inference_mode(False):  # the next row may come from a thread that is not in this mode
                self._logits = logits.new_empty((len(self.requests), logits.shape[-1]))
            for row, member in enumerate(self.requests):
                if member.is_finished:  # no longer computed; it only takes part in the random draw
                    self._logits[row] = 0.0
        self._logits[self._row_of[request]] = logits
        self._missing.discard(request)
        return not self._missing

    def choose(self) -> AcceptedTokens:
        _here.is_choosing = True
        try:
            # the thread that steps need not be the caller's, who is in transformers' no_grad
            with torch.inference_mode(False), torch.no_grad():
                if self._error is None:
                    if not self._is_lost:
                        self._accepted = self._choose()
                    self._is_lost = False
                    return self._accepted
        except BaseException as error:  # a processor, criterion or streamer of the caller: his call fails, others go on
            self._error = error
            if not isinstance(error, Exception) and threading.get_ident() != self._thread:
                raise  # an interrupt is for the thread that it stopped, too
        finally:
            _here.is_choosing = False
        return AcceptedTokens([], [], [], {r.request_id: self._error for r in self.requests if not r.is_finished})

    def _choose(self) -> AcceptedTokens:
        options = self.options
        assert self._logits is not None
        device = self._input_ids.device
        scores, self._logits = self._logits.to(device), None
        input_ids = self.input_ids if self._needs_ids else self._input_ids
        if self._keeps_logits:
            self.result.logits.append(scores)  # as in transformers, a processor that works in place changes these too
        for processor in self._processors:
            scores = processor(input_ids, scores)
        if self._keeps_scores:
            self.result.scores.append(scores)
        if options.config.do_sample:
            try:
                tokens = draw(scores.softmax(dim=-1))
            except RuntimeError:
                self._refuse_nan(scores)
                raise
        else:
            tokens, best = argmax(scores)  # NaN counts as largest, so it shows here
            if any(math.isnan(value) and live for value, live in zip(best, self.unfinished, strict=True)):
                self._refuse_nan(scores)
        pad = options.pad_token_id
        if options.has_eos and pad is not None and 0 in self.unfinished:
            tokens = [token if live else pad for token, live in zip(tokens, self.unfinished, strict=True)]
        new_ids = torch.tensor(tokens, device=device)
        self._new_ids.append(new_ids)
        self._num_chosen += 1
        if self._ends is not None:
            length = self._input_ids.shape[1] + len(self._new_ids)
            self.unfinished = self._ends.unfinished(self.unfinished, tokens, length)
        else:
            seen = tuple(self.result.scores) if self._keeps_scores else None
            done = options.criteria(self.input_ids, seen)
            now = torch.tensor(self.unfinished, device=device) & ~done
            self.unfinished = now.tolist()
        if options.streamer is not None:
            options.streamer.put(new_ids.cpu())
        return self._accept(tokens, self.unfinished)

    @property
    def input_ids(self) -> Tensor:
        """Prompts and chosen tokens, ``[B, L + T]``."""
        if self._new_ids:
            self._input_ids = torch.cat([self._input_ids, torch.stack(self._new_ids, dim=1)], dim=-1)
            self._new_ids = []
        return self._input_ids

    def _accept(self, tokens: list[int], unfinished: list[int]) -> AcceptedTokens:
        accepted = AcceptedTokens([], [], [])
        all_done = not any(unfinished)
        for request, token, goes_on in zip(self.requests, tokens, unfinished, strict=True):
            if request.is_finished:
                continue
            ends = all_done if self.options.keep_stepping else not goes_on
            accepted.requests.append(request)
            accepted.token_ids.append([token])
            accepted.finish_reasons.append("stop" if ends else None)
            if not ends:
                self._missing.add(request)
        return accepted

    def _refuse_nan(self, scores: Tensor) -> None:
        """:raises NonFiniteLogitsError: when scores hold NaN; names the first row."""
        for row, has_nan in enumerate(scores.isnan().any(dim=-1).tolist()):
            if has_nan:
                raise NonFiniteLogitsError(
                    f"row {row}: the scores of its next token hold NaN. Check the model's weights and dtype, or pass "
                    "remove_invalid_values=True."
                )


@dataclass(frozen=True, slots=True)
class _Ends:
    """The two criteria that every call has, without tensors."""

    max_length: int
    eos_token_ids: frozenset[int]

    @classmethod
    def of(cls, criteria: StoppingCriteriaList) -> _Ends | None:
        """The ends that the criteria mean; None when there are other criteria among them."""
        if not all(type(c) in (MaxLengthCriteria, EosTokenCriteria) for c in criteria):
            return None
        lengths = [c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)]
        ids = [i for c in criteria if isinstance(c, EosTokenCriteria) for i in c.eos_token_id.tolist()]
        return cls(min(lengths, default=1 << 62), frozenset(ids))

    def unfinished(self, unfinished: list[int], tokens: list[int], length: int) -> list[int]:
        """Which rows go on after these tokens."""
        if length >= self.max_length:
            return [0] * len(unfinished)
        return [live if token not in self.eos_token_ids else 0 for live, token in zip(unfinished, tokens, strict=True)]


def draw(probs: Tensor) -> list[int]:
    """`torch.multinomial` for one sample per row: same tokens, same random state afterwards.

    torch divides by exponential noise and takes the maximum, which `llmopt.ops.argmax` finds much faster on the CPU.

    :param probs: ``[B, vocab]`` float32.
    :raises RuntimeError: torch's own, when the probabilities are none.
    """
    tokens: list[int]
    if probs.device.type != "cpu":
        tokens = torch.multinomial(probs, num_samples=1)[:, 0].tolist()
        return tokens
    tokens, best = argmax(probs / torch.empty_like(probs).exponential_(1.0))
    if any(map(math.isnan, best)):  # then torch raises, and says why
        tokens = torch.multinomial(probs, num_samples=1)[:, 0].tolist()
    return tokens


def _two_arguments(processor: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Check once what transformers checks in every step: a processor takes ids and scores, nothing more."""
    names = list(inspect.signature(processor.__call__).parameters)
    if len(names) > 2:
        raise ValueError(
            f"Make sure that all the required parameters: {names} for {type(processor)} are passed to the logits "
            "processor."
        )
    call: Callable[[Tensor, Tensor], Tensor] = processor
    return call

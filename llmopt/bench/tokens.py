"""Checks that come before any timing: are these the tokens that ``model.generate`` chooses?

In float32 the tokens must be identical. In half precision no two kernels agree on near-ties, so the tokens are replayed
through a float32 copy of the model: at every position the chosen token may lie below the best one by a small gap only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmopt.bench.workloads import BenchRequest


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two outputs part."""

    row: int
    position: int  # in the output; the length of the shorter output when one is a prefix of the other
    expected: int | None  # token id, None when that output has ended
    found: int | None


@dataclass(frozen=True, slots=True)
class Replay:
    """How far chosen tokens lie below the best token of a float32 forward over the same text."""

    max_gap: float  # in logits; 0 when every token is the best one
    num_not_best: int  # positions with a gap
    num_tokens: int


def first_difference(expected: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> Difference | None:
    """Where the outputs of two runs part; None when they are identical.

    :raises ValueError: the runs have different numbers of rows.
    """
    if len(expected) != len(found):
        raise ValueError(f"{len(expected)} rows were expected, {len(found)} came.")
    for row, (left, right) in enumerate(zip(expected, found, strict=True)):
        if list(left) == list(right):
            continue
        shared = min(len(left), len(right))
        position = next((index for index in range(shared) if left[index] != right[index]), shared)
        ids = [side[position] if position < len(side) else None for side in (left, right)]
        return Difference(row, position, ids[0], ids[1])
    return None


def agreement(expected: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> float:
    """Share of the places that hold the same token. After the first other one both texts go their own ways."""
    places = sum(max(len(left), len(right)) for left, right in zip(expected, found, strict=True))
    same = sum(a == b for left, right in zip(expected, found, strict=True) for a, b in zip(left, right, strict=False))
    return same / places if places else 1.0


@torch.no_grad()
def replay(reference: PreTrainedModel, requests: Sequence[BenchRequest], outputs: Sequence[Sequence[int]]) -> Replay:
    """Feed each prompt with its output to a float32 model and measure the gaps.

    :param reference: the float32 copy; one row is computed at a time, without padding.
    """
    max_gap, num_not_best, num_tokens = 0.0, 0, 0
    for request, output in zip(requests, outputs, strict=True):
        if not output:
            continue
        chosen = torch.tensor(list(output), device=reference.device)
        ids = torch.tensor([[*request.prompt_ids, *output[:-1]]], device=reference.device)
        logits = _last_logits(reference, ids, len(output))  # [num_new, vocab]
        gaps = logits.max(dim=-1).values - logits.gather(1, chosen[:, None])[:, 0]
        max_gap = max(max_gap, float(gaps.max()))
        num_not_best += int((gaps > 0).sum())
        num_tokens += len(output)
    return Replay(max_gap, num_not_best, num_tokens)


def _last_logits(model: PreTrainedModel, ids: torch.Tensor, count: int) -> torch.Tensor:
    try:
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=count).logits
    except TypeError:  # a few architectures always return all positions
        logits = model(input_ids=ids, use_cache=False).logits
    rows: torch.Tensor = logits[0, -count:].float()
    return rows

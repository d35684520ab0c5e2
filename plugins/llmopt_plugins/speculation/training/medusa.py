"""Medusa heads that share the target's output matrix: the cheapest drafter to train."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from llmopt_plugins.speculation.training.corpus import TrainingBatch
from llmopt_plugins.speculation.training.unroll import HeadLoss, TargetChoice


class MedusaHeads(nn.Module):
    """Head ``k`` (from 0) guesses token ``t+2+k`` from the target's last state of token ``t``: ``x + silu(Wx + b)``.

    :param weight: ``[V, h]`` rows of the target's output matrix that training compares with; they do not learn.
    :param vocabulary: ``[V]`` int64 ascending, the ids of those rows.
    """

    weight: Tensor
    vocabulary: Tensor
    known: Tensor

    def __init__(self, num_heads: int, weight: Tensor, vocabulary: Tensor, vocab_size: int) -> None:
        super().__init__()
        size = weight.shape[1]
        self.linears = [nn.Linear(size, size) for _ in range(num_heads)]
        self.blocks = nn.ModuleList(self.linears)
        for linear in self.linears:
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)
        self.register_buffer("weight", weight.detach().float())
        self.register_buffer("vocabulary", vocabulary)
        known = torch.zeros(vocab_size, dtype=torch.bool)
        known[vocabulary] = True
        self.register_buffer("known", known)

    def forward(self, states: Tensor, number: int) -> Tensor:
        """``[..., h]`` states of the target -> what its output matrix is given for guess ``number``."""
        return states + functional.silu(self.blocks[number](states))


def medusa_loss(heads: MedusaHeads, batch: TrainingBatch, decay: float = 0.8) -> tuple[Tensor, float]:
    """As `unrolled_loss`: cross-entropy against the target's distribution, and how often head 0 was right."""
    target = TargetChoice(heads.weight, heads.known, batch)
    total: Tensor = torch.zeros(())
    first_right = 0.0
    for number in range(len(heads.blocks)):
        asks, known = target.wanted(number)
        tokens = batch.shifted(2 + number)
        states = heads(batch.last[known].float(), number)
        loss, hits = HeadLoss.apply(
            states, heads.weight, target.probabilities, target.rows(known, 1 + number), target.draft_ids(tokens[known])
        )
        total = total + decay**number * loss / max(1, int(known.sum()))
        if number == 0:
            first_right = float(hits) / max(1, int(asks.sum()))
    return total, first_right


@torch.no_grad()
def judge_medusa(heads: MedusaHeads, batches: list[TrainingBatch]) -> list[float]:
    """Share of places where the first ``i`` guesses are all right, for each ``i``."""
    right = torch.zeros(len(heads.blocks))
    asked = torch.zeros(len(heads.blocks))
    for batch in batches:
        so_far = torch.ones(batch.last.shape[:2], dtype=torch.bool)
        for number in range(len(heads.blocks)):
            asks = batch.asks(number)
            best = (heads(batch.last[asks].float(), number) @ heads.weight.T).argmax(-1)
            correct = torch.zeros_like(so_far)
            correct[asks] = heads.vocabulary[best] == batch.shifted(2 + number)[asks]
            so_far &= correct
            right[number] += so_far[asks].sum()
            asked[number] += asks.sum()
    return cast(list[float], (right / asked.clamp_min(1)).tolist())

"""How good a head is on conversations that it has not seen, before it is tried in the real loop."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from llmopt_plugins.speculation.eagle.model import Eagle3Head
from llmopt_plugins.speculation.training.corpus import TrainingBatch
from llmopt_plugins.speculation.training.unroll import unroll

_WIDTH = 4


@dataclass(slots=True)
class HeldOutScore:
    """Acceptance with the target's own text given, per draft position."""

    reached: list[float]  # P_i: share of places where the first i guesses of a chain are all right
    among_best: list[float]  # share of places where the token is among the 4 best, given that the chain got there
    num_tokens: int  # places judged

    @property
    def tokens_per_round(self) -> float:
        """Of a chain as long as `reached`, the target's own token included."""
        return 1 + sum(self.reached)

    @property
    def conditional(self) -> list[float]:
        """Acceptance of each position where the one before was accepted."""
        before = [1.0, *self.reached]
        return [p / max(q, 1e-9) for p, q in zip(self.reached, before, strict=False)]


@torch.no_grad()
def judge(head: Eagle3Head, embedding: Tensor, batches: Iterable[TrainingBatch], depth: int = 5) -> HeldOutScore:
    """Teacher-forced acceptance of chains of greedy guesses.

    As long as a chain is right the true tokens are its own, so this is what the real loop would accept, bar rounding.

    :param embedding: ``[vocab_size, h]`` of the target.
    """
    right, near, asked = torch.zeros(depth), torch.zeros(depth), torch.zeros(depth)
    arrived = torch.zeros(depth)
    with torch.autocast("cpu", torch.bfloat16):
        for batch in batches:
            so_far = torch.ones(batch.taps.shape[:2], dtype=torch.bool)
            for level, output in enumerate(unroll(head, embedding, batch, depth)):
                asks = batch.asks(level)
                logits = head.logits(output[asks])
                best = head.target_ids(logits.topk(min(_WIDTH, logits.shape[-1]), dim=-1).indices)
                tokens = batch.shifted(2 + level)[asks][:, None]
                arrived[level] += so_far[asks].sum()
                near[level] += ((best == tokens).any(-1) & so_far[asks]).sum()
                correct = torch.zeros_like(so_far)
                correct[asks] = (best[:, :1] == tokens)[:, 0]
                so_far &= correct
                right[level] += so_far[asks].sum()
                asked[level] += asks.sum()
    return HeldOutScore((right / asked.clamp_min(1)).tolist(), (near / arrived.clamp_min(1)).tolist(), int(asked[0]))

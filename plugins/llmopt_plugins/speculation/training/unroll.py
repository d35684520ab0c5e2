"""EAGLE-3's training-time test: the head runs on its own outputs while it learns, as it will when it drafts.

Level 0 gives every feature ``t`` the true taps of token ``t`` and token ``t+1``. Level ``s`` gives it what level
``s-1`` made there and the true token ``t+1+s``. A feature at level ``s`` sees the level-0 keys up to its own, as all of
those will be true when it is drafted, and the keys that its own line had at levels 1 to ``s``::

    level 0   k0 k1 k2 ... kt
    level 1                    kt'
    level 2                        kt''      <- query
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from llmopt_plugins.speculation.eagle.model import Eagle3Head
from llmopt_plugins.speculation.training.corpus import TrainingBatch

_ROWS_AT_ONCE = 128  # of logits: 4 MB at 8192 tokens


def unroll(head: Eagle3Head, embedding: Tensor, batch: TrainingBatch, depth: int) -> Iterator[Tensor]:
    """The head's output at each level: ``[B, M, h]``, before its norm.

    :param embedding: ``[vocab_size, h]`` of the target.
    """
    # float32 between the matrices, also under autocast: norms are several times faster when nothing is mixed
    hidden = head.fuse(batch.taps.to(embedding.dtype)).float()
    positions = torch.arange(hidden.shape[1])[None].expand(hidden.shape[:2])
    attend = UnrolledAttention()
    for level in range(depth):
        tokens = batch.shifted(1 + level)
        output = head(functional.embedding(tokens, embedding), hidden, positions + level, attend)
        yield output
        hidden = head.feedback(output)


class UnrolledAttention:
    """`Attend` for one unrolled batch: called once per level, it keeps the keys of all levels."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []  # per level [B, kv_heads, 1, M, d]
        self._values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        queries, heads = q.shape[1], q.shape[2]
        group = heads // k.shape[2]
        q = q.transpose(1, 2)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if not self._keys:
            seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            self._keys.append(k.unsqueeze(2))
            self._values.append(v.unsqueeze(2))
            return seen.transpose(1, 2)
        self._keys.append(k.unsqueeze(2))
        self._values.append(v.unsqueeze(2))
        q = q.unflatten(1, (-1, group)) / math.sqrt(q.shape[-1])  # [B, kv_heads, group, M, d]
        above = torch.ones(queries, queries, dtype=torch.bool).triu(1)
        first = (q @ self._keys[0].transpose(-1, -2)).masked_fill(above, -math.inf)
        own = [(q * key).sum(-1, keepdim=True) for key in self._keys[1:]]
        weights = torch.cat([first, *own], dim=-1).softmax(-1).to(v.dtype)
        seen = weights[..., :queries] @ self._values[0]
        for level, value in enumerate(self._values[1:]):
            seen = seen + weights[..., queries + level, None] * value
        return seen.flatten(1, 2).transpose(1, 2)


def unrolled_loss(
    head: Eagle3Head, embedding: Tensor, batch: TrainingBatch, depth: int, decay: float = 0.8
) -> tuple[Tensor, float]:
    """Cross-entropy against the target's distribution over the draft vocabulary, and how often level 0 was right.

    Tokens outside the draft vocabulary are left out of the loss and count as wrong.

    :param decay: weight of a level relative to the one before.
    """
    target = TargetChoice(head.lm_head.weight, head.t2d, batch)
    total: Tensor = torch.zeros(())
    first_right = 0.0
    for level, output in enumerate(unroll(head, embedding, batch, depth)):
        asks, known = target.wanted(level)
        tokens = batch.shifted(2 + level)
        num_known = max(1, int(known.sum()))
        said = target.draft_ids(tokens[known])
        loss, hits = HeadLoss.apply(
            head.norm(output[known]), head.lm_head.weight, target.probabilities, target.rows(known, 1 + level), said
        )
        total = total + decay**level * loss / num_known
        if level == 0:
            first_right = float(hits) / max(1, int(asks.sum()))
    return total, first_right


class HeadLoss(torch.autograd.Function):
    """Cross-entropy through a head that does not learn: logits live for a few rows at a time, in the cache.

    Of about as much arithmetic, the plain way spends most of its time on moving ``[R, draft_vocab_size]`` around.
    """

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, probabilities: Tensor, rows: Tensor, said: Tensor
    ) -> tuple[Tensor, Tensor]:
        """:param states: ``[R, h]``, after the norm.
        :param weight: ``[V, h]``
        :param probabilities: ``[P, V]`` bf16; row ``i`` of ``states`` is compared with ``probabilities[rows[i]]``.
        :param said: ``[R]`` int64, the draft ids that came in truth.
        :returns: the sum of the losses, and how many rows had ``said`` as their best.
        """
        dtype = probabilities.dtype
        weight = weight.to(dtype)
        grad = torch.empty(states.shape, dtype=torch.float32)
        total = torch.zeros(())
        hits = torch.zeros((), dtype=torch.int64)
        for start in range(0, len(states), _ROWS_AT_ONCE):
            part = slice(start, start + _ROWS_AT_ONCE)
            logits = (states[part].to(dtype) @ weight.T).float()
            hits += (logits.gather(1, said[part, None])[:, 0] >= logits.amax(-1)).sum()
            wanted = probabilities[rows[part]]
            normaliser = logits.logsumexp(-1)
            logits -= normaliser[:, None]
            total -= (wanted * logits).sum(dtype=torch.float32)
            logits.exp_().sub_(wanted)
            grad[part] = logits.to(dtype) @ weight
        ctx.save_for_backward(grad)
        ctx.dtype = states.dtype
        return total, hits

    @staticmethod
    def backward(ctx: Any, outer: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return (grad * outer).to(ctx.dtype), None, None, None, None


class TargetChoice:
    """What the target would say, over the draft vocabulary, wherever a guess is compared with it.

    :param weight: ``[V, h]`` the target's output rows of the draft vocabulary.
    :param known: ``[vocab_size]`` bool, the target's ids that these are.
    """

    def __init__(self, weight: Tensor, known: Tensor, batch: TrainingBatch) -> None:
        places = torch.arange(batch.last.shape[1])[None]
        fed = (places >= batch.num_prompt[:, None] - 1) & (places < (batch.num_tokens - 1)[:, None])
        self._batch, self._known = batch, known
        self._rows = torch.full(fed.shape, -1)
        self._rows[fed] = torch.arange(int(fed.sum()))
        self._draft_ids = known.cumsum(0) - 1
        states = batch.last[fed]
        self.probabilities = torch.empty(len(states), len(weight), dtype=states.dtype)
        """``[P, V]`` bf16"""
        with torch.no_grad():
            weight = weight.to(states.dtype)
            for start in range(0, len(states), _ROWS_AT_ONCE):
                part = slice(start, start + _ROWS_AT_ONCE)
                self.probabilities[part] = (states[part] @ weight.T).float().softmax(-1)

    def wanted(self, level: int) -> tuple[Tensor, Tensor]:
        """Features that are asked for a token of an answer at this level, and those of them that can be taught.

        The others' tokens are outside the draft vocabulary, or the target's state there is unknown, as the last token
        of a conversation was never fed.
        """
        batch = self._batch
        asks = batch.asks(level)
        is_fed = (torch.arange(asks.shape[1]) + 1 + level)[None] < (batch.num_tokens - 1)[:, None]
        return asks, asks & is_fed & self._known[batch.shifted(2 + level)]

    def rows(self, features: Tensor, ahead: int) -> Tensor:
        """Which distributions belong to features ``t + ahead`` of those marked in ``[B, M]``."""
        row, place = features.nonzero(as_tuple=True)
        return self._rows[row, place + ahead]

    def draft_ids(self, tokens: Tensor) -> Tensor:
        """Ids of the target that are known -> ids of the draft vocabulary."""
        return self._draft_ids[tokens]

"""A draft head through torch: any device, beside the model's own forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from llmopt.ops.attention import PagedAttention
from llmopt_plugins.speculation.eagle.level import Guesses, Level
from llmopt_plugins.speculation.eagle.search import Growth, Nodes, Pairs, search_levels

if TYPE_CHECKING:
    from llmopt.kv_cache import KVCache
    from llmopt_plugins.speculation.eagle.model import Eagle3Head
    from llmopt_plugins.speculation.eagle.model1 import Eagle1Head


class TorchHead:
    """Runs the module.

    :param embedding: looks up tokens for a head without an embedding of its own.
    :param kv_cache: one layer, for this head alone.
    """

    def __init__(self, head: Eagle3Head | Eagle1Head, embedding: nn.Module, kv_cache: KVCache) -> None:
        self.head = head
        self._embedding = head.embed_tokens or embedding
        layer, shape = kv_cache.layers[0], kv_cache.shapes[0]
        self._attention = PagedAttention.create([layer.key], [layer.value], dtype=shape.dtype)
        self._device, self._dtype = shape.device, shape.dtype
        self._block_size = kv_cache.block_size
        self._scale = head.config.head_dim**-0.5

    @torch.inference_mode(False)
    @torch.no_grad()
    def __call__(self, level: Level, hidden: Tensor, top: int, *, are_features: bool = False) -> Guesses | None:
        plan = (level.block_tables, level.seq_lens, level.cu_seqlens_q, level.slot_mapping)
        if level.draft_masks is None:
            self._attention.plan(*plan)
        else:
            self._attention.plan(*plan, level.num_drafts, level.draft_masks)
        ids = torch.from_numpy(level.token_ids).to(self._device)
        positions = torch.from_numpy(level.positions).to(self._device)
        hidden = hidden.to(self._device, self._dtype)
        if are_features:
            hidden = self.head.fuse(hidden)
        output = self.head(self._embedding(ids)[None], hidden[None], positions[None], self._attend)[0]
        if not top:
            return None
        output = output[torch.from_numpy(level.logits_indices).to(self._device)]
        best = self.head.logits(output).float().log_softmax(dim=-1).topk(top)
        found = best.indices + self.head.d2t[best.indices]
        return Guesses(found.cpu().numpy(), best.values.cpu().numpy(), self.head.feedback(output))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._attention.write(0, key[0], value[0])
        return self._attention(0, query[0], scale=self._scale)[None]

    def keep(self, hidden: Tensor, rows: Sequence[int], taps: Sequence[int]) -> Tensor:
        return hidden[list(rows)][:, list(taps)]

    def search(self, pairs: Pairs, growth: Growth) -> tuple[list[Nodes], int]:
        return search_levels(self, pairs, growth, self._block_size)

    def close(self) -> None:
        del self._attention, self.head

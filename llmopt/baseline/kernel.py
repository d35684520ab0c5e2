"""Layer 5, plain: the model's own forward, with attention over the block pool inside."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmopt.hf.executor import HfExecute
from llmopt.ops.attention import PagedAttention

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from llmopt.batch import Batch
    from llmopt.kv_cache import KVCache, LayerKV

__all__ = ["BaselineAttend", "BaselineExecute"]

BaselineExecute = HfExecute


class BaselineAttend:
    """Paged attention: the native op where it serves device and dtype, the torch reference elsewhere."""

    def __init__(self, kv_cache: KVCache) -> None:
        layers: dict[tuple[torch.device, torch.dtype, torch.dtype], list[LayerKV]] = {}
        for layer in kv_cache.layers.values():
            dtype = kv_cache.shapes[layer.index].dtype
            layers.setdefault((layer.key.device, layer.key.dtype, dtype), []).append(layer)
        self._groups: list[PagedAttention] = []  # layers that share device and dtypes
        self._place: dict[int, tuple[PagedAttention, int]] = {}  # layer index -> its group, its number there
        for (_, _, dtype), members in layers.items():
            is_uniform = all(m.key.shape[:3] == m.value.shape[:3] for m in members)
            group = PagedAttention.create(
                [m.key for m in members],
                [m.value for m in members],
                dtype=dtype,
                native_mode=None if is_uniform else "off",
            )
            self._groups.append(group)
            for number, member in enumerate(members):
                self._place[member.index] = (group, number)
        # why the torch reference is used somewhere; None when all layers run natively
        self.why_reference = next((g.why_reference for g in self._groups if g.why_reference), None)

    def plan(self, batch: Batch) -> None:
        trees = (batch.num_drafts, batch.draft_masks) if batch.draft_masks.size else ()
        for group in self._groups:
            group.plan(batch.block_tables, batch.seq_lens, batch.cu_seqlens_q, batch.slot_mapping, *trees)

    def write(self, layer: LayerKV, key: Tensor, value: Tensor) -> None:
        group, number = self._place[layer.index]
        group.write(number, key, value)

    def __call__(
        self,
        layer: LayerKV,
        query: Tensor,
        *,
        scale: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        group, number = self._place[layer.index]
        return group(
            number, query, scale=scale, sliding_window=sliding_window or 0, softcap=softcap or 0.0, sinks=sinks
        )

    def close(self) -> None:
        """Let go of the pool's tensors."""
        self._groups.clear()
        self._place.clear()

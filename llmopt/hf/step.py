"""One forward of a Hugging Face model over the block pool: the meeting place of its cache and attention calls."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from llmopt.errors import UnsupportedModelError
from llmopt.hf.attention_options import AttentionOptions
from llmopt.ops.attention_reference import masked_attention, visible_keys

if TYPE_CHECKING:
    from llmopt.batch import Batch
    from llmopt.kv_cache import KVCache
    from llmopt.stages import Attend


def pack(states: Tensor) -> Tensor:
    """View ``[1, H, T, D]`` or ``[B, H, 1, D]`` as ``[T, H, D]``."""
    return states[0].transpose(0, 1) if states.shape[0] == 1 else states[:, :, 0]


def unpack(states: Tensor, like: Tensor) -> Tensor:
    """View ``[T, H, D]`` as ``[1, T, H, D]`` or ``[B, 1, H, D]``, the shape that belongs to ``like [B, H, q, D]``."""
    return states.unsqueeze(0) if like.shape[0] == 1 else states.unsqueeze(1)


class PagedStep:
    """Keys and values go to the blocks; attention reads them there.

    Layers that share another layer's keys call attention with that layer's tensor, so the tensor says which blocks to
    read.
    """

    def __init__(self, kv_cache: KVCache, attend: Attend) -> None:
        self.kv_cache = kv_cache
        self.attend = attend
        self._layer_of: dict[int, int] = {}  # id of a key tensor of this step -> layer that stored it
        self._keep: list[Tensor] = []  # keeps those tensors, and so their ids, alive

    def begin(self, batch: Batch) -> None:
        """Plan the index work of a batch."""
        self.attend.plan(batch)

    def end(self) -> None:
        """Let go of the step's tensors."""
        self._layer_of.clear()
        self._keep.clear()

    def update(self, key: Tensor, value: Tensor, layer_index: int) -> tuple[Tensor, Tensor]:
        self.attend.write(self.kv_cache.layers[layer_index], pack(key), pack(value))
        self._layer_of[id(key)] = layer_index
        self._keep.append(key)
        return key, value

    def attention(self, module: Any, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        layer = self.kv_cache.layers[self._layer_of[id(key)]]
        scale, sliding_window, softcap, sinks = options
        out = self.attend(layer, pack(query), scale=scale, sliding_window=sliding_window, softcap=softcap, sinks=sinks)
        return unpack(out, query)

    def make_mask(self, mask_function: Any) -> Tensor | None:
        return None  # the block tables say who sees whom

    def check_mask(self, mask: Tensor, sliding_window: int | None) -> None:
        self.refuse("attention is called with a mask that the engine did not make")

    def refuse(self, why: str) -> NoReturn:
        raise UnsupportedModelError(why)


class GatherStep(PagedStep):
    """For models whose attention modules change the keys after the cache (latent attention): blocks store what the
    cache was given, and each step hands over the whole history of every row, one after the other."""

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        self.tables = [row[: -(-n // self.kv_cache.block_size)].tolist() for row, n in
                       zip(batch.block_tables, batch.seq_lens.tolist(), strict=True)]  # fmt: skip
        self.seq_lens: list[int] = batch.seq_lens.tolist()
        self.query_lens: list[int] = batch.num_scheduled.tolist()
        masks: list[int] = batch.draft_masks.tolist()
        bounds: list[int] = batch.cu_seqlens_q.tolist()
        self.draft_masks = [masks[start:end] for start, end in itertools.pairwise(bounds)]

    def update(self, key: Tensor, value: Tensor, layer_index: int) -> tuple[Tensor, Tensor]:
        self.attend.write(self.kv_cache.layers[layer_index], pack(key), pack(value))
        rows = [
            self.kv_cache.gather(layer_index, table, length)
            for table, length in zip(self.tables, self.seq_lens, strict=True)
        ]
        return torch.cat([k for k, _ in rows], dim=1).unsqueeze(0), torch.cat([v for _, v in rows], dim=1).unsqueeze(0)

    def attention(self, module: Any, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        queries = pack(query).transpose(0, 1)[None].split(self.query_lens, dim=2)  # [1, Hq, q, D] each
        keys, values = key.split(self.seq_lens, dim=2), value.split(self.seq_lens, dim=2)
        rows = zip(queries, keys, values, self.draft_masks, strict=True)
        outs = [dense_attention(q, k, v, options, masks) for q, k, v, masks in rows]
        return unpack(torch.cat(outs, dim=2)[0].transpose(0, 1).contiguous(), query)


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions, draft_masks: Sequence[int] = ()
) -> Tensor:
    """Causal attention of one row; the queries are the last of the keys' positions.

    :param query: ``[1, Hq, q, D]``; key ``[1, Hkv, k, D]``, value ``[1, Hkv, k, Dv]``.
    :param draft_masks: one per query where drafts are trees: see `visible_keys`.
    :returns: ``[1, Hq, q, Dv]``.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    if any(draft_masks):
        visible = visible_keys(draft_masks, num_keys, options.sliding_window or 0).to(query.device)
    else:
        positions = torch.arange(num_keys, device=query.device)
        distance = positions[num_keys - num_queries :, None] - positions
        visible = distance >= 0
        if options.sliding_window is not None:
            visible &= distance < options.sliding_window
    return masked_attention(query, key, value, visible, options.scale, options.softcap or 0.0, options.sinks)

"""Paged attention for the hot path: plan once per step, write and attend once per layer.

    attention = PagedAttention.create(key_caches, value_caches)       # once; native or reference is decided here
    attention.plan(block_tables, seq_lens, cu_seqlens_q, slots)       # once per step, numpy arrays
    attention.write(layer, key, value)                                # per layer
    out = attention(layer, query, scale=head_dim**-0.5)               # per layer

`paged_attention` and `write_kv` are the plain torch functions with the same meaning.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from llmopt import native
from llmopt.ops.attention_reference import paged_attention, write_kv
from llmopt.ops.quantized_rows import SCALE_BYTES

__all__ = ["NativePagedAttention", "PagedAttention", "ReferencePagedAttention", "paged_attention", "write_kv"]

IntArray = npt.NDArray[np.int32]
SlotArray = npt.NDArray[np.int64]
MaskArray = npt.NDArray[np.uint64]

# Steps of at most this many tokens keep a template of their output.
MAX_TEMPLATE_TOKENS = 64
NATIVE_DTYPES = (torch.float32, torch.bfloat16)


class PagedAttention(ABC):
    """Attention over the block pools of all layers.

    T tokens and B requests of the step, M blocks per table row, Hq query and Hkv key heads, S block size.
    An object serves one step at a time: it is not for concurrent use by several threads.
    """

    why_reference: str | None = None  # why the native op is not used; None when it is

    @staticmethod
    def create(
        key_caches: Sequence[Tensor],
        value_caches: Sequence[Tensor],
        *,
        dtype: torch.dtype | None = None,
        native_mode: str | None = None,
        num_threads: int | None = None,
    ) -> PagedAttention:
        """Choose the native op or the torch reference, once.

        :param key_caches: per layer [num_blocks, Hkv, S, D], contiguous. Layers may differ in every size but not in
            dtype and device. Quantized ones are int8 [num_blocks, Hkv, S, D + 2] (`llmopt.ops.quantized_rows`).
        :param value_caches: per layer [num_blocks, Hkv, S, Dv], contiguous; int8 as for keys.
        :param dtype: of queries, new keys and values and outputs; None: that of the caches. int8 caches need it.
        :param native_mode: ``require``, ``auto`` or ``off``; None reads ``LLMOPT_NATIVE``.
        :param num_threads: threads of the native op; None takes ``torch.get_num_threads()`` now.
        :raises ImportError: native is required and the extension is missing.
        :raises ValueError: caches do not fit together, or native is required and cannot serve their device or dtype.
        """
        _check_caches(key_caches, value_caches)
        dtype = dtype or key_caches[0].dtype
        if not dtype.is_floating_point or key_caches[0].dtype not in (dtype, torch.int8):
            raise ValueError(f"the caches are {key_caches[0].dtype} and attention is to be in {dtype}.")
        mode = native.mode(native_mode)
        core = native.core(mode)
        reason = native.why_not(mode) or _unsupported(key_caches[0], dtype)
        if core is not None and reason is None:
            return NativePagedAttention(core, key_caches, value_caches, dtype, num_threads or torch.get_num_threads())
        assert reason is not None
        if mode == "require":
            raise ValueError(f"LLMOPT_NATIVE=require, but {reason}.")
        native.log_fallback("paged attention", reason)
        return ReferencePagedAttention(key_caches, value_caches, reason)

    @abstractmethod
    def plan(
        self,
        block_tables: IntArray,
        seq_lens: IntArray,
        cu_seqlens_q: IntArray,
        slot_mapping: SlotArray | None = None,
        num_drafts: IntArray | None = None,
        draft_masks: MaskArray | None = None,
    ) -> None:
        """Prepare a step. The arrays are kept by reference: leave them unchanged until the step is over.

        :param block_tables: [B, M] int32, rows contiguous; may be a view into a larger array.
        :param seq_lens: [B] int32, keys of each request, this step's tokens included.
        :param cu_seqlens_q: [B + 1] int32, starts with 0 and never falls.
        :param slot_mapping: [T] int64, place of each new token, -1 drops it; None when nothing is written.
        :param num_drafts: [B] int32, how many of a request's last tokens are drafts; with ``draft_masks``.
        :param draft_masks: [T] uint64, which drafts of its request each draft sees (`llmopt.batch.Batch`); None when
            no drafts are trees.
        :raises ValueError: shapes or values that do not fit together (native op only).
        """

    @abstractmethod
    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store this step's keys [T, Hkv, D] and values [T, Hkv, Dv], dtype of attention, any token and head strides.

        Tokens past the end of ``slot_mapping`` are not written.
        """

    @abstractmethod
    def __call__(
        self,
        layer: int,
        query: Tensor,
        *,
        scale: float,
        sliding_window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend. See `paged_attention` for the meaning of the options.

        :param query: [T, Hq, D], dtype of attention, any token and head strides.
        :returns: [T, Hq, Dv], contiguous; rows past ``cu_seqlens_q[-1]`` are zeros.
        :raises ValueError: a size that does not fit the cache or the plan.
        """


class ReferencePagedAttention(PagedAttention):
    """The torch reference: any device and float dtype."""

    def __init__(self, key_caches: Sequence[Tensor], value_caches: Sequence[Tensor], why: str | None = None) -> None:
        self.why_reference = why
        self._caches = list(zip(key_caches, value_caches, strict=True))
        self._device = key_caches[0].device

    def plan(
        self,
        block_tables: IntArray,
        seq_lens: IntArray,
        cu_seqlens_q: IntArray,
        slot_mapping: SlotArray | None = None,
        num_drafts: IntArray | None = None,
        draft_masks: MaskArray | None = None,
    ) -> None:
        # Lengths stay on the host, where they are read; tables and slots index on the device.
        self._block_tables = torch.from_numpy(block_tables).to(self._device)
        self._seq_lens = torch.from_numpy(seq_lens)
        self._cu_seqlens_q = torch.from_numpy(cu_seqlens_q)
        self._slots = None if slot_mapping is None else torch.from_numpy(slot_mapping).to(self._device)
        self._draft_masks: list[int] = [] if draft_masks is None else draft_masks.tolist()

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        if self._slots is None:
            raise ValueError("write() needs the slot_mapping that plan() was not given.")
        write_kv(key, value, *self._caches[layer], self._slots)

    def __call__(
        self,
        layer: int,
        query: Tensor,
        *,
        scale: float,
        sliding_window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return paged_attention(
            query,
            *self._caches[layer],
            self._block_tables,
            self._seq_lens,
            self._cu_seqlens_q,
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks,
            draft_masks=self._draft_masks,
        )


class NativePagedAttention(PagedAttention):
    """The C++ op: CPU, float32 or bfloat16. Tensors travel as addresses, a call costs about 2 us."""

    def __init__(
        self,
        core: ModuleType,
        key_caches: Sequence[Tensor],
        value_caches: Sequence[Tensor],
        dtype: torch.dtype,
        num_threads: int,
    ) -> None:
        self._dtype = dtype
        is_quantized = key_caches[0].dtype == torch.int8
        extra = SCALE_BYTES if is_quantized else 0
        self._num_threads = num_threads
        self._caches = (list(key_caches), list(value_caches))  # keeps the memory alive
        self._layers = [
            core.LayerCache(
                k.data_ptr(),
                v.data_ptr(),
                *k.shape[:3],
                k.shape[3] - extra,
                v.shape[3] - extra,
                dtype == torch.bfloat16,
                is_quantized,
            )
            for k, v in zip(key_caches, value_caches, strict=True)
        ]
        self._head_dims_v = [v.shape[3] - extra for v in value_caches]
        # torch.empty_like of these is the cheapest way to a new output: (T, Hq, Dv) -> tensor, for small T
        self._output_templates: dict[tuple[int, int, int], Tensor] = {}
        self._plan = core.StepPlan()
        self._write_kv = core.write_kv
        self._paged_attention = core.paged_attention
        self.plan = self._plan.update  # type: ignore[method-assign]  # one call less per step

    def plan(
        self,
        block_tables: IntArray,
        seq_lens: IntArray,
        cu_seqlens_q: IntArray,
        slot_mapping: SlotArray | None = None,
        num_drafts: IntArray | None = None,
        draft_masks: MaskArray | None = None,
    ) -> None:
        self._plan.update(block_tables, seq_lens, cu_seqlens_q, slot_mapping, num_drafts, draft_masks)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        key_token_stride, key_head_stride, key_last_stride = key.stride()
        value_token_stride, value_head_stride, value_last_stride = value.stride()
        dtype = self._dtype
        if key_last_stride != 1 or value_last_stride != 1 or key.dtype is not dtype or value.dtype is not dtype:
            key, value = self._ready(key), self._ready(value)
            key_token_stride, key_head_stride, _ = key.stride()
            value_token_stride, value_head_stride, _ = value.stride()
        num_tokens, num_heads, head_dim = key.shape
        num_tokens_v, num_heads_v, head_dim_v = value.shape
        if num_tokens_v != num_tokens or num_heads_v != num_heads:
            raise ValueError(f"key is {tuple(key.shape)} but value is {tuple(value.shape)}; both are [T, Hkv, ...].")
        self._write_kv(
            self._plan,
            self._layers[layer],
            num_tokens,
            num_heads,
            head_dim,
            head_dim_v,
            key.data_ptr(),
            key_token_stride,
            key_head_stride,
            value.data_ptr(),
            value_token_stride,
            value_head_stride,
            self._num_threads,
        )

    def __call__(
        self,
        layer: int,
        query: Tensor,
        *,
        scale: float,
        sliding_window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        token_stride, head_stride, last_stride = query.stride()
        if query.dtype is not self._dtype or last_stride != 1:
            query = self._ready(query)
            token_stride, head_stride, _ = query.stride()
        num_tokens, num_heads, head_dim = query.shape
        shape = (num_tokens, num_heads, self._head_dims_v[layer])
        template = self._output_templates.get(shape)
        out = torch.empty(shape, dtype=self._dtype) if template is None else torch.empty_like(template)
        if template is None and num_tokens <= MAX_TEMPLATE_TOKENS:
            self._output_templates[shape] = out.clone()
        sinks_address = 0
        if sinks is not None:
            sinks = sinks.float().contiguous()  # no copy when it is so already
            if sinks.numel() != num_heads:
                raise ValueError(f"sinks has {sinks.numel()} values but the query has {num_heads} heads.")
            sinks_address = sinks.data_ptr()
        self._paged_attention(
            self._plan,
            self._layers[layer],
            num_tokens,
            num_heads,
            head_dim,
            query.data_ptr(),
            token_stride,
            head_stride,
            out.data_ptr(),
            scale,
            sliding_window,
            softcap,
            sinks_address,
            self._num_threads,
        )
        return out

    def _ready(self, tensor: Tensor) -> Tensor:
        if tensor.dtype is not self._dtype:
            raise ValueError(f"the tensor is {tensor.dtype} but attention is in {self._dtype}; they must agree.")
        return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _unsupported(cache: Tensor, dtype: torch.dtype) -> str | None:
    if cache.device.type != "cpu":
        return f"the native op serves the CPU and the cache is on {cache.device}"
    if dtype not in NATIVE_DTYPES:
        return f"the native op serves {' and '.join(map(str, NATIVE_DTYPES))} and the cache is {dtype}"
    return None


def _check_caches(key_caches: Sequence[Tensor], value_caches: Sequence[Tensor]) -> None:
    if not key_caches or len(key_caches) != len(value_caches):
        raise ValueError(f"{len(key_caches)} key caches and {len(value_caches)} value caches; one pair per layer.")
    first = key_caches[0]
    for layer, (key, value) in enumerate(zip(key_caches, value_caches, strict=True)):
        if key.dim() != 4 or value.dim() != 4 or key.shape[:3] != value.shape[:3]:
            raise ValueError(
                f"layer {layer}: key cache {tuple(key.shape)} and value cache {tuple(value.shape)} must both be"
                " [num_blocks, num_kv_heads, block_size, head_dim] and agree in the first three."
            )
        for name, cache in (("key", key), ("value", value)):
            if cache.dtype != first.dtype or cache.device != first.device:
                raise ValueError(
                    f"layer {layer}: {name} cache is {cache.dtype} on {cache.device},"
                    f" layer 0 is {first.dtype} on {first.device}; they must agree."
                )
            if not cache.is_contiguous():
                raise ValueError(f"layer {layer}: {name} cache has strides {cache.stride()}; it must be contiguous.")

"""The tensors of the KV pool: a pair of blocked tensors for each layer that stores keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from llmopt import native
from llmopt.huge_pages import ask_for_huge_pages
from llmopt.ops.quantized_rows import SCALE_BYTES, dequantize_rows, rotate_rows

if TYPE_CHECKING:
    from llmopt.batch import AcceptedTokens, Batch

KVStorage: TypeAlias = "Callable[[tuple[int, ...], torch.dtype, torch.device], Tensor]"  # makes one tensor of the pool


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores per token."""

    num_key_heads: int
    key_dim: int
    num_value_heads: int  # differs from the keys for latent attention
    value_dim: int
    dtype: torch.dtype  # of new keys and values, and of queries
    device: torch.device
    is_quantized: bool = False  # rows are int8 with a scale, keys rotated: see `llmopt.ops.quantized_rows`

    @property
    def stored_dtype(self) -> torch.dtype:
        """What the tensors of the pool are made of."""
        return torch.int8 if self.is_quantized else self.dtype

    @property
    def key_width(self) -> int:
        """Elements of ``stored_dtype`` that a token's key takes for one head."""
        return self.key_dim + (SCALE_BYTES if self.is_quantized else 0)

    @property
    def value_width(self) -> int:
        """The same for its value."""
        return self.value_dim + (SCALE_BYTES if self.is_quantized else 0)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's key and value."""
        count = self.num_key_heads * self.key_width + self.num_value_heads * self.value_width
        return count * self.stored_dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Keys and values of one layer, ``stored_dtype``. Who copies blocks of both copies all that there is of them."""

    index: int  # the layer's place in the model
    key: Tensor  # [num_blocks, num_key_heads, block_size, key_width]
    value: Tensor  # [num_blocks, num_value_heads, block_size, value_width]


class KVCache:
    """All layers' blocks. A block id means the same place in every layer.

    :param shapes: layer index -> what the layer stores; layers without KV are absent.
    :param storage: makes the tensors; None: memory of this process.
    """

    def __init__(
        self,
        shapes: Mapping[int, LayerShape],
        num_blocks: int,
        block_size: int,
        storage: KVStorage | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.shapes = dict(shapes)
        self.layers: dict[int, LayerKV] = {}
        self._mover: Callable[[list[int], list[int]], None] | None = None  # made when it is needed
        make = storage or _own_memory
        with torch.inference_mode(False):  # tensors made in that mode could not be written to outside of it
            for i, s in self.shapes.items():
                key = (num_blocks, s.num_key_heads, block_size, s.key_width)
                value = (num_blocks, s.num_value_heads, block_size, s.value_width)
                layer = LayerKV(
                    index=i,
                    key=make(key, s.stored_dtype, s.device),
                    value=make(value, s.stored_dtype, s.device),
                )
                ask_for_huge_pages(layer.key)
                ask_for_huge_pages(layer.value)
                self.layers[i] = layer

    @staticmethod
    def bytes_per_token(shapes: Mapping[int, LayerShape]) -> int:
        """Bytes that one token takes over all layers."""
        return sum(s.bytes_per_token for s in shapes.values())

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block in every layer."""
        for layer in self.layers.values():
            layer.key[target] = layer.key[source]
            layer.value[target] = layer.value[source]

    def keep_paths(self, batch: Batch, accepted: AcceptedTokens) -> None:
        """Bring the KV of accepted drafts that are trees to where it belongs: one behind the other.

        :param accepted: what `Verify` kept of the drafts of this batch; nothing is moved without its ``paths``.
        """
        # the first drafts lie where they belong; paths ascend, so that their last entry tells
        moved = [
            (request, path)
            for request, path in zip(accepted.requests, accepted.paths or (), strict=False)
            if path and path[-1] != len(path) - 1
        ]
        if not moved:
            return
        sources: list[int] = []
        targets: list[int] = []
        slots, ends, counts = batch.slot_mapping.tolist(), batch.cu_seqlens_q.tolist(), batch.num_drafts.tolist()
        row_of = {request: row for row, request in enumerate(batch.requests)}
        for request, path in moved:
            row = row_of[request]
            first = ends[row + 1] - counts[row]
            for place, draft in enumerate(path):
                if draft != place:
                    sources.append(slots[first + draft])
                    targets.append(slots[first + place])
        if sources[0] >= 0:
            self.move(sources, targets)

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy the KV of single tokens in every layer, in this order.

        :param sources: ``block * block_size + offset`` of each token.
        :param targets: where it goes.
        """
        if not self.layers:
            return
        if self._mover is None:
            self._mover = _make_mover(self.layers.values(), self.block_size)
        self._mover(sources, targets)

    def gather(self, layer_index: int, block_table: list[int], num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return one request's keys ``[num_key_heads, num_tokens, key_dim]`` and values, copied out of the blocks.

        Of the dtype that attention reads, also where the pool stores them quantized. Tokens whose block was given back
        have any content.
        """
        layer = self.layers[layer_index]
        table = torch.as_tensor(block_table[: -(-num_tokens // self.block_size)], device=layer.key.device)
        key = layer.key[table].transpose(0, 1).flatten(1, 2)[:, :num_tokens]
        value = layer.value[table].transpose(0, 1).flatten(1, 2)[:, :num_tokens]
        shape = self.shapes[layer_index]
        if shape.is_quantized:
            key = rotate_rows(dequantize_rows(key, torch.float32)).to(shape.dtype)  # back: it is its own inverse
            return key, dequantize_rows(value, shape.dtype)
        return key, value


def _own_memory(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Pages stay untouched: memory is taken as blocks are written."""
    return torch.empty(shape, dtype=dtype, device=device)


def _make_mover(layers: Iterable[LayerKV], block_size: int) -> Callable[[list[int], list[int]], None]:
    """What `KVCache.move` does, natively where the tensors are in this process's memory."""
    tensors = [tensor for layer in layers for tensor in (layer.key, layer.value)]
    core = native.core()
    if core is not None and all(tensor.device.type == "cpu" and tensor.is_contiguous() for tensor in tensors):
        mover = core.TokenMover(
            [(t.data_ptr(), t.shape[0], t.shape[1], t.shape[3] * t.element_size()) for t in tensors], block_size
        )

        def move(sources: list[int], targets: list[int]) -> None:
            assert tensors  # the mover looks at their memory
            mover.move(sources, targets)

        return move

    def move_by_torch(sources: list[int], targets: list[int]) -> None:
        places = [(divmod(s, block_size), divmod(t, block_size)) for s, t in zip(sources, targets, strict=True)]
        for tensor in tensors:
            for (block, offset), (to_block, to_offset) in places:
                tensor[to_block, :, to_offset] = tensor[block, :, offset]

    return move_by_torch

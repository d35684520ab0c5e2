"""Weights in the layout that the native kernels read: what is packed, from where, and the memory that holds it.

A plan (`MatrixPlan`, `VectorPlan`) names rows of stored weights, a `WeightSource` hands them out (a loaded model, a
folder, a GGUF file), and `pack` writes them into one `Arena`::

    plan  "layers.0.qkv" = rows of q_proj, k_proj, v_proj     source.dense("model.layers.0.self_attn.q_proj.weight")
       |                                                          |
       +---------------> PackedWeights: name -> shape, offset <---+
                         memory | layers.0.qkv | layers.0.output | ... | head | vectors |

Everything lies in one piece of memory, so a packed form can be written to a file as it is and mapped again.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from llmopt import native
from llmopt.errors import PluginUnavailableError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PANEL = 16  # outputs per panel, kPanelWidth in csrc/include/llmopt/packed_matrix.h
_ALIGNMENT = 64
_HUGE_PAGE = 2 << 20

Format = Literal["float32", "bfloat16", "int8", "int8_group", "int4_group"]
Role = Literal["linear", "head", "embedding", "router"]


# ---------------------------------------------------------------------------------------------------------------------
# What is packed
# ---------------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class MatrixShape:
    """What a packed matrix is; see csrc/include/llmopt/packed_matrix.h."""

    format: Format
    num_outputs: int
    num_inputs: int
    group_size: int = 0  # grouped formats: values along the inputs that share a scale
    has_minimum: bool = False  # int4_group: w = scale * q + minimum

    def native(self) -> Any:
        """The same as an object of the extension."""
        core = extension()
        return core.MatrixShape(
            format=core.WeightFormat[self.format.upper()],
            num_outputs=self.num_outputs,
            num_inputs=self.num_inputs,
            group_size=self.group_size,
            has_minimum=self.has_minimum,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed matrix."""
        return int(extension().packed_bytes(self.native()))


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows of a stored weight: outputs ``begin`` to ``end`` of a matrix ``[outputs, inputs]``."""

    name: str  # as in the model's state dict
    begin: int
    end: int
    expert: int | None = None  # place in the first dimension of a stack of matrices ``[experts, outputs, inputs]``
    is_transposed: bool = False  # stored as ``[inputs, outputs]`` (GPT-2's Conv1D)

    @property
    def count(self) -> int:
        """Number of rows."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """One matrix of the decoder, put together from rows of stored weights."""

    num_inputs: int
    parts: tuple[Rows, ...]  # one after the other; gated: (gate, up), which alternate every 16 rows
    role: Role = "linear"
    is_gated: bool = False

    @property
    def num_outputs(self) -> int:
        """Rows of the packed matrix. The halves of a gated one are padded to whole panels."""
        if self.is_gated:
            return 2 * -(-self.parts[0].count // PANEL) * PANEL
        return sum(part.count for part in self.parts)


@dataclass(frozen=True, slots=True)
class VectorPlan:
    """A float32 vector of the decoder: a norm's weight, a bias, a table of positions."""

    parts: tuple[tuple[str | None, int], ...]  # (name in the state dict, or None for zeros; number of values)
    add: float = 0.0  # what the model adds before use: 1 for norms that store their weight minus one
    is_gated: bool = False  # two parts that alternate every 16 values, as the rows of their matrix do

    @property
    def count(self) -> int:
        """Number of values."""
        if self.is_gated:
            return 2 * -(-self.parts[0][1] // PANEL) * PANEL
        return sum(count for _, count in self.parts)


# ---------------------------------------------------------------------------------------------------------------------
# Where it comes from
# ---------------------------------------------------------------------------------------------------------------------
class QuantizedRows(Protocol):
    """A stored weight in quantized blocks that can be packed without becoming dense."""

    @property
    def shape(self) -> MatrixShape:
        """The packed form that holds the blocks as they are; outputs and inputs of the stored matrix."""

    def pack(self, panels: np.ndarray, rows: np.ndarray, address: int, num_threads: int) -> None:
        """Pack rows into panels of a matrix whose format, group and inputs are those of `shape`.

        :param panels: ``[P]`` int64, numbers of the panels to write.
        :param rows: ``[P, 16]`` int64, stored rows that go there; -1 is a row of zeros.
        :param address: of panel 0.
        """


class WeightSource(Protocol):
    """Stored weights by their names in the model's state dict."""

    def dense(self, name: str) -> Tensor:
        """The weight in float32, bfloat16 or float16 on the CPU, in any strides; quantized ones are converted."""

    def quantized(self, name: str) -> QuantizedRows | None:
        """The weight in its quantized blocks, if it is stored so."""


class ModelWeights:
    """The weights of a loaded model. Nothing is copied."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._weights: dict[str, Tensor] = {n: p.detach() for n, p in model.named_parameters(remove_duplicate=False)}

    def dense(self, name: str) -> Tensor:
        return self._weights[name]

    def quantized(self, name: str) -> QuantizedRows | None:
        return None


# ---------------------------------------------------------------------------------------------------------------------
# Where it goes
# ---------------------------------------------------------------------------------------------------------------------
class Arena:
    """Zeroed memory on huge pages, where the system has them. Pages are taken when they are first written."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        # private: a shared map is a file in memory, and those get huge pages only where the system was told to
        self._map = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without transparent huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self._view = np.frombuffer(self._map, dtype=np.uint8)
        start = self._view.ctypes.data
        self.address = -(-start // _HUGE_PAGE) * _HUGE_PAGE

    def bytes(self) -> np.ndarray:
        """All of it, ``[num_bytes]`` uint8."""
        start = self.address - self._view.ctypes.data
        return self._view[start : start + self.num_bytes]


class Memory(Protocol):
    """What holds packed weights: an `Arena`, or a mapped file."""

    address: int  # 64-byte aligned
    num_bytes: int


@dataclass(slots=True, eq=False, weakref_slot=True)
class PackedWeights:
    """Where each packed matrix and vector lies in one piece of memory, which others may use too (`shared_weights`)."""

    memory: Memory
    matrices: dict[str, tuple[MatrixShape, int]] = field(default_factory=dict)  # name -> shape, offset in bytes
    vectors: dict[str, tuple[int, int]] = field(default_factory=dict)  # name -> number of float32, offset in bytes

    def matrix(self, name: str) -> Any:
        """A matrix as the extension's `PackedMatrix`. The memory must outlive it."""
        shape, offset = self.matrices[name]
        return extension().PackedMatrix(shape.native(), self.memory.address + offset)

    def vector(self, name: str | None) -> int:
        """Address of a vector; 0 for None."""
        return 0 if name is None else self.memory.address + self.vectors[name][1]


def layout(
    shapes: Mapping[str, MatrixShape], vectors: Mapping[str, int]
) -> tuple[dict[str, tuple[MatrixShape, int]], dict[str, tuple[int, int]], int]:
    """Offsets of matrices and vectors in the order given, and the bytes of all."""
    end = 0
    placed: dict[str, tuple[MatrixShape, int]] = {}
    for name, shape in shapes.items():
        placed[name] = (shape, end)
        end += -(-shape.num_bytes // _ALIGNMENT) * _ALIGNMENT
    placed_vectors: dict[str, tuple[int, int]] = {}
    for name, count in vectors.items():
        placed_vectors[name] = (count, end)
        end += -(-4 * count // _ALIGNMENT) * _ALIGNMENT
    return placed, placed_vectors, end


def pack(
    matrices: Mapping[str, MatrixPlan],
    vectors: Mapping[str, VectorPlan],
    shapes: Mapping[str, MatrixShape],
    source: WeightSource,
    num_threads: int,
) -> PackedWeights:
    """Pack everything into new memory.

    :param shapes: the packed form of each matrix.
    """
    placed, placed_vectors, num_bytes = layout(shapes, {name: plan.count for name, plan in vectors.items()})
    packed = PackedWeights(Arena(num_bytes), placed, placed_vectors)
    fill(packed, matrices, vectors, source, num_threads)
    return packed


def fill(
    packed: PackedWeights,
    matrices: Mapping[str, MatrixPlan],
    vectors: Mapping[str, VectorPlan],
    source: WeightSource,
    num_threads: int,
) -> None:
    """Write the weights of a source to the places that `packed` gives them, over what was there."""
    with torch.no_grad():
        for name, plan in matrices.items():
            shape, offset = packed.matrices[name]
            pack_matrix(plan, shape, source, packed.memory.address + offset, num_threads)
        for name, vector in vectors.items():
            values = _vector_values(vector, source)
            _copy(values, packed.vector(name))


def pack_matrix(plan: MatrixPlan, shape: MatrixShape, source: WeightSource, address: int, num_threads: int) -> None:
    """Pack one matrix to an address."""
    stored = [source.quantized(part.name) for part in plan.parts]
    if all(s is not None and _same_form(s.shape, shape) for s in stored) and _ends_at_panels(plan):
        _pack_quantized(plan, [s for s in stored if s is not None], address, num_threads)
    else:
        _pack_dense(plan, shape, source, address, num_threads)


def _pack_dense(plan: MatrixPlan, shape: MatrixShape, source: WeightSource, address: int, num_threads: int) -> None:
    weights = [_stored_matrix(part, source, plan.num_inputs) for part in plan.parts]  # [outputs, inputs] each
    if len({(w.dtype, w.stride(1)) for w in weights}) > 1:
        weights = [w.float().contiguous() for w in weights]
    addresses = [_row_addresses(w) for w in weights]
    rows = _alternate(addresses) if plan.is_gated else np.concatenate(addresses)
    core = extension()
    kind = {torch.float32: "FLOAT32", torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16"}[weights[0].dtype]
    core.pack_panels(shape.native(), rows, weights[0].stride(1), core.SourceType[kind], address, num_threads)


def _pack_quantized(plan: MatrixPlan, stored: list[QuantizedRows], address: int, num_threads: int) -> None:
    panel = 0
    step = len(stored) if plan.is_gated else 1
    for number, (part, blocks) in enumerate(zip(plan.parts, stored, strict=True)):
        num_panels = -(-part.count // PANEL)
        rows = np.full(num_panels * PANEL, -1, dtype=np.int64)
        rows[: part.count] = np.arange(part.begin, part.end)
        first = number if plan.is_gated else panel
        panels = first + step * np.arange(num_panels, dtype=np.int64)
        blocks.pack(panels, rows.reshape(-1, PANEL), address, num_threads)
        panel += num_panels


def _same_form(a: MatrixShape, b: MatrixShape) -> bool:
    mine, other = ((s.format, s.num_inputs, s.group_size, s.has_minimum) for s in (a, b))
    return mine == other


def _ends_at_panels(plan: MatrixPlan) -> bool:
    """Whether no panel has rows of two parts, nor a part is a slice that quantized blocks cannot give."""
    inner = plan.parts if plan.is_gated else plan.parts[:-1]
    is_plain = all(part.expert is None and not part.is_transposed for part in plan.parts)
    return is_plain and all(part.count % PANEL == 0 for part in inner)


def _stored_matrix(part: Rows, source: WeightSource, num_inputs: int) -> Tensor:
    """``[part.count, num_inputs]``, a view where that is possible; a shorter row is filled up with zeros."""
    weight = source.dense(part.name)
    if part.expert is not None:
        weight = weight[part.expert]
    if part.is_transposed:
        weight = weight.t()
    if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        weight = weight.float()
    weight = weight[part.begin : part.end]
    if weight.shape[1] < num_inputs:
        weight = torch.nn.functional.pad(weight, (0, num_inputs - weight.shape[1]))
    return weight


def _row_addresses(weight: Tensor) -> np.ndarray:
    step = weight.stride(0) * weight.element_size()
    return weight.data_ptr() + step * np.arange(weight.shape[0], dtype=np.int64)


def _alternate(halves: list[np.ndarray]) -> np.ndarray:
    """Two vectors, padded with zeros to whole panels, in turns of 16."""
    padded = [np.pad(half, (0, -half.size % PANEL)).reshape(-1, PANEL) for half in halves]
    return np.ascontiguousarray(np.stack(padded, axis=1)).reshape(-1)


def _vector_values(plan: VectorPlan, source: WeightSource) -> np.ndarray:
    parts = [
        np.zeros(count, dtype=np.float32) if name is None else source.dense(name).float().reshape(-1).numpy()
        for name, count in plan.parts
    ]
    values = _alternate(parts) if plan.is_gated else np.concatenate(parts)
    return (values + plan.add).astype(np.float32, copy=False)


def _copy(values: np.ndarray, address: int) -> None:
    values = np.ascontiguousarray(values)
    ctypes.memmove(address, values.ctypes.data, values.nbytes)


def extension() -> Any:
    """The compiled extension.

    :raises PluginUnavailableError: it cannot be used; says why.
    """
    core = native.core()
    if core is None:
        raise PluginUnavailableError(f"plugin 'native' needs the compiled extension: {native.why_not()}.")
    return core

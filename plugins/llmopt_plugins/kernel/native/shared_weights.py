"""Packed weights that pipelines share when they would pack the same values in the same way.

Every pipeline has a `PackedWeights` of its own, and several of them may look at the same memory::

    pipeline A -> PackedWeights --+
                                  +--> Arena         _USERS[recipe, fingerprints] = weak set of A's and B's
    pipeline B -> PackedWeights --+

Nobody but its users owns the memory, so it goes with the last of them. It is known by its recipe (what is packed, from
which names, in which forms) and by the fingerprint of every stored weight that was read for it. Addresses and version
counters of parameters would not do: a change through ``parameter.data`` leaves no trace in torch, and adapters are
merged that way. So a model that somebody changed is another one, and two models of the same values are one.

Weights that are packed again (`refill`) are written over the old ones when those have no other user, else elsewhere.
Only weights of loaded models and draft heads are shared; what is read from a packed or GGUF file is not.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias
from weakref import WeakSet

from llmopt_plugins.kernel.native.packing import Arena, PackedWeights, extension, fill, layout, pack

if TYPE_CHECKING:
    from torch import Tensor

    from llmopt_plugins.kernel.native.packing import (
        MatrixPlan,
        MatrixShape,
        Memory,
        QuantizedRows,
        VectorPlan,
        WeightSource,
    )

_Recipe: TypeAlias = tuple[
    tuple[tuple[str, "MatrixPlan"], ...], tuple[tuple[str, "VectorPlan"], ...], tuple[tuple[str, "MatrixShape"], ...]
]
_Fingerprint: TypeAlias = tuple[str, tuple[int, ...], int]  # dtype, shape, hash of the values
_Key: TypeAlias = tuple[_Recipe, tuple[_Fingerprint, ...]]

_USERS: dict[_Key, WeakSet[PackedWeights]] = {}
# Held while weights are packed, too: of two pipelines that are built at once, one finds what the other has packed.
_LOCK = threading.Lock()


def share(
    matrices: Mapping[str, MatrixPlan],
    vectors: Mapping[str, VectorPlan],
    shapes: Mapping[str, MatrixShape],
    source: WeightSource,
    num_threads: int,
) -> PackedWeights:
    """The same as `pack`; the memory is that of others who packed the same, if there are any.

    :param source: without quantized weights.
    """
    recipe = _recipe(matrices, vectors, shapes)
    marked = _MarkedSource(source, num_threads)
    with _LOCK:
        memory = _find(recipe, marked)
        if memory is None:
            packed = pack(matrices, vectors, shapes, marked, num_threads)
        else:
            placed, placed_vectors, _ = layout(shapes, {name: plan.count for name, plan in vectors.items()})
            packed = PackedWeights(memory, placed, placed_vectors)
        _join(packed, recipe, marked)
    return packed


def refill(
    packed: PackedWeights,
    matrices: Mapping[str, MatrixPlan],
    vectors: Mapping[str, VectorPlan],
    source: WeightSource,
    num_threads: int,
) -> None:
    """Bring packed weights up to date with a source whose values have changed.

    Afterwards ``packed.memory`` may be another one: the old one belongs to its other users.
    """
    recipe = _recipe(matrices, vectors, {name: shape for name, (shape, _) in packed.matrices.items()})
    marked = _MarkedSource(source, num_threads)
    with _LOCK:
        memory = _find(recipe, marked)
        if memory is None:
            if num_users(packed) == 1:
                memory = packed.memory
                _leave(packed)  # while it is written to, nobody is to find it by its old values
            else:
                memory = Arena(packed.memory.num_bytes)
            fresh = PackedWeights(memory, packed.matrices, packed.vectors)
            fill(fresh, matrices, vectors, marked, num_threads)
        _leave(packed)
        packed.memory = memory
        _join(packed, recipe, marked)


def is_packed(
    matrices: Mapping[str, MatrixPlan],
    vectors: Mapping[str, VectorPlan],
    shapes: Mapping[str, MatrixShape],
    source: WeightSource,
    num_threads: int,
) -> bool:
    """Whether `share` would find the weights packed. They are only read when somebody has used the same recipe."""
    with _LOCK:
        return _find(_recipe(matrices, vectors, shapes), _MarkedSource(source, num_threads)) is not None


def num_users(packed: PackedWeights) -> int:
    """How many look at the same memory, this one included."""
    return next((len(users) for users in list(_USERS.values()) if packed in users), 1)


class _MarkedSource:
    """A source that takes the fingerprint of every weight when it is first read, just before it is packed."""

    def __init__(self, source: WeightSource, num_threads: int) -> None:
        self._source, self._num_threads = source, num_threads
        self._found: dict[str, _Fingerprint] = {}

    def dense(self, name: str) -> Tensor:
        weight = self._source.dense(name)
        if name not in self._found:
            data = weight.detach().contiguous()
            mark = extension().fingerprint(data.data_ptr(), data.numel() * data.element_size(), self._num_threads)
            self._found[name] = (str(data.dtype), tuple(data.shape), mark)
        return weight

    def quantized(self, name: str) -> QuantizedRows | None:
        return self._source.quantized(name)

    def fingerprints(self, recipe: _Recipe) -> tuple[_Fingerprint, ...]:
        """Of all weights of a recipe, in its order."""
        matrices, vectors, _ = recipe
        names = [part.name for _, plan in matrices for part in plan.parts]
        names += [name for _, plan in vectors for name, _ in plan.parts if name is not None]
        for name in names:
            if name not in self._found:
                self.dense(name)
        return tuple(self._found[name] for name in names)


def _recipe(
    matrices: Mapping[str, MatrixPlan], vectors: Mapping[str, VectorPlan], shapes: Mapping[str, MatrixShape]
) -> _Recipe:
    return tuple(matrices.items()), tuple(vectors.items()), tuple(shapes.items())


def _find(recipe: _Recipe, marked: _MarkedSource) -> Memory | None:
    """The memory that holds these weights; None: there is none."""
    for key in [key for key, users in _USERS.items() if not users]:
        del _USERS[key]
    if all(known != recipe for known, _ in _USERS):  # nothing to compare with
        return None
    users = _USERS.get((recipe, marked.fingerprints(recipe)), ())
    return next((packed.memory for packed in users), None)


def _join(packed: PackedWeights, recipe: _Recipe, marked: _MarkedSource) -> None:
    _USERS.setdefault((recipe, marked.fingerprints(recipe)), WeakSet()).add(packed)


def _leave(packed: PackedWeights) -> None:
    for users in _USERS.values():
        users.discard(packed)

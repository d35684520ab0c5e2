"""Which packed form each matrix takes: the model's own dtype, the blocks in which it is stored, or fewer bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from llmopt_plugins.kernel.native.packing import (
    PANEL,
    Arena,
    Format,
    MatrixPlan,
    MatrixShape,
    Rows,
    WeightSource,
    extension,
    pack_matrix,
)

if TYPE_CHECKING:
    from llmopt.config import KernelConfig

_DENSE: dict[torch.dtype, Format] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float32",  # exactly; bfloat16 has too few digits
}
_INT4_GROUP = 32
_SAMPLE_PANELS = 8  # panels of a matrix that decide about its minimums
_WORTH = 0.8  # minimums cost half a bit per weight: they have to take away a fifth of the squared error


def choose_shapes(
    matrices: Mapping[str, MatrixPlan], source: WeightSource, config: KernelConfig
) -> dict[str, MatrixShape]:
    """The packed form of every matrix.

    Blocks in which a weight is stored are kept, whatever the configuration says: to quantize them again would only add
    loss. Routers of experts stay as they are, because they choose.
    """
    return {name: _choose(plan, source, config) for name, plan in matrices.items()}


def _choose(plan: MatrixPlan, source: WeightSource, config: KernelConfig) -> MatrixShape:
    stored = [source.quantized(part.name) for part in plan.parts]
    forms = {_sized(s.shape, plan) for s in stored if s is not None}
    if forms and None not in stored and plan.role != "router":
        # parts that are stored in different ways share the form with more bits
        return max(forms, key=lambda shape: (shape.format == "int8_group", shape.has_minimum, -shape.group_size))
    bits = config.weight_bits
    if plan.role in ("head", "embedding") and config.head_bits is not None and bits is not None:
        bits = config.head_bits
    if bits is None or plan.role == "router":
        kinds = [_DENSE[source.dense(part.name).dtype] for part in plan.parts]
        return _sized(MatrixShape("float32" if "float32" in kinds else "bfloat16", 0, 0), plan)
    # a head with bits of its own has the group that goes with them
    group = config.weight_group_size if bits == config.weight_bits else 0
    if bits == 8:
        return _sized(MatrixShape("int8_group", 0, 0, group) if group else MatrixShape("int8", 0, 0), plan)
    shape = _sized(MatrixShape("int4_group", 0, 0, group or _INT4_GROUP), plan)
    minimum = config.weight_minimum
    return replace(shape, has_minimum=_minimum_is_worth_it(plan, shape, source) if minimum is None else minimum)


def _sized(shape: MatrixShape, plan: MatrixPlan) -> MatrixShape:
    return replace(shape, num_outputs=plan.num_outputs, num_inputs=plan.num_inputs)


def _minimum_is_worth_it(plan: MatrixPlan, shape: MatrixShape, source: WeightSource) -> bool:
    """Pack some rows both ways and compare the squared errors."""
    part = plan.parts[0]
    count = min(part.count, _SAMPLE_PANELS * PANEL)
    rows = Rows(part.name, part.begin, part.begin + count, part.expert, part.is_transposed)
    sample = MatrixPlan(plan.num_inputs, (rows,))
    exact = _unpacked(sample, MatrixShape("float32", count, plan.num_inputs), source)
    errors = [
        float(np.square(_unpacked(sample, replace(shape, num_outputs=count, has_minimum=m), source) - exact).sum())
        for m in (False, True)
    ]
    return errors[1] < _WORTH * errors[0]


def _unpacked(plan: MatrixPlan, shape: MatrixShape, source: WeightSource) -> np.ndarray:
    """What a matrix is after packing, ``[outputs, inputs]`` float32."""
    arena = Arena(shape.num_bytes)
    pack_matrix(plan, shape, source, arena.address, num_threads=1)
    core = extension()
    out = np.empty((shape.num_outputs, shape.num_inputs), dtype=np.float32)
    matrix = core.PackedMatrix(shape.native(), arena.address)
    core.unpack_rows(matrix, np.arange(shape.num_outputs), out.ctypes.data)
    return out


def describe_formats(shapes: Mapping[str, MatrixShape]) -> str:
    """The forms in use, the one with most bytes first: ``int4_group (groups of 32), int8``."""
    sizes: dict[str, int] = {}
    for shape in shapes.values():
        name: str = shape.format
        if shape.group_size:
            name += f" (groups of {shape.group_size}{', with minimum' if shape.has_minimum else ''})"
        sizes[name] = sizes.get(name, 0) + shape.num_bytes
    return ", ".join(sorted(sizes, key=lambda name: -sizes[name]))

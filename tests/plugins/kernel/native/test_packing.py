"""Packed matrices hold the rows that their plan names, whatever form the stored weight has."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from llmopt.config import KernelConfig
from llmopt_plugins.kernel.native.formats import choose_shapes, describe_formats
from llmopt_plugins.kernel.native.packing import (
    Arena,
    MatrixPlan,
    MatrixShape,
    PackedWeights,
    QuantizedRows,
    Rows,
    VectorPlan,
    WeightSource,
    extension,
    fill,
    layout,
    pack,
)

pytestmark = pytest.mark.native


@dataclass
class Blocks:
    """A quantized weight that notes what is asked of it."""

    shape: MatrixShape
    calls: list[tuple[list[int], list[list[int]], int]] = field(default_factory=list)

    def pack(self, panels: np.ndarray, rows: np.ndarray, address: int, num_threads: int) -> None:
        self.calls.append((panels.tolist(), rows.tolist(), address))


@dataclass
class Source:
    weights: dict[str, Tensor]
    blocks: dict[str, Blocks] = field(default_factory=dict)

    def dense(self, name: str) -> Tensor:
        return self.weights[name]

    def quantized(self, name: str) -> QuantizedRows | None:
        return self.blocks.get(name)


def weight(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain(plan: MatrixPlan) -> MatrixShape:
    return MatrixShape("float32", plan.num_outputs, plan.num_inputs)


def packed_rows(plan: MatrixPlan, source: WeightSource, shape: MatrixShape | None = None) -> Tensor:
    """The matrix after packing, ``[outputs, inputs]``."""
    packed = pack({"m": plan}, {}, {"m": shape or plain(plan)}, source, num_threads=2)
    out = np.empty((plan.num_outputs, plan.num_inputs), dtype=np.float32)
    extension().unpack_rows(packed.matrix("m"), np.arange(plan.num_outputs), out.ctypes.data)
    return torch.from_numpy(out)


def vector(packed: PackedWeights, name: str) -> Tensor:
    count, _ = packed.vectors[name]
    values = (ctypes.c_float * count).from_address(packed.vector(name))
    return torch.from_numpy(np.array(values, dtype=np.float32))


def test_parts_follow_one_another() -> None:
    weights = {"q": weight(40, 24), "k": weight(7, 24, seed=1), "v": weight(7, 24, seed=2)}
    plan = MatrixPlan(24, (Rows("q", 0, 40), Rows("k", 0, 7), Rows("v", 2, 7)))
    assert plan.num_outputs == 52
    assert torch.equal(packed_rows(plan, Source(weights)), torch.cat([weights["q"], weights["k"], weights["v"][2:]]))


@pytest.mark.parametrize("inner", [16, 48, 50, 3])
def test_gate_and_up_alternate_every_16_rows_and_are_filled_up_with_zeros(inner: int) -> None:
    gate, up = weight(inner, 8), weight(inner, 8, seed=1)
    plan = MatrixPlan(8, (Rows("gate", 0, inner), Rows("up", 0, inner)), is_gated=True)
    panels = packed_rows(plan, Source({"gate": gate, "up": up})).reshape(-1, 2, 16, 8)
    for half, wanted in ((panels[:, 0], gate), (panels[:, 1], up)):
        rows = half.reshape(-1, 8)
        assert torch.equal(rows[:inner], wanted)
        assert not rows[inner:].any()


def test_a_transposed_weight_is_read_in_columns() -> None:
    stored = weight(24, 40)
    plan = MatrixPlan(24, (Rows("w", 8, 40, is_transposed=True),))
    assert torch.equal(packed_rows(plan, Source({"w": stored})), stored.t()[8:40])


def test_one_expert_of_a_stack_is_read() -> None:
    stored = weight(3, 32, 24)
    plan = MatrixPlan(24, (Rows("w", 0, 16, expert=2), Rows("w", 16, 32, expert=2)), is_gated=True)
    assert torch.equal(packed_rows(plan, Source({"w": stored})), stored[2])


def test_shorter_rows_are_filled_up_with_zeros() -> None:
    stored = weight(16, 50)
    out = packed_rows(MatrixPlan(64, (Rows("w", 0, 16),)), Source({"w": stored}))
    assert torch.equal(out[:, :50], stored)
    assert not out[:, 50:].any()


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float16, torch.float16)])
def test_parts_of_any_dtype_are_kept_exactly(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    weights = {"a": weight(16, 8, dtype=dtypes[0]), "b": weight(16, 8, seed=1, dtype=dtypes[1]).t().contiguous().t()}
    plan = MatrixPlan(8, (Rows("a", 0, 16), Rows("b", 0, 16)))
    source = Source(weights)
    shape = choose_shapes({"m": plan}, source, KernelConfig())["m"]
    assert shape.format == "float32"
    assert torch.equal(packed_rows(plan, source, shape), torch.cat([weights["a"].float(), weights["b"].float()]))


def test_vectors_are_joined_and_may_have_something_added() -> None:
    weights = {"a": weight(5, dtype=torch.bfloat16), "b": weight(3, seed=1)}
    plans = {
        "both": VectorPlan((("a", 5), (None, 2), ("b", 3)), add=1.0),
        "gated": VectorPlan((("b", 3), ("b", 3)), is_gated=True),
    }
    packed = pack({}, plans, {}, Source(weights), num_threads=1)
    assert torch.equal(vector(packed, "both"), torch.cat([weights["a"].float(), torch.zeros(2), weights["b"]]) + 1)
    halves = vector(packed, "gated").reshape(2, 16)
    assert torch.equal(halves[:, :3], weights["b"].expand(2, 3))
    assert not halves[:, 3:].any()
    assert packed.vector(None) == 0


def test_everything_lies_aligned_in_one_piece_of_memory_and_can_be_written_again() -> None:
    plans = {str(n): MatrixPlan(n, (Rows("w", 0, n),)) for n in (5, 16, 33)}
    shapes = {name: plain(plan) for name, plan in plans.items()}
    placed, _, num_bytes = layout(shapes, {"v": 3})
    source = Source({"w": weight(40, 40)})
    sources = {"w": source.weights["w"]}
    for name, plan in plans.items():
        sources[name] = weight(plan.num_outputs, plan.num_inputs, seed=plan.num_outputs)
    plans = {name: replace(plan, parts=(Rows(name, 0, plan.num_outputs),)) for name, plan in plans.items()}
    packed = pack(plans, {}, shapes, Source(sources), num_threads=1)
    assert {n: offset for n, (_, offset) in packed.matrices.items()} == {n: o for n, (_, o) in placed.items()}
    assert all(packed.matrix(name).address % 64 == 0 for name in plans)
    assert packed.memory.num_bytes <= num_bytes
    doubled = {name: 2 * w for name, w in sources.items()}
    fill(packed, plans, {}, Source(doubled), num_threads=1)
    out = np.empty((33, 33), dtype=np.float32)
    extension().unpack_rows(packed.matrix("33"), np.arange(33), out.ctypes.data)
    assert torch.equal(torch.from_numpy(out), doubled["33"])


def test_memory_is_zeroed_and_begins_on_a_huge_page() -> None:
    arena = Arena(1000)
    assert arena.address % (2 << 20) == 0
    assert arena.bytes().size == 1000
    assert not arena.bytes().any()


# -- stored blocks ---------------------------------------------------------------------------------------------------
Q4 = MatrixShape("int4_group", 32, 64, group_size=32)


def test_blocks_of_one_form_are_handed_over_panel_by_panel() -> None:
    blocks = {"gate": Blocks(Q4), "up": Blocks(Q4)}
    plan = MatrixPlan(64, (Rows("gate", 0, 32), Rows("up", 0, 32)), is_gated=True)
    source = Source({}, blocks)
    shape = choose_shapes({"m": plan}, source, KernelConfig())["m"]
    assert shape == replace(Q4, num_outputs=64)
    packed = pack({"m": plan}, {}, {"m": shape}, source, num_threads=1)
    address = packed.matrix("m").address
    rows = [list(range(16)), list(range(16, 32))]
    assert blocks["gate"].calls == [([0, 2], rows, address)]
    assert blocks["up"].calls == [([1, 3], rows, address)]


def test_blocks_of_a_last_panel_are_filled_up() -> None:
    blocks = Blocks(replace(Q4, num_outputs=20))
    plan = MatrixPlan(64, (Rows("w", 0, 20),))
    pack({"m": plan}, {}, {"m": replace(Q4, num_outputs=20)}, Source({}, {"w": blocks}), num_threads=1)
    assert blocks.calls[0][1] == [list(range(16)), [16, 17, 18, 19, *[-1] * 12]]


def test_blocks_of_two_forms_share_the_one_with_more_bits() -> None:
    wide = MatrixShape("int8_group", 16, 64, group_size=16)
    source = Source({}, {"q": Blocks(Q4), "v": Blocks(wide)})
    plan = MatrixPlan(64, (Rows("q", 0, 32), Rows("v", 0, 16)))
    assert choose_shapes({"m": plan}, source, KernelConfig())["m"] == replace(wide, num_outputs=48)


def test_stored_blocks_are_not_quantized_again() -> None:
    source = Source({}, {"w": Blocks(Q4)})
    plan = MatrixPlan(64, (Rows("w", 0, 32),))
    assert choose_shapes({"m": plan}, source, KernelConfig(weight_bits=8))["m"] == Q4


# -- formats ---------------------------------------------------------------------------------------------------------
def test_a_router_keeps_its_dtype_and_the_head_has_bits_of_its_own() -> None:
    plans = {
        role: MatrixPlan(64, (Rows("w", 0, 32),), role=role)  # type: ignore[arg-type]
        for role in ("linear", "head", "embedding", "router")
    }
    source = Source({"w": weight(32, 64, dtype=torch.bfloat16)})
    config = KernelConfig(weight_bits=4, head_bits=8, weight_group_size=64, weight_minimum=True)
    shapes = choose_shapes(plans, source, config)
    assert [shapes[role].format for role in plans] == ["int4_group", "int8", "int8", "bfloat16"]
    assert (shapes["linear"].group_size, shapes["linear"].has_minimum) == (64, True)
    assert "int4_group (groups of 64, with minimum)" in describe_formats(shapes)
    config = KernelConfig(weight_bits=8, head_bits=4, weight_minimum=False)
    assert choose_shapes(plans, source, config)["linear"] == MatrixShape("int8", 32, 64)
    assert choose_shapes(plans, source, config)["head"] == MatrixShape("int4_group", 32, 64, 32)
    config = KernelConfig(weight_bits=8, head_bits=8, weight_group_size=64)
    assert {choose_shapes(plans, source, config)[role].format for role in ("linear", "head")} == {"int8_group"}
    assert {s.format for s in choose_shapes(plans, source, KernelConfig()).values()} == {"bfloat16"}

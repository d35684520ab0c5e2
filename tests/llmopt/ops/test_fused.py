"""The fused ops give what their references give, on every shape, dtype and instruction set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from llmopt import native
from llmopt.ops import fused
from llmopt.ops.fused import FusedOps

needs_core = pytest.mark.skipif(native.core() is None, reason=str(native.why_not()))
pytestmark = [pytest.mark.native, needs_core]

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [1, 3, 16, 31, 64, 100, 577]


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def assert_close(found: Tensor, wanted: Tensor) -> None:
    """Within rounding: in half precision a value may fall to the neighbour, and seldom does."""
    assert found.shape == wanted.shape
    assert found.dtype is wanted.dtype
    if found.dtype is torch.float32:
        torch.testing.assert_close(found, wanted, rtol=2e-5, atol=1e-5)
    else:
        torch.testing.assert_close(found.float(), wanted.float(), rtol=2**-6, atol=1e-2)
        assert ((found - wanted).abs() > 1e-5).float().mean() < 0.02 or found.numel() < 200


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("adds_one", [False, True])
@pytest.mark.parametrize("rounds_first", [False, True])
def test_rms_norm_is_the_reference(dtype: torch.dtype, size: int, adds_one: bool, rounds_first: bool) -> None:
    x, weight = random(2, 5, size, dtype=dtype), random(size, dtype=dtype)
    options = {"adds_one": adds_one, "rounds_first": rounds_first}
    for w in (weight, None):
        found = FusedOps().rms_norm(x, w, 1e-5, **options)
        assert_close(found, fused.rms_norm_reference(x, w, 1e-5, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("activation", list(fused.ACTIVATIONS))
def test_gated_activation_is_the_reference_also_for_halves_of_one_matrix(
    dtype: torch.dtype, size: int, activation: fused.Activation
) -> None:
    both = random(1, 4, 2 * size, dtype=dtype) * 4
    for gate, up in (both.chunk(2, dim=-1), (both[..., :size].contiguous(), both[..., size:].contiguous())):
        found = FusedOps().gated_activation(gate, up, activation)
        assert_close(found, fused.gated_activation_reference(gate, up, activation))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rounds_products", [False, True])
@pytest.mark.parametrize(("batch", "tokens", "heads", "dim", "rotated"),
                         [(1, 7, 3, 64, 64), (3, 1, 2, 16, 16), (2, 5, 1, 80, 32), (1, 2, 2, 6, 6)])  # fmt: skip
def test_rotate_is_the_reference(
    dtype: torch.dtype, interleaved: bool, rounds_products: bool, batch: int, tokens: int, heads: int, dim: int,
    rotated: int,
) -> None:  # fmt: skip
    x = random(batch, tokens, heads, dim, dtype=dtype).transpose(1, 2)
    options = {"interleaved": interleaved, "rounds_products": rounds_products}
    for rows in {1, batch}:
        angles = random(rows, tokens, rotated, dtype=torch.float32)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        found = FusedOps().rotate(x, cos, sin, **options)
        assert_close(found, fused.rotate_reference(x, cos, sin, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 8, 11])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 1), (17, 33), (64, 128), (131, 577)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_with_few_rows_is_the_reference(
    dtype: torch.dtype, num_rows: int, num_outputs: int, num_inputs: int, has_bias: bool
) -> None:
    x, weight = random(1, num_rows, num_inputs, dtype=dtype), random(num_outputs, num_inputs, dtype=dtype)
    bias = random(num_outputs, dtype=dtype) if has_bias else None
    found = FusedOps().few_rows_linear(x, weight, bias)
    wanted = fused.few_rows_linear_reference(x, weight, bias)
    tolerance = 1e-4 if dtype is torch.float32 else 2**-7
    torch.testing.assert_close(found.float(), wanted.float(), rtol=tolerance, atol=tolerance)


def test_large_inputs_are_shared_by_threads_without_a_change() -> None:
    one, team = FusedOps(num_threads=1), FusedOps(num_threads=3)
    x, weight = random(700, 576, dtype=torch.float32), random(5000, 576, dtype=torch.float32)
    assert torch.equal(one.rms_norm(x, weight[0], 1e-5), team.rms_norm(x, weight[0], 1e-5))
    assert torch.equal(one.gated_activation(x, x, "silu"), team.gated_activation(x, x, "silu"))
    assert torch.equal(one.few_rows_linear(x[:3], weight), team.few_rows_linear(x[:3], weight))
    heads, cos = x.view(1, 700, 9, 64).transpose(1, 2), x[None, :, :64]
    assert torch.equal(one.rotate(heads, cos, cos), team.rotate(heads, cos, cos))


def test_a_row_of_a_product_does_not_depend_on_its_neighbours() -> None:
    x, weight = random(8, 577, dtype=torch.float32), random(300, 577, dtype=torch.float32)
    together = FusedOps().few_rows_linear(x, weight)
    for row in range(8):
        assert torch.equal(FusedOps().few_rows_linear(x[row : row + 1], weight)[0], together[row])


def test_tensors_that_do_not_fit_together_are_refused_with_both_shapes() -> None:
    ops, x = FusedOps(), torch.randn(2, 8)
    with pytest.raises(ValueError, match=r"weight is \[4\] torch.float32, x is \[2, 8\]"):
        ops.rms_norm(x, torch.ones(4), 1e-5)
    with pytest.raises(ValueError, match="they must agree"):
        ops.gated_activation(x, x.bfloat16(), "silu")
    with pytest.raises(ValueError, match=r"\[\.\.\., K\] and \[N, K\]"):
        ops.few_rows_linear(x, torch.ones(3, 9))
    with pytest.raises(ValueError, match=r"\[B or 1, T, R\]"):
        ops.rotate(torch.randn(1, 1, 2, 8), torch.ones(1, 3, 8), torch.ones(1, 3, 8))


def test_what_is_not_served_is_said() -> None:
    assert fused.why_not(torch.device("cpu"), torch.bfloat16) is None
    assert "serve the CPU" in str(fused.why_not(torch.device("meta"), torch.float32))
    assert "float16" in str(fused.why_not(torch.device("cpu"), torch.float16))


@pytest.mark.parametrize("isa", native.core().available_isas() if native.core() else [])
def test_every_instruction_set_of_this_machine_gives_the_reference(isa: str) -> None:
    if os.environ.get("LLMOPT_ISA"):
        pytest.skip("LLMOPT_ISA is set already")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env={**os.environ, "LLMOPT_ISA": isa},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]

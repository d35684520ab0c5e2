"""Rows of the quantized cache: error, odd values, and the native op's rows against the reference's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from llmopt import native
from llmopt.ops.attention import PagedAttention
from llmopt.ops.quantized_rows import dequantize_rows, quantize_rows, rotate_rows


@pytest.mark.parametrize("size", [1, 5, 64, 129])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_come_back_within_half_a_step(size: int, dtype: torch.dtype) -> None:
    rows = (torch.randn(50, 3, size) * torch.logspace(-3, 3, 50)[:, None, None]).to(dtype)
    stored = quantize_rows(rows)
    assert stored.shape == (50, 3, size + 2)
    assert stored.dtype == torch.int8
    assert stored[..., :-2].abs().max() <= 127
    step = rows.float().abs().amax(-1, keepdim=True) / 127 * (1 + 2**-7)  # the scale is rounded up to a bfloat16
    assert ((dequantize_rows(stored, torch.float32) - rows.float()).abs() <= 0.501 * step).all()


def test_zeros_stay_zeros_and_rows_that_are_not_finite_become_nan() -> None:
    rows = torch.tensor([[0.0, -0.0], [1e-38, 0.0], [float("inf"), 1.0], [1.0, float("nan")], [3e38, 1e38]])
    back = dequantize_rows(quantize_rows(rows), torch.float32)
    assert torch.equal(back[:2], torch.zeros(2, 2))
    assert back[2:4].isnan().all()
    torch.testing.assert_close(back[4], rows[4], rtol=0.02, atol=0)


@pytest.mark.parametrize("size", [1, 2, 7, 24, 64, 80, 96, 128])
def test_rotated_queries_and_keys_have_the_products_of_plain_ones(size: int) -> None:
    queries, keys = torch.randn(5, size, dtype=torch.float64), torch.randn(3, 9, size, dtype=torch.float64)
    found = rotate_rows(queries) @ rotate_rows(keys).transpose(-1, -2)
    torch.testing.assert_close(found, queries @ keys.transpose(-1, -2), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(rotate_rows(rotate_rows(keys)), keys, rtol=1e-12, atol=1e-12)


def test_a_channel_much_larger_than_the_others_no_longer_takes_their_bits() -> None:
    rows = torch.randn(100, 64)
    rows[:, 7] *= 50
    queries = torch.randn(100, 64)
    queries[:, 7] /= 50
    wanted = (queries * rows).sum(-1)
    plain = (queries * dequantize_rows(quantize_rows(rows), torch.float32)).sum(-1)
    rotated = (rotate_rows(queries) * dequantize_rows(quantize_rows(rotate_rows(rows)), torch.float32)).sum(-1)
    assert (rotated - wanted).abs().mean() < 0.5 * (plain - wanted).abs().mean()


@pytest.mark.skipif(native.why_not("auto") is not None, reason=str(native.why_not("auto")))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 7, 33, 64, 128])
def test_the_native_op_stores_the_same_rows(size: int, dtype: torch.dtype) -> None:
    rows = torch.randn(40, 2, size).to(dtype)
    caches = [torch.zeros(10, 2, 4, size + 2, dtype=torch.int8) for _ in range(2)]
    op = PagedAttention.create(caches[:1], caches[1:], dtype=dtype, native_mode="require")
    op.plan(np.zeros((0, 0), np.int32), np.zeros(0, np.int32), np.zeros(1, np.int32), np.arange(40))
    op.write(0, rows, rows)
    for cache, wanted in zip(caches, [quantize_rows(rotate_rows(rows)), quantize_rows(rows)], strict=True):
        found = cache.transpose(1, 2).reshape(40, 2, size + 2)
        assert torch.equal(found[..., -2:], wanted[..., -2:])  # scales
        difference = (found[..., :-2].int() - wanted[..., :-2].int()).abs()
        assert difference.max() <= 1  # a product that is rounded once or twice
        assert difference.float().mean() < 1e-3

from __future__ import annotations

import math

import pytest
import torch

from llmopt import native
from llmopt.ops.argmax import argmax, argmax_reference


@pytest.mark.native
@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 511, 512, 49_152])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 40])
def test_native_and_reference_agree_on_every_shape(num_rows: int, size: int) -> None:
    assert native.why_not() is None
    logits = torch.randn(num_rows, size, generator=torch.Generator().manual_seed(size))
    tokens, values = argmax(logits)
    expected, expected_values = argmax_reference(logits)
    assert tokens == expected
    assert values == expected_values


def test_rows_may_be_part_of_a_wider_matrix() -> None:
    wide = torch.randn(4, 100, generator=torch.Generator().manual_seed(1))
    assert argmax(wide[::2, 10:90]) == argmax_reference(wide[::2, 10:90])
    assert argmax(wide.t()) == argmax_reference(wide.t())


def test_nan_shows_as_the_value() -> None:
    logits = torch.zeros(2, 200)
    logits[1, 150] = math.nan
    tokens, values = argmax(logits)
    assert tokens == [0, 150]
    assert values[0] == 0.0
    assert math.isnan(values[1])


def test_a_row_of_minus_infinity_has_a_place_and_its_value() -> None:
    assert argmax(torch.full((1, 70), -math.inf)) == ([0], [-math.inf])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes_take_the_reference(dtype: torch.dtype) -> None:
    logits = torch.arange(12, dtype=dtype).reshape(2, 6)
    assert argmax(logits) == ([5, 5], [5.0, 11.0])

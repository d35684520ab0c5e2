from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

from llmopt import native
from llmopt.ops.sample import sample_rows, sample_rows_reference

FILTERS = [
    (k, p, m) for k, p, m in itertools.product((0, 1, 7, 40, 1000), (1.0, 0.95, 0.5, 0.0), (0.0, 0.05, 1.0))
]  # fmt: skip


def make_logits(num_rows: int, size: int, spread: float, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, size, generator=torch.Generator().manual_seed(seed)) * spread


def kept_ids(row: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The ids that draws all over [0, 1) reach, through the native op."""
    draws = [(i + 0.5) / 4000 for i in range(4000)]
    rows, count = row.expand(len(draws), -1), len(draws)
    return set(sample_rows(rows, [temperature] * count, [top_k] * count, [top_p] * count, [min_p] * count, draws))


@pytest.mark.native
@pytest.mark.parametrize("spread", [0.5, 3.0, 12.0])
@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 1000, 5000])
def test_native_and_reference_draw_the_same_tokens_with_every_filter(size: int, spread: float) -> None:
    assert native.why_not() is None
    rng = random.Random(size)
    logits = make_logits(len(FILTERS), size, spread, seed=size)
    temperature = [rng.choice((0.3, 1.0, 1.7)) for _ in FILTERS]
    top_k, top_p, min_p = (list(column) for column in zip(*FILTERS, strict=True))
    for _ in range(5):
        draws = [rng.random() for _ in FILTERS]
        found = sample_rows(logits, temperature, top_k, top_p, min_p, draws)
        expected = sample_rows_reference(logits, temperature, top_k, top_p, min_p, draws)
        assert found == expected


@pytest.mark.native
def test_rounding_errors_move_no_more_than_one_draw_in_many() -> None:
    logits = make_logits(1, 49_152, 3.0)
    count = 400
    draws = [random.Random(1).random() for _ in range(count)] + [i / count for i in range(count)]
    settings = ([0.8] * len(draws), [0] * len(draws), [0.95] * len(draws), [0.0] * len(draws), draws)
    rows = logits.expand(len(draws), -1)
    found, expected = sample_rows(rows, *settings), sample_rows_reference(rows, *settings)
    assert sum(a != b for a, b in zip(found, expected, strict=True)) <= 2


@pytest.mark.native
def test_ties_with_the_last_of_top_k_stay() -> None:
    row = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0, -3.0]])
    assert kept_ids(row, 1.0, 2, 1.0, 0.0) == {1, 2, 3, 4}
    assert kept_ids(row, 1.0, 1, 1.0, 0.0) == {1}


@pytest.mark.native
def test_top_p_drops_what_sums_up_to_the_rest_exactly_and_keeps_the_best() -> None:
    equal = torch.zeros(1, 4)
    assert kept_ids(equal, 1.0, 0, 0.75, 0.0) == {1, 2, 3}
    assert kept_ids(equal, 1.0, 0, 0.5, 0.0) == {2, 3}
    assert kept_ids(equal, 1.0, 0, 0.0, 0.0) == {3}
    row = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    assert kept_ids(row, 1.0, 0, 0.7, 0.0) == {0, 1}


@pytest.mark.native
def test_min_p_keeps_what_reaches_its_share_of_the_best() -> None:
    row = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert kept_ids(row, 1.0, 0, 1.0, 0.4) == {0, 1, 2}
    assert kept_ids(row, 1.0, 0, 1.0, 1.0) == {0}


@pytest.mark.native
def test_forbidden_tokens_are_never_drawn() -> None:
    row = torch.full((1, 500), -math.inf)
    row[0, 123] = 1.0
    row[0, 400] = 0.5
    assert kept_ids(row, 1.0, 0, 1.0, 0.0) == {123, 400}
    assert kept_ids(row, 1.0, 3, 1.0, 0.0) == {123, 400}
    assert kept_ids(row, 1.0, 0, 0.99, 0.0) == {123, 400}


def test_draws_follow_the_distribution() -> None:
    row = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    count = 10_000
    draws = [(i + 0.5) / count for i in range(count)]
    tokens = sample_rows(
        row.expand(count, -1), [1.0] * count, [0] * count, [1.0] * count, [0.0] * count, draws
    )  # fmt: skip
    shares = torch.bincount(torch.tensor(tokens), minlength=4) / count
    assert torch.allclose(shares, torch.tensor([0.1, 0.2, 0.3, 0.4]), atol=2 / count)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = make_logits(9, 3000, 4.0)
    draws = [i / 9 for i in range(9)]
    together = sample_rows(logits, [0.9] * 9, [50] * 9, [0.9] * 9, [0.01] * 9, draws)
    alone = [sample_rows(logits[i : i + 1], [0.9], [50], [0.9], [0.01], draws[i : i + 1])[0] for i in range(9)]
    assert together == alone


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_and_layouts_take_the_reference(dtype: torch.dtype) -> None:
    logits = torch.arange(12, dtype=dtype).reshape(2, 6)
    assert sample_rows(logits, [1.0, 1.0], [1, 1], [1.0, 1.0], [0.0, 0.0], [0.5, 0.5]) == [5, 5]
    assert sample_rows(logits.float().t(), [1.0] * 6, [1] * 6, [1.0] * 6, [0.0] * 6, [0.5] * 6) == [1] * 6


@pytest.mark.native
def test_a_wrong_number_of_settings_is_told() -> None:
    with pytest.raises(ValueError, match="2 rows of 8 logits needs as many"):
        sample_rows(torch.zeros(2, 8), [1.0], [0, 0], [1.0, 1.0], [0.0, 0.0], [0.5, 0.5])

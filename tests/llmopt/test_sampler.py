"""Choice of tokens: the distribution that the parameters describe, for each row as if it were alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from llmopt.errors import NonFiniteLogitsError, StageError
from llmopt.sampler import Row, edit_logits, sample, uniform
from tests.llmopt.helpers import request

LOGITS = torch.tensor([1.5, 0.2, -1.0, 2.0, 0.0, -0.5, 1.0, -3.0])
# critical values of chi-square at p = 0.001
CRITICAL = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46, 7: 24.32}


def draw(logits: Tensor, count: int, **options: Any) -> list[int]:
    """Tokens of ``count`` rows with the same logits and seeds 0, 1, 2, ..."""
    rows = [Row(request([1, 2], seed=seed, **options)) for seed in range(count)]
    tokens, errors = sample(rows, logits.expand(count, -1))
    assert not errors
    return tokens


def chi_square(tokens: list[int], probs: Tensor) -> tuple[float, int]:
    """The statistic and its degrees of freedom; tokens without probability may not occur."""
    counts = np.bincount(tokens, minlength=probs.numel())
    expected = probs.double().numpy() * len(tokens)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    value = ((counts[possible] - expected[possible]) ** 2 / expected[possible]).sum()
    return float(value), int(possible.sum()) - 1


def edited(logits: Tensor, **options: Any) -> Tensor:
    """The logits of one row after the penalties; the request has output already when ``output`` is given."""
    output = options.pop("output", [])
    made = request(options.pop("prompt", [1, 2]), **options)
    for token in output:
        made.append(token)
    errors: dict[int, BaseException] = {}
    out = edit_logits([Row(made)], logits[None], errors)[0]
    assert not errors
    return out


# -- the distribution -----------------------------------------------------------------------------
@pytest.mark.parametrize("top_k", [-1, 0, 8, 108])
def test_a_top_k_that_is_off_leaves_the_distribution_alone(top_k: int) -> None:
    value, freedom = chi_square(draw(LOGITS, 4000, temperature=1.0, top_k=top_k), LOGITS.softmax(-1))
    assert freedom == 7
    assert value < CRITICAL[7]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 2.0},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 0.8, "top_p": 0.8},
        {"temperature": 1.3, "min_p": 0.2},
        {"temperature": 0.9, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_samples_follow_the_distribution_that_transformers_would_draw_from(options: dict[str, Any]) -> None:
    value, freedom = chi_square(
        draw(LOGITS, 4000, **options), transformers_scores(LOGITS[None], **options)[0].softmax(-1)
    )
    assert value < CRITICAL[freedom]


def transformers_scores(logits: Tensor, **options: Any) -> Tensor:
    """Scores after the warpers of transformers, in its order."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(options["temperature"]))])
    if options.get("top_k"):
        warpers.append(TopKLogitsWarper(options["top_k"]))
    if options.get("top_p", 1.0) < 1.0:
        warpers.append(TopPLogitsWarper(options["top_p"]))
    if options.get("min_p"):
        warpers.append(MinPLogitsWarper(options["min_p"]))
    scores: Tensor = warpers(None, logits.clone())
    return scores


def test_every_combination_of_filters_keeps_the_tokens_that_transformers_keeps() -> None:
    torch.manual_seed(3)
    checked = 0
    for temperature in (0.3, 1.0, 1.7):
        for top_k in (0, 1, 5, 40):
            for top_p in (1.0, 0.95, 0.4, 1e-4):
                for min_p in (0.0, 0.1):
                    logits = torch.randn(3, 64) * 2
                    logits[:, 7] = logits[:, 9]  # a tie
                    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
                    wanted = transformers_scores(logits, **options)
                    for row in range(3):  # logits, not ids: which of equal ones stay is left to an unstable sort there
                        possible = set(logits[row][torch.isfinite(wanted[row])].tolist())
                        got = set(logits[row][draw(logits[row], 60, **options)].tolist())
                        assert got <= possible
                        if len(possible) == 1:
                            assert got == possible
                        checked += 1
    assert checked == 288


@pytest.mark.parametrize(
    "options", [{"top_k": 1}, {"top_k": 1, "top_p": 0.8}, {"top_p": 0.0}, {"top_p": 1e-4}, {"min_p": 1.0}]
)
def test_the_best_token_always_survives(options: dict[str, Any]) -> None:
    assert set(draw(LOGITS, 50, temperature=1.5, **options)) == {3}


def test_small_and_zero_temperatures_in_one_batch_are_greedy_and_leave_their_neighbour_alone() -> None:
    logits = LOGITS.clone()
    logits[5] = -torch.inf
    options = [{"temperature": 0.0}, {"temperature": 1e-4}, {"temperature": 1e-8}, {"temperature": 1.0, "top_p": 1e-4}]
    for seed in range(30):
        rows = [Row(request([1], seed=seed, **o)) for o in options] + [Row(request([1], temperature=1.0, seed=seed))]
        tokens, errors = sample(rows, logits.expand(5, -1))
        assert not errors
        assert tokens[:4] == [3, 3, 3, 3]
        assert tokens[4] == sample(rows[4:], logits[None])[0][0]
        assert tokens[4] != 5


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 100)
    options: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.5, "seed": 1},
        {"temperature": 1.5, "seed": 2, "top_k": 5},
        {"temperature": 2.0, "top_k": 1, "seed": 3},
        {"temperature": 1.0, "top_p": 0.9, "seed": 4, "repetition_penalty": 1.4},
        {"temperature": 1.0, "min_p": 0.1, "seed": 1, "presence_penalty": 0.5, "logit_bias": {4: 3.0}},
    ]
    rows = [Row(request([1, 2, 3], **o)) for o in options]
    together, _ = sample(rows, logits)
    assert together == [sample([row], logits[i : i + 1])[0][0] for i, row in enumerate(rows)]
    backwards, _ = sample(rows[::-1], logits.flip(0))
    assert backwards == together[::-1]


def test_logits_are_left_as_they_were() -> None:
    logits = LOGITS[None].clone()
    rows = [Row(request([1, 3], temperature=0.7, top_k=2, top_p=0.5, min_p=0.2, repetition_penalty=2.0, seed=5))]
    sample(rows, logits)
    assert torch.equal(logits, LOGITS[None])


# -- random numbers -------------------------------------------------------------------------------
def test_the_random_number_depends_on_seed_and_position_only() -> None:
    assert uniform(7, 3) == uniform(7, 3)
    assert len({uniform(seed, position) for seed in range(50) for position in range(50)}) == 2500


@pytest.mark.parametrize("along", ["seed", "position"])
def test_consecutive_seeds_and_positions_give_even_and_independent_numbers(along: str) -> None:
    count = 40_000
    draws = np.array([uniform(i, 11) if along == "seed" else uniform(11, i) for i in range(count)])
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    counts = np.histogram(draws, bins=8, range=(0, 1))[0]
    assert ((counts - count / 8) ** 2 / (count / 8)).sum() < CRITICAL[7]
    for lag in (1, 2, 7):  # correlation of neighbours, in standard deviations
        a, b = draws[:-lag] - 0.5, draws[lag:] - 0.5
        assert abs((a * b).mean() * 12) * math.sqrt(count - lag) < 4
    pairs = np.histogram2d(draws[::2], draws[1::2], bins=4, range=((0, 1), (0, 1)))[0]
    assert ((pairs - count / 32) ** 2 / (count / 32)).sum() < 37.7  # 15 degrees of freedom, p = 0.001


def test_seeds_of_any_size_and_sign_work() -> None:
    assert 0 <= uniform(-5, 1) < 1
    assert 0 <= uniform(2**100 + 3, 1) < 1


# -- edits of logits ------------------------------------------------------------------------------
def test_repetition_penalty_counts_the_prompt_once_and_acts_by_sign_as_in_transformers() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0, -1.0, 0.5])
    out = edited(logits, prompt=[0, 1, 0, 0, 0, 0], repetition_penalty=2.0)
    assert torch.allclose(out, torch.tensor([1.0, -4.0, 1.0, -1.0, 0.5]), atol=1e-6)
    theirs = RepetitionPenaltyLogitsProcessor(2.0)(torch.tensor([[0, 1, 0, 0, 0, 0]]), logits[None].clone())[0]
    assert torch.equal(out, theirs)


@pytest.mark.parametrize("name", ["frequency_penalty", "presence_penalty"])
def test_frequency_and_presence_penalty_do_not_count_the_prompt(name: str) -> None:
    assert torch.equal(edited(LOGITS, prompt=[3] * 5, **{name: 1.0}), LOGITS)


def test_frequency_counts_every_occurrence_in_the_output_and_presence_counts_it_once() -> None:
    out = edited(LOGITS, prompt=[3, 3], output=[3, 3, 0], frequency_penalty=1.0)
    assert torch.allclose(LOGITS - out, torch.tensor([1.0, 0, 0, 2, 0, 0, 0, 0]), atol=1e-6)
    out = edited(LOGITS, prompt=[3, 3], output=[3, 3, 0], presence_penalty=1.0)
    assert torch.allclose(LOGITS - out, torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 0]), atol=1e-6)


def test_a_row_behind_drafts_counts_them_as_output() -> None:
    made = request([1, 2], frequency_penalty=1.0, repetition_penalty=1.0)
    out = edit_logits([Row(made, [3, 3]), Row(made, [3])], LOGITS.expand(2, -1), {})
    assert (LOGITS - out)[:, 3].tolist() == [2.0, 1.0]


def test_a_bias_is_added_and_the_last_id_of_the_vocabulary_can_be_forced() -> None:
    made = request([1], logit_bias={7: 100.0, 3: -1.0})
    assert sample([Row(made)], LOGITS[None])[0] == [7]


def test_stop_ids_are_impossible_before_the_minimum_and_possible_at_it() -> None:
    made = request([1], min_new_tokens=2, stop_token_ids=(3,), eos=(-1, 99))  # ids outside the vocabulary do no harm
    chosen = []
    for _ in range(3):
        (token,), _ = sample([Row(made)], LOGITS[None])
        chosen.append(token)
        made.append(token)
    assert chosen == [0, 0, 3]
    assert sample([Row(request([1], min_new_tokens=2, eos=(-1,)))], LOGITS[None])[0] == [3]  # not read from the end


# -- what cannot be chosen from -------------------------------------------------------------------
@pytest.mark.parametrize(
    ("value", "told"), [(math.nan, "is nan. Check the model"), (math.inf, "is inf. Check the model")]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_fails_alone(value: float, told: str, temperature: float) -> None:
    logits = LOGITS.expand(3, -1).clone()
    logits[1, 4] = value
    rows = [Row(request([1], name, temperature=temperature, seed=1)) for name in "abc"]
    tokens, errors = sample(rows, logits)
    assert list(errors) == [1]
    assert isinstance(errors[1], NonFiniteLogitsError)
    assert "'b'" in str(errors[1])
    assert told in str(errors[1])
    wanted, _ = sample(rows[:1], LOGITS[None])
    assert [tokens[0], tokens[2]] == wanted * 2


def test_a_row_where_every_token_is_forbidden_says_so() -> None:
    made = request([1], logits_processors=[lambda ids, line: line - torch.inf])
    _, errors = sample([Row(made)], LOGITS[None])
    assert "Every token is forbidden" in str(errors[0])


def test_a_processor_that_fails_ends_its_row_only() -> None:
    def bad(ids: np.ndarray, line: Tensor) -> Tensor:
        raise KeyError("no such rule")

    rows = [Row(request([1], "good")), Row(request([1], "bad", logits_processors=[bad]))]
    tokens, errors = sample(rows, LOGITS.expand(2, -1))
    assert tokens[0] == 3
    assert isinstance(errors[1], StageError)
    assert "logits processor of request 'bad' failed: KeyError: 'no such rule'" in str(errors[1])
    assert isinstance(errors[1].__cause__, KeyError)


def test_a_processor_that_returns_another_width_ends_its_row_only() -> None:
    rows = [Row(request([1], logits_processors=[lambda ids, line: line[:3]])), Row(request([1]))]
    tokens, errors = sample(rows, LOGITS.expand(2, -1))
    assert tokens[1] == 3
    assert list(errors) == [0]


def test_processors_see_all_ids_and_the_edits_before_them() -> None:
    seen = []

    def record(ids: np.ndarray, line: Tensor) -> Tensor:
        seen.append((ids.tolist(), line[3].item()))
        return line

    made = request([1, 2], logits_processors=[record, record], logit_bias={3: 1.0})
    made.append(6)
    sample([Row(made)], LOGITS[None])
    assert seen == [([1, 2, 6], 3.0)] * 2

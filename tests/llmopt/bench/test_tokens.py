from __future__ import annotations

import pytest
import torch

from llmopt.bench.tokens import Difference, first_difference, replay
from llmopt.bench.workloads import BenchRequest
from llmopt.testing import tiny_model


def test_identical_outputs_have_no_difference() -> None:
    assert first_difference([[1, 2], []], [(1, 2), []]) is None


@pytest.mark.parametrize(
    ("expected", "found", "difference"),
    [
        ([[1, 2, 3]], [[1, 9, 3]], Difference(0, 1, 2, 9)),
        ([[1], [4, 5]], [[1], [4]], Difference(1, 1, 5, None)),
        ([[1], [4]], [[1], [4, 5]], Difference(1, 1, None, 5)),
    ],
)
def test_the_first_difference_is_found(
    expected: list[list[int]], found: list[list[int]], difference: Difference
) -> None:
    assert first_difference(expected, found) == difference


def test_a_missing_row_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 rows were expected, 1 came"):
        first_difference([[1], [2]], [[1]])


def greedy(prompt: list[int], count: int) -> list[int]:
    model, ids = tiny_model(), list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_the_replay_of_greedy_tokens_has_no_gap() -> None:
    requests = [BenchRequest([1, 2, 3], 6), BenchRequest([4], 3)]
    outputs = [greedy(request.prompt_ids, request.max_new_tokens) for request in requests]
    played = replay(tiny_model(), requests, outputs)
    assert (played.max_gap, played.num_not_best, played.num_tokens) == (0.0, 0, 9)


def test_the_replay_finds_one_wrong_token_and_its_gap() -> None:
    request = BenchRequest([1, 2, 3], 6)
    output = greedy(request.prompt_ids, 6)
    with torch.no_grad():
        logits = tiny_model()(torch.tensor([request.prompt_ids + output[:3]])).logits[0, -1]
    worst = int(logits.argmin())
    wrong = output[:3] + [worst]
    played = replay(tiny_model(), [request], [wrong])
    assert played.num_not_best == 1
    assert played.max_gap == pytest.approx(float(logits.max() - logits.min()), rel=1e-5)

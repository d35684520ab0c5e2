from __future__ import annotations

import pytest

from llmopt.bench.budget import Budget, Rounds


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def run(seconds: float, most: int, durations: list[float]) -> int:
    """How many rounds are run when they take so long."""
    clock = Clock()
    rounds = Rounds(seconds, most, clock)
    for duration in durations:
        if not rounds.goes_on():
            break
        clock.now += duration
    return rounds.num_done


@pytest.mark.parametrize(
    ("seconds", "most", "durations", "wanted"),
    [
        (10.0, 5, [1.0] * 9, 5),  # the number of rounds ends it
        (3.5, 5, [1.0] * 9, 3),  # a fourth would end at 4
        (0.0, 5, [1.0] * 9, 1),  # one is always run
        (10.0, 9, [1.0, 6.0, 1.0], 2),  # another one of the longest kind would not fit
        (10.0, 1, [1.0] * 9, 1),
    ],
)
def test_rounds_go_on_while_the_longest_so_far_would_still_fit(
    seconds: float, most: int, durations: list[float], wanted: int
) -> None:
    assert run(seconds, most, durations) == wanted


def test_what_one_measurement_saves_the_others_get() -> None:
    clock = Clock()
    budget = Budget(60.0, clock)
    assert budget.share_s(3) == 20.0
    clock.now = 10.0
    assert budget.share_s(2) == 25.0
    clock.now = 99.0
    assert budget.left_s == budget.share_s(1) == 0.0
    assert budget.share_s(0) == 0.0

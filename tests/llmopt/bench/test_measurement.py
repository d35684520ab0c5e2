from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from llmopt.bench.clock import ForwardClock
from llmopt.bench.measurement import Spread, Timing, measure
from llmopt.bench.workloads import BenchRequest


class Recorder:
    """A contender that sleeps and notes what it was asked."""

    promise = "exact"
    note = ""

    def __init__(self, name: str, seconds: float, log: list[tuple[str, int, int]]) -> None:
        self.name, self.seconds, self.log = name, seconds, log

    def generate(self, requests: Sequence[BenchRequest]) -> list[list[int]]:
        self.log.append((self.name, requests[0].prompt_ids[0], requests[0].max_new_tokens))
        time.sleep(self.seconds)
        return [[0] * request.max_new_tokens for request in requests]

    def timed_forward(self, clock: ForwardClock) -> Any:
        return nullcontext()

    def close(self) -> None: ...


def test_contenders_take_turns_and_meet_the_same_new_text_each_round() -> None:
    log: list[tuple[str, int, int]] = []
    contenders = [Recorder("a", 0.002, log), Recorder("b", 0.001, log)]
    steps: list[str] = []
    timings = measure(contenders, lambda number: [BenchRequest([number], 5)], 2, steps.append)
    assert log == [
        ("a", 1, 1), ("a", 0, 5), ("b", 1, 1), ("b", 0, 5),
        ("a", 3, 1), ("a", 2, 5), ("b", 3, 1), ("b", 2, 5),
    ]  # fmt: skip
    assert steps == ["a", "b", "a", "b"]
    assert [timing.num_tokens for timing in timings] == [5, 5]
    assert all(len(timing.total_s) == len(timing.first_token_s) == 2 for timing in timings)
    assert all(seconds >= 0.002 for seconds in timings[0].total_s)


def test_figures_follow_from_the_times() -> None:
    slow = Timing("slow", [4.0, 6.0, 5.0], [1.0, 1.0, 1.0], [2e-3, 1e-3, 3e-3], num_tokens=20, longest=5)
    fast = Timing("fast", [2.0, 2.0, 5.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0], num_tokens=20, longest=5)
    assert slow.tokens_per_s == Spread(4.0, 20 / 6, 5.0)
    assert slow.ms_per_token == Spread(1000.0, 750.0, 1250.0)
    assert slow.first_token_ms.median == 1000.0
    assert slow.outside_us == Spread(pytest.approx(2000.0), pytest.approx(1000.0), pytest.approx(3000.0))
    assert fast.speedup_over(slow) == Spread(2.0, 1.0, 3.0)
    assert slow.tokens_per_s.percent == pytest.approx(50 * (5.0 - 20 / 6) / 4.0)


def test_the_clock_measures_calls_of_the_module_and_leaves_it_as_it_was() -> None:
    class Slow(torch.nn.Module):
        def forward(self, x: torch.Tensor, again: bool = False) -> torch.Tensor:
            time.sleep(0.01)
            return self(x) if again else x

    module, clock = Slow(), ForwardClock()
    started = time.perf_counter()
    with clock.attached(module):
        module(torch.zeros(1))
        module(torch.zeros(1), again=True)  # the inner call belongs to the outer one
        time.sleep(0.05)
    assert clock.num_calls == 2
    assert 0.03 <= clock.seconds <= time.perf_counter() - started - 0.05
    module(torch.zeros(1))
    assert clock.num_calls == 2
    assert not module._forward_hooks
    assert not module._forward_pre_hooks
    clock.reset()
    assert (clock.seconds, clock.num_calls) == (0.0, 0)


def test_a_failing_forward_does_not_leave_the_clock_running() -> None:
    class Fails(torch.nn.Module):
        def forward(self) -> None:
            raise RuntimeError("no")

    clock = ForwardClock()
    module = Fails()
    with clock.attached(module):
        for _ in range(2):
            with pytest.raises(RuntimeError):
                module()
    assert clock.num_calls == 2


def test_a_function_is_timed_like_a_forward() -> None:
    clock = ForwardClock()
    assert clock.timed(lambda a, b: a + b)(1, b=2) == 3
    assert clock.num_calls == 1

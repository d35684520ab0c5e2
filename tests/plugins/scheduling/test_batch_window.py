"""Requests that come together start together, nobody waits beyond the window, and a lone one does not wait at all."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import pytest

from llmopt_plugins.scheduling.batch_window import BatchWindow, WindowBudget, typical_gap_s
from tests.llmopt.helpers import assert_idle, build_tiny
from tests.plugins.scheduling.simulation import Simulation


def simulation(
    min_batch: int = 4,
    max_wait_s: float = 0.020,
    backfill: int | None = 0,
    group_tokens: int | None = None,
    **options: Any,
) -> Simulation:
    def wrap(inner: Any, sim: Simulation) -> Any:
        return WindowBudget(inner, min_batch, max_wait_s, backfill, sim.cost, sim.clock, group_tokens)

    return Simulation(budgets=[wrap], **options)


def burst(sim: Simulation, start_s: float, count: int, gap_s: float, prompt: int = 50, new: int = 2) -> None:
    for number in range(count):
        sim.at(start_s + number * gap_s, f"{start_s:g}-{number}", prompt, new=new)


def test_requests_that_come_close_together_start_in_one_step() -> None:
    sim = simulation()
    burst(sim, 0.0, 40, 0.002, new=1)
    burst(sim, 1.0, 4, 0.004)
    sim.run()
    late = [step for step in sim.steps if any(name.startswith("1-") and count > 1 for name, count in step.items())]
    assert len(late) == 1
    assert len(late[0]) == 4


def test_a_group_that_does_not_fill_up_starts_when_the_wait_of_its_oldest_is_over() -> None:
    sim = simulation(min_batch=8, max_wait_s=0.050)
    burst(sim, 0.0, 400, 0.001, prompt=1, new=1)  # the rate says that more will come
    sim.at(1.0, "a", 50, new=1)
    sim.at(1.01, "b", 50, new=1)
    sim.run()
    assert sim.times["a"] == sim.times["b"]
    assert sim.times["a"][0] == pytest.approx(1.05 + 0.02, abs=2e-3)


def test_a_lone_request_on_an_idle_service_does_not_wait() -> None:
    sim = simulation(min_batch=4, max_wait_s=10.0)
    sim.at(5.0, "lone", 50, new=1)
    sim.at(60.0, "another", 50, new=1)
    sim.run()
    assert sim.times["lone"][0] == pytest.approx(5.015)
    assert sim.times["another"][0] == pytest.approx(60.015)


def test_nobody_ever_waits_beyond_the_window() -> None:
    sim = simulation(min_batch=6, max_wait_s=0.030)
    burst(sim, 0.0, 100, 0.007, prompt=20, new=1)
    burst(sim, 2.0, 30, 0.033, prompt=20, new=1)
    longest = 0.0
    inner = sim.schedule

    def watch(queue: Any) -> Any:
        nonlocal longest
        before = list(queue.waiting)
        batch = inner(queue)
        for made in before:
            if made not in queue.waiting:
                longest = max(longest, sim.now - made.arrival_s)
        return batch

    sim.schedule = watch  # type: ignore[assignment]
    sim.run()
    longest_step = 0.010 + 0.0001 * 20 * 30
    assert longest <= 0.030 + longest_step


def test_running_streams_are_disturbed_once_per_group_and_not_once_per_request() -> None:
    def disturbed(sim: Simulation) -> int:
        sim.at(0.0, "stream", 4, new=150)
        burst(sim, 0.2, 40, 0.006, prompt=30, new=1)
        sim.run()
        return sum("stream" in step and any(count > 1 for count in step.values()) for step in sim.steps)

    assert disturbed(simulation(min_batch=8, max_wait_s=0.060)) < 0.6 * disturbed(Simulation())


@pytest.mark.parametrize(("backfill", "size"), [(5, 5), (None, 10)])
def test_gaps_of_decodes_are_filled_with_prompt_tokens_while_the_window_is_closed(
    backfill: int | None, size: int
) -> None:
    sim = simulation(min_batch=8, max_wait_s=0.2, backfill=backfill)
    sim.at(0.0, "stream", 4, new=100)
    burst(sim, 0.05, 40, 0.001, prompt=1, new=1)  # the rate
    sim.at(0.11, "a", 60, new=1)
    sim.run()
    chunks = [step["a"] for step in sim.steps if "a" in step]
    assert chunks[0] == size  # a tenth of a step of 10.1 ms is ten tokens
    assert len(chunks) > 4
    assert sim.times["a"][0] <= 0.11 + 0.2 + 0.02


def test_the_typical_gap_follows_what_arrives_and_one_pause_or_burst_does_not_change_it() -> None:
    assert typical_gap_s([]) == typical_gap_s([0.1 * n for n in range(8)]) == math.inf  # too few to say
    steady = [0.1 * n for n in range(30)]
    assert typical_gap_s(steady) == pytest.approx(0.1)
    assert typical_gap_s([*steady, 60.0]) == pytest.approx(0.1)
    assert typical_gap_s([*steady, 60.0, 60.0, 60.0]) == pytest.approx(0.1)
    assert typical_gap_s([*steady, *(70.0 + 3 * n for n in range(6))]) == pytest.approx(3.0)


def test_who_is_under_way_is_not_held_up_by_who_arrives() -> None:
    sim = simulation(min_batch=4, max_wait_s=0.5, max_tokens_per_step=64)
    burst(sim, 0.0, 4, 0.0, prompt=300, new=1)
    sim.at(0.02, "late", 10, new=1)
    sim.run()
    starts = [step for step in sim.steps if step]
    assert all(sum(step.values()) == 64 for step in starts[: (4 * 300) // 64])


def test_prompts_that_fill_the_processor_do_not_wait_for_company() -> None:
    def first_token_s(prompt: int) -> float:
        sim = simulation(min_batch=8, max_wait_s=0.5)
        burst(sim, 0.0, 40, 0.001, prompt=1, new=1)  # the rate says that more will come
        made = sim.at(1.0, "a", prompt, new=1)
        sim.run()
        return sim.times["a"][0] - made.arrival_s

    assert first_token_s(500) > 0.5
    # 10 ms for the weights and 0.1 ms a token: 512 tokens cost 0.12 ms each, and no number of them less than 0.11
    assert first_token_s(512) == pytest.approx(0.0612, abs=1e-3)


@pytest.mark.parametrize(("group_tokens", "size"), [(64, 64), (None, 512)])
def test_a_step_beside_decodes_takes_no_more_prompt_tokens_than_fill_the_processor(
    group_tokens: int | None, size: int
) -> None:
    sim = simulation(group_tokens=group_tokens)
    sim.at(0.0, "stream", 4, new=100)
    for number in range(6):
        sim.at(0.1, f"long-{number}", 700, new=1)
    sim.at(0.1, "short", 20, new=1)
    sim.run()
    beside = [sum(step.values()) - step["stream"] for step in sim.steps if "stream" in step and len(step) > 1]
    assert max(beside) == size
    assert sim.times["short"][0] < min(sim.times[f"long-{number}"][0] for number in range(1, 6))


def test_prompts_that_nobody_decodes_beside_are_computed_together() -> None:
    sim = simulation(group_tokens=64)
    burst(sim, 0.0, 4, 0.0, prompt=300, new=1)
    sim.run()
    assert [sum(step.values()) for step in sim.steps] == [1200]


# -- in a pipeline ---------------------------------------------------------------------------------------------------
def test_a_request_of_a_small_group_is_served_when_its_wait_is_over_by_whoever_waits_for_it() -> None:
    with build_tiny(plugins=[BatchWindow(min_batch=30, max_wait_ms=150.0, backfill=0)]) as pipe:
        pipe.batch([[5, 6]] * 60, max_new_tokens=1, progress=False)  # the rate: many
        waits = []
        for face in ("batch", "submit"):
            if face == "batch":
                (output,) = pipe.batch([[5, 6, 7]], max_new_tokens=2, ignore_eos=True, progress=False)
            else:
                output = pipe.submit([5, 6, 7], max_new_tokens=2, ignore_eos=True).result(timeout_s=30)
            assert output.ttft_s is not None
            waits.append(output.ttft_s)
        assert all(wait < 5.0 for wait in waits)
        assert waits[0] > 0.1
        assert pipe.stats()["budget.batch_window"]["num_held"] > 0
        assert_idle(pipe)


def test_callers_on_several_threads_meet_in_one_batch() -> None:
    with build_tiny(plugins=[BatchWindow(min_batch=4, max_wait_ms=500.0, backfill=0)]) as pipe:
        pipe.batch([[5, 6]] * 60, max_new_tokens=1, progress=False)
        before = pipe.stats()["num_steps"]
        threads = []
        for number in range(4):
            call = {"max_new_tokens": 4, "ignore_eos": True, "progress": False}
            threads.append(threading.Thread(target=pipe.batch, args=([[5, 6, number + 7]],), kwargs=call))
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert time.perf_counter() - start < 5
        assert pipe.stats()["num_steps"] - before <= 6  # 4 for all of them, and perhaps one that came late
        assert_idle(pipe)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"min_batch": 0}, "min_batch is a whole number of requests"),
        ({"max_wait_ms": -1}, "max_wait_ms is a number of milliseconds"),
        ({"max_wait_ms": float("inf")}, "max_wait_ms is a number of milliseconds"),  # nobody would ever start
        ({"max_wait_ms": float("nan")}, "max_wait_ms is a number of milliseconds"),
        ({"backfill": "some"}, "backfill is a whole number of tokens"),
        ({"backfill": -3}, "backfill is a whole number of tokens"),
        ({"group_tokens": 0}, "group_tokens is a whole number of tokens"),
        ({"group_tokens": "few"}, "group_tokens is a whole number of tokens"),
    ],
)
def test_bad_options_say_what_was_wanted(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        BatchWindow(**options)

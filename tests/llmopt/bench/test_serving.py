"""Workloads with arrivals: who is compared, what is sent when, and what the figures are made of."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from rich.console import Console

from llmopt.bench.comparison import contenders_for, serving_sets
from llmopt.bench.contenders import Pipeline
from llmopt.bench.serving import (
    Capacity,
    LoadTiming,
    Mix,
    Sender,
    Stall,
    StallTiming,
    Trace,
    measure_capacity,
    percentile,
    run_load,
    run_stall,
)
from llmopt.bench.serving_report import (
    load_lines,
    load_table,
    load_target,
    stall_lines,
    stall_table,
    stall_target,
)
from llmopt.errors import LlmoptError
from llmopt.testing import tiny_model
from tests.llmopt.helpers import build_tiny, wrap

MIX = Mix(((4, 0.6), (20, 0.4)), 2, 6)


def test_pipelines_differ_in_plugins_of_scheduling_only() -> None:
    sets = serving_sets({"paged_kv": {}, "chunked_prefill": {"chunk_size": 8}}, ["batch_window"])
    assert sets == {
        "llmopt with paged_kv": {"paged_kv": {}},
        "+ chunked_prefill": {"paged_kv": {}, "chunked_prefill": {"chunk_size": 8}},
    }
    both = serving_sets({}, ["batch_window", "pd_separation"])
    assert list(both) == ["llmopt", "+ batch_window", "+ pd_separation", "+ all"]
    assert list(both["+ all"]) == ["batch_window", "pd_separation"]


def test_arrivals_are_random_moments_at_the_wanted_rate_and_repeat_exactly() -> None:
    first, again = (MIX.arrivals(random.Random(3), 50.0, 20.0, 500) for _ in range(2))
    assert first == again
    moments = [due.at_s for due in first]
    assert moments == sorted(moments)
    assert len(first) == pytest.approx(1000, rel=0.15)
    assert {len(due.prompt_ids) for due in first} == {4, 20}
    assert {due.max_new_tokens for due in first} == set(range(2, 7))


def test_percentiles_are_values_that_were_seen() -> None:
    values = list(range(1, 101))
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]
    assert percentile([7.0], 0.99) == 7.0


def test_times_count_from_the_moment_at_which_a_request_was_due() -> None:
    trace = Trace(10.0, [10.5, 10.6, 10.9])
    assert trace.first_token_s == pytest.approx(0.5)
    assert trace.gaps == pytest.approx([0.1, 0.3])


def test_a_request_is_good_within_both_limits() -> None:
    traces = [Trace(0.0, [0.5, 0.6]), Trace(0.0, [1.5, 1.6]), Trace(0.0, [0.5, 1.2]), Trace(0.0, [0.9])]
    timing = LoadTiming("a", 2.0, traces, Capacity(4.0, 1.0, 0.5))
    assert timing.num_good == 2
    assert timing.goodput == 1.0
    assert timing.tokens_per_s == 3.5


def test_a_failed_request_ends_the_run_with_its_error() -> None:
    def failing(inner: Any) -> Any:
        def execute(batch: Any, drafts: Any) -> Any:
            raise ArithmeticError("broken")

        return execute

    with build_tiny(plugins=[wrap("execute", failing)], self_test=False) as pipe:
        sender = Sender(pipe)
        sender.send([5, 6, 7], 3)
        with pytest.raises(LlmoptError, match="broken"):
            sender.wait()


def test_both_workloads_run_on_every_pipeline_and_report_every_figure() -> None:
    model = tiny_model()
    sets = serving_sets({}, ["chunked_prefill"])
    stall = Stall(num_streams=3, stream_prompt=4, lead=4, num_new=40, long_prompt=60, long_new=2)
    with contenders_for(model, None, {}, max_model_len=128, sets=sets) as contenders:
        pipes = [contender for contender in contenders if isinstance(contender, Pipeline)]
        timings = [StallTiming(pipe.name) for pipe in pipes]
        for pipe, timing in zip(pipes, timings, strict=True):
            run_stall(pipe, stall, 500, 1, timing)
            assert 0 < timing.calm_s[0] <= timing.largest_s[0]
            assert timing.median_s[0] <= timing.p99_s[0] <= timing.largest_s[0]
            assert pipe.pipe.block_pool.num_used == 0
        capacity = measure_capacity(pipes[0], MIX, 500, quick=True)
        arrivals = MIX.arrivals(random.Random(1), 50.0, 0.5, 500)
        loads = [LoadTiming(pipe.name, 0.0, [], capacity) for pipe in pipes]
        for pipe, load in zip(pipes, loads, strict=True):
            run_load(pipe, arrivals, load)
    for load in loads:
        assert [len(trace.times) for trace in load.traces] == [due.max_new_tokens for due in arrivals]
        assert all(trace.first_token_s > 0 for trace in load.traces)
    records = [
        *stall_lines(stall, timings, stall_target(timings, quick=False), "tiny", "float32", {"commit": "c"}),
        *load_lines("arrivals80", 0.8, 50.0, loads, None, "tiny", "float32", {"commit": "c"}),
    ]
    assert [record["contender"] for record in records] == list(sets) * 2
    assert json.loads(json.dumps(records)) == records
    console = Console(width=200, record=True)
    console.print(stall_table(stall, timings, "float32"))
    console.print(load_table("arrivals95", 0.95, 50.0, loads, "float32"))
    text = console.export_text()
    assert text.count("+ chunked_prefill") == 2
    assert "good: first token within" in text
    assert stall_target(timings, quick=True).reached is None


def test_a_stall_reaches_its_target_only_beside_a_baseline_that_stalls() -> None:
    def timing(name: str, p99: float, tokens_per_s: float) -> StallTiming:
        return StallTiming(name, [0.01], [0.01], [0.01], [p99], [p99], [1.0], [tokens_per_s])

    base = timing("llmopt", 0.5, 100.0)
    assert stall_target([base, timing("a", 0.024, 96.0)], quick=False).reached
    assert not stall_target([base, timing("a", 0.026, 96.0)], quick=False).reached
    assert not stall_target([base, timing("a", 0.024, 94.0)], quick=False).reached
    assert not stall_target([timing("llmopt", 0.05, 100.0), timing("a", 0.024, 100.0)], quick=False).reached


def test_goodput_has_a_target_at_the_highest_load_only() -> None:
    def timing(name: str, num_good: int) -> LoadTiming:
        traces = [Trace(0.0, [0.5])] * num_good + [Trace(0.0, [1.5])] * (10 - num_good)
        return LoadTiming(name, 2.0, traces, Capacity(4.0, 1.0, 0.5))

    loads = [timing("llmopt", 5), timing("+ a", 4), timing("+ b", 8)]
    found = load_target("arrivals95", loads, quick=False)
    assert found is not None
    assert (found.reached, found.figure) == (True, "0.80 times with a, 1.60 times with b")
    assert load_target("arrivals80", loads, quick=False) is None
    lower = load_target("arrivals95", loads[:2], quick=False)
    assert lower is not None
    assert lower.reached is False


def test_a_stall_fits_the_model() -> None:
    assert Stall().fitted(8192, quick=False) == Stall()
    small = Stall().fitted(256, quick=True)
    assert small.long_prompt + small.long_new < 256
    assert small.stream_prompt + small.num_new < 256

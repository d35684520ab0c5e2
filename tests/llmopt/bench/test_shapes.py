"""Shapes: what is asked of each contender, and what follows from the times."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

from llmopt.bench.clock import ForwardClock
from llmopt.bench.comparison import Verdict, contenders_for, plugin_sets
from llmopt.bench.rivals import Rival
from llmopt.bench.shape_report import ShapeResult, bound, costs_of, shape_lines, shape_table
from llmopt.bench.shapes import SHAPES, Shape, ShapeTiming, measure_shape
from llmopt.bench.workloads import BenchRequest
from llmopt.machine_limits import machine_limits
from llmopt.roofline import ModelCost
from llmopt.testing import tiny_model

DECODE = Shape("decode2", 2, 5, 12)
PREFILL = Shape("prefill5", 2, 5, 0)
COST = ModelCost("float32", 1e6, 2e6, 1e5, 2e5, 64.0)


class Recorder:
    """A contender that takes so long per prompt and per further token."""

    promise = "exact"
    note = ""

    def __init__(self, name: str, log: list[Any], prefill_s: float = 0.0, step_s: float = 0.0) -> None:
        self.name, self.log, self.prefill_s, self.step_s = name, log, prefill_s, step_s

    def generate(self, requests: Sequence[BenchRequest]) -> list[list[int]]:
        self.log.append((self.name, len(requests), requests[0].max_new_tokens, tuple(requests[0].prompt_ids)))
        time.sleep(self.prefill_s + self.step_s * (requests[0].max_new_tokens - 1))
        return [[0] * request.max_new_tokens for request in requests]

    def timed_forward(self, clock: ForwardClock) -> Any:
        return nullcontext()

    def close(self) -> None: ...


def test_prompts_are_random_ids_that_differ_from_round_to_round_and_repeat_exactly() -> None:
    first, again, other = (DECODE.requests(number, 100, 7) for number in (3, 3, 4))
    assert first == again != other
    assert [len(request.prompt_ids) for request in first] == [5, 5]
    assert all(10 <= token < 100 for request in first for token in request.prompt_ids)
    assert DECODE.requests(0, 5, 1)[0].prompt_ids == [4] * 5  # a vocabulary that is hardly there


def test_contenders_take_turns_with_one_token_and_with_all() -> None:
    log: list[Any] = []
    timings = measure_shape([Recorder("a", log), Recorder("b", log)], DECODE, 100, seconds=60, max_rounds=2)
    asked = [(name, tokens) for name, rows, tokens, _ in log]
    probe = [("a", 3), ("b", 3)]
    warm_up = [("a", 1), ("b", 1)]
    assert asked == [
        *warm_up,
        ("a", 1),
        ("b", 1),
        *probe,
        ("a", 13),
        ("b", 13),
        ("a", 1),
        ("b", 1),
        ("a", 13),
        ("b", 13),
    ]
    assert all(rows == 2 for _, rows, _, _ in log)
    a, b = ([ids for who, _, tokens, ids in log if who == name and tokens != 3] for name in "ab")
    assert a == b  # both meet the same prompts,
    assert len(set(a)) == 5  # and never the same twice
    assert [len(timing.first_s) for timing in timings] == [len(timing.full_s) for timing in timings] == [2, 2]


def test_a_prefill_is_timed_with_one_token_only() -> None:
    log: list[Any] = []
    (timing,) = measure_shape([Recorder("a", log, prefill_s=0.002)], PREFILL, 100, seconds=60, max_rounds=3)
    assert [tokens for _, _, tokens, _ in log] == [1, 1, 1, 1]  # the first is not counted
    assert timing.full_s == []
    assert timing.step_s == timing.prefill_s == min(timing.first_s)
    assert timing.tokens_per_s == pytest.approx(10 / timing.prefill_s)


def test_when_time_is_short_decode_steps_become_fewer_and_are_counted_as_they_are() -> None:
    log: list[Any] = []
    slow = Shape("slow", 1, 5, 1000)
    (timing,) = measure_shape([Recorder("a", log, step_s=0.002)], slow, 100, seconds=0.05, max_rounds=5)
    assert 8 <= timing.shape.num_new < 100
    assert log[-1][2] == 1 + timing.shape.num_new
    assert timing.step_s == pytest.approx(0.002, rel=0.5)


def test_figures_follow_from_the_best_rounds() -> None:
    timing = ShapeTiming("a", DECODE, first_s=[0.5, 0.2, 0.3], full_s=[1.4, 2.0, 1.9])
    assert timing.step_s == pytest.approx((1.4 - 0.2) / 12)
    assert timing.tokens_per_s == pytest.approx(2 * 12 / 1.2)
    assert timing.prefill_tokens_per_s == pytest.approx(2 * 5 / 0.2)
    assert timing.spread_percent == pytest.approx(100 * (2.0 / 1.4 - 1))
    assert ShapeTiming("b", DECODE, [2.0], [1.0]).step_s > 0  # noise alone gives no negative time


def test_a_shape_is_cut_to_what_the_model_can_run() -> None:
    for shape in SHAPES.values():
        for quick in (False, True):
            cut = shape.fitted(64, quick=quick)
            assert cut.prompt + cut.num_new + 1 < 64
            assert cut.prompt >= 1
            assert cut.is_decode == shape.is_decode
    assert SHAPES["decode4096"].fitted(8192, quick=False) == SHAPES["decode4096"]
    assert SHAPES["decode32"].fitted(8192, quick=True).batch == 4


def test_the_named_shapes_are_those_that_other_engines_are_measured_on() -> None:
    shapes = {(s.batch, s.prompt, s.num_new) for s in SHAPES.values()}
    assert {(1, 32, 64), (8, 32, 64), (32, 32, 64), (1, 1024, 0)} <= shapes


def test_the_check_has_the_shapes_prompts_and_fewer_tokens() -> None:
    rows = SHAPES["decode32"].check_requests(1000)
    assert (len(rows), len(rows[0].prompt_ids), rows[0].max_new_tokens) == (8, 32, 16)
    assert [len(SHAPES[name].check_requests(1000)) for name in ("decode1", "decode4096", "prefill1024")] == [1, 1, 1]
    assert SHAPES["prefill1024"].check_requests(1000)[0].max_new_tokens == 1


def test_the_limit_of_a_decode_is_the_bytes_of_a_mean_step_over_the_bandwidth() -> None:
    limits = machine_limits()
    found = bound(COST, DECODE, limits)
    step = COST.decode(2, 7, 12)
    assert found.cost == step
    assert found.limit_s == limits.seconds(step.num_bytes, step.num_ops, "float32")
    assert bound(COST, PREFILL, limits).cost == COST.step([5, 5], [5, 5], 2)


def test_packed_weights_of_an_executor_are_what_its_steps_cost() -> None:
    model = tiny_model()
    with contenders_for(model, None, {}, max_model_len=64) as contenders:
        plain = costs_of(contenders)
        assert plain[0] == plain[1]
        assert plain[0].weight_bytes > 0
        pipe = contenders[1].pipe  # type: ignore[attr-defined]
        chain = pipe.registry.chains["execute"]
        chain.objects[0].weight_bytes, chain.objects[0].weight_dtype = 1234, "int8"
        packed = costs_of(contenders)
    assert packed[0] == plain[0]
    assert (round(packed[1].weight_bytes), packed[1].dtype) == (1234, "int8")


def result() -> ShapeResult:
    verdicts = [
        Verdict("HF generate", "reference", True, None, None),
        Verdict("llmopt", "exact", True, None, None),
        Verdict("+ int8", "lossy", True, None, None, "", 0.75, 0.0123),
    ]
    names = [verdict.name for verdict in verdicts]
    timings = [
        ShapeTiming(name, DECODE, [0.1], [0.1 + 12 * s]) for name, s in zip(names, (0.04, 0.02, 0.01), strict=True)
    ]
    bounds = [bound(COST, DECODE, machine_limits())] * 3
    return ShapeResult(DECODE, "float32", verdicts, timings, ["float32", "float32", "int8"], bounds)


RIVALS = [Rival("other", "int8", 2, 5, 100.0, 100.0), Rival("far", "bf16", 8, 5, 1.0, 1.0)]


def test_lines_carry_bytes_operations_limit_fraction_and_ratios() -> None:
    lines = [json.loads(json.dumps(line)) for line in shape_lines(result(), "tiny", {"cpu": "x"}, RIVALS)]
    assert [line["contender"] for line in lines] == ["HF generate", "llmopt", "+ int8"]
    assert [line["engine"] for line in lines] == ["hf", "llmopt", "llmopt"]
    last = lines[2]
    assert last["decode_ms_per_step"] == pytest.approx(10.0)
    assert last["decode_tokens_per_s"] == pytest.approx(200.0)
    assert last["prefill_tokens_per_s"] == pytest.approx(100.0)
    assert last["speedup_over_hf"] == pytest.approx(4.0)
    assert last["speedup_over_llmopt"] == pytest.approx(2.0)
    assert last["fraction_of_limit"] == pytest.approx(last["limit_ms"] / 10.0)
    assert last["mb_per_step"] > 1
    assert last["gflop_per_step"] > 0
    assert last["rivals"] == {"other int8": pytest.approx(2.0)}
    assert (last["weights"], last["agreement"], last["mean_kl"]) == ("int8", 0.75, 0.0123)


def test_the_table_shows_rivals_of_the_same_shape_and_the_loss() -> None:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(shape_table(result(), RIVALS))
    text = capture.get()
    assert "vs other int8" in text
    assert "far" not in text
    assert "75 % agree, mean KL 0.01230" in text
    assert "12 decode steps, 2 x 5 prompt tokens" in text


def test_a_prefills_lines_have_no_decode_figures() -> None:
    made = result()
    timings = [replace(timing, shape=PREFILL, full_s=[]) for timing in made.timings]
    lines = list(shape_lines(replace(made, shape=PREFILL, timings=timings), "tiny", {}))
    assert lines[0]["decode_ms_per_step"] is lines[0]["decode_tokens_per_s"] is None
    assert lines[0]["ms_per_step"] == pytest.approx(100.0)


def test_a_real_model_is_measured_on_a_shape() -> None:
    model = tiny_model()
    with contenders_for(model, None, {"paged_kv": {}}, max_model_len=64) as contenders:
        shape = Shape("small", 2, 4, 8)
        timings = measure_shape(contenders, shape, 512, seconds=30, max_rounds=1)
    assert [timing.name for timing in timings] == ["HF generate", "llmopt", "+ paged_kv"]
    assert all(timing.step_s > 0 for timing in timings)
    assert torch.get_num_threads() == 1


def test_a_set_of_plugins_is_built_once() -> None:
    assert list(plugin_sets({})) == ["llmopt"]
    assert list(plugin_sets({"paged_kv": {}})) == ["llmopt", "+ paged_kv"]
    both = plugin_sets({"paged_kv": {}, "roofline": {"seconds": 1.0}})
    assert list(both) == ["llmopt", "+ paged_kv", "+ roofline", "+ all"]
    assert both["+ all"] == {"paged_kv": {}, "roofline": {"seconds": 1.0}}


def test_decode_steps_take_as_long_as_the_prefill_at_least_however_short_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    recorder = Recorder("a", [], prefill_s=0.1, step_s=0.004)
    (timing,) = measure_shape([recorder], Shape("long", 1, 5, 1000), 100, seconds=0.05, max_rounds=5)
    assert 25 <= timing.shape.num_new <= 26

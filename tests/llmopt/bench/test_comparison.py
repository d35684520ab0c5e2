from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

from llmopt.bench.clock import ForwardClock
from llmopt.bench.comparison import Result, check, compare, contenders_for, float32_copy, pad_id
from llmopt.bench.contenders import HuggingFace, Pipeline
from llmopt.bench.environment import environment
from llmopt.bench.host import host_batch, host_model
from llmopt.bench.report import json_lines, table
from llmopt.bench.workloads import BenchRequest
from llmopt.testing import tiny_model


class Altered:
    """Hugging Face's tokens with some of them replaced."""

    note = ""

    def __init__(self, inner: HuggingFace, promise: str, change: dict[tuple[int, int], int]) -> None:
        self.name, self.promise, self.inner, self.change = "altered", promise, inner, change

    def generate(self, requests: Sequence[BenchRequest]) -> list[list[int]]:
        rows = self.inner.generate(requests)
        for (row, position), token in self.change.items():
            rows[row][position : position + 1] = [token] * (position < len(rows[row]))
        return rows

    def timed_forward(self, clock: ForwardClock) -> Any:
        return nullcontext()

    def close(self) -> None: ...


@pytest.fixture
def plain() -> HuggingFace:
    model = host_model()
    model.generation_config.eos_token_id = None
    return HuggingFace(model, 0)


REQUESTS = [BenchRequest([5, 6, 7], 4), BenchRequest([8], 2)]


def test_hugging_face_answers_each_request_with_as_many_tokens_as_it_wants(plain: HuggingFace) -> None:
    rows = plain.generate(REQUESTS)
    assert [len(row) for row in rows] == [4, 2]
    alone = [plain.generate([request])[0] for request in REQUESTS]
    assert rows == alone  # the padding is masked


def test_identical_tokens_pass_and_another_token_breaks_an_exact_promise(plain: HuggingFace) -> None:
    contenders = [plain, Altered(plain, "exact", {}), Altered(plain, "exact", {(1, 1): 3})]
    verdicts = check(contenders, REQUESTS, None, 0.5)
    assert [verdict.passed for verdict in verdicts] == [True, True, False]
    assert str(verdicts[1]) == "identical"
    assert str(verdicts[2]) == "differs at row 1, token 1"


def test_a_lossy_contender_is_reported_and_not_judged(plain: HuggingFace) -> None:
    verdicts = check([plain, Altered(plain, "lossy", {(0, 0): 3})], REQUESTS, None, 0.5)
    assert verdicts[1].passed
    assert verdicts[1].difference is not None


def test_half_precision_is_judged_by_the_gap_of_a_replay(plain: HuggingFace) -> None:
    reference = host_model()
    with torch.no_grad():
        ranked = reference(torch.tensor([REQUESTS[0].prompt_ids])).logits[0, -1].sort(descending=True)
    second, gap = int(ranked.indices[1]), float(ranked.values[0] - ranked.values[1])
    short = [BenchRequest(REQUESTS[0].prompt_ids, 1)]
    contenders = [plain, Altered(plain, "exact", {(0, 0): second})]
    near = check(contenders, short, reference, max_gap=gap * 1.01)
    far = check(contenders, short, reference, max_gap=gap * 0.99)
    assert (near[1].passed, far[1].passed) == (True, False)
    assert near[1].replay is not None
    assert near[1].replay.max_gap == pytest.approx(gap, rel=1e-4)
    assert near[0].replay is not None
    assert near[0].replay.max_gap == 0.0


def test_a_float32_model_needs_no_copy_and_a_bfloat16_model_keeps_its_own() -> None:
    assert float32_copy(tiny_model()) is None
    model = tiny_model(dtype=torch.bfloat16)
    copied = float32_copy(model)
    assert copied is not None
    assert (model.dtype, copied.dtype) == (torch.bfloat16, torch.float32)


def test_the_pad_id_is_looked_for_where_it_may_stand() -> None:
    model = tiny_model()
    model.generation_config.pad_token_id = None
    model.generation_config.eos_token_id = [9, 10]
    assert pad_id(model, None) == 9
    model.generation_config.pad_token_id = 4
    assert pad_id(model, None) == 4


@pytest.fixture
def result(plain: HuggingFace) -> Result:
    contenders = [plain, Altered(plain, "exact", {(0, 2): 3})]
    steps: list[str] = []
    made = compare(
        contenders,
        "host",
        lambda number: [BenchRequest(host_batch(number, 512, quick=True)[0].prompt_ids, 5)],
        dtype="float32",
        rounds=2,
        on_progress=steps.append,
    )
    assert len(steps) == 2 * (2 + 1)
    return made


def test_json_lines_hold_figures_verdict_and_environment(result: Result) -> None:
    lines = [json.loads(json.dumps(line)) for line in json_lines(result, "tiny", environment())]
    assert [line["contender"] for line in lines] == ["HF generate", "altered"]
    assert [line["tokens_ok"] for line in lines] == [True, False]
    for line in lines:
        assert line["speedup"]["low"] <= line["speedup"]["median"] <= line["speedup"]["high"]
        assert len(line["total_s"]) == line["rounds"] == 2
        assert line["num_tokens"] == 5
        assert {"commit", "torch", "transformers", "cpu", "device", "num_threads"} <= line.keys()
    assert lines[0]["speedup"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert not result.passed


def test_the_table_marks_a_broken_promise(result: Result) -> None:
    console = Console(width=160, record=True, file=None)
    with console.capture() as capture:
        console.print(table(result))
    text = capture.get()
    assert "HF generate" in text
    assert "BROKEN: differs at row 0, token 2" in text


def test_host_time_is_the_time_outside_the_forward(plain: HuggingFace) -> None:
    (timing,) = compare(
        [plain], "host", lambda number: host_batch(number, 512, quick=True), dtype="float32", rounds=1
    ).timings
    per_step = timing.total_s[0] / 64
    assert 0 < timing.outside_us.median < 1e6 * per_step


def test_contenders_are_built_for_the_plain_pipeline_each_plugin_and_all_of_them() -> None:
    model = tiny_model()
    model.generation_config.eos_token_id = 2
    with contenders_for(model, None, {"paged_kv": {}}, max_model_len=64) as contenders:
        assert [contender.name for contender in contenders] == ["HF generate", "llmopt", "+ paged_kv"]
        assert [contender.promise for contender in contenders] == ["reference", "exact", "exact"]
        verdicts = check(contenders, REQUESTS, None, 0.5)
        pipes = [contender.pipe for contender in contenders if isinstance(contender, Pipeline)]
    assert [str(verdict) for verdict in verdicts] == ["identical"] * 3
    assert model.generation_config.eos_token_id == 2
    assert all(pipe._is_closed for pipe in pipes)


def test_requests_of_one_length_go_through_generate_and_give_the_same_tokens_as_a_batch() -> None:
    model = tiny_model()
    equal = [BenchRequest([5, 6, 7], 4), BenchRequest([8], 4)]
    with contenders_for(model, None, {}, max_model_len=64) as contenders:
        rows = [contender.generate(equal) for contender in contenders]
        ragged = [contender.generate([equal[0], BenchRequest([8], 3)]) for contender in contenders]
    assert rows[0] == rows[1]
    assert ragged[0] == ragged[1] == [rows[0][0], rows[0][1][:3]]


def test_a_contender_says_when_it_fell_back_to_the_models_own_loop() -> None:
    model = tiny_model()
    with contenders_for(model, None, {}, max_model_len=64) as contenders:
        assert check(contenders, REQUESTS, None, 0.5)[1].note == ""
        contenders[1].pipe.why_not = "this test says so"  # type: ignore[attr-defined]
        assert check(contenders, REQUESTS[:1], None, 0.5)[1].note == "this test says so"


def test_the_time_of_a_replaced_execute_stage_counts_as_forward() -> None:
    model = tiny_model()
    clock = ForwardClock()
    with contenders_for(model, None, {}, max_model_len=64) as contenders:
        pipeline = contenders[1]
        assert isinstance(pipeline, Pipeline)
        chain = pipeline.pipe.registry.chains["execute"]
        pipeline.pipe.registry.chains["execute"] = replace(chain, owners=("somebody",))
        before = pipeline.pipe.execute
        with pipeline.timed_forward(clock):
            pipeline.generate(REQUESTS[:1])
        assert clock.num_calls == 4
        assert pipeline.pipe.execute is before

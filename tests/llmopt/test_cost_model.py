"""The cost model: what it says after measuring, what it learns while serving, and that measuring leaves no trace."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import llmopt
from llmopt import PluginInfo, hookimpl
from llmopt.cost_measurement import measure
from llmopt.cost_model import CostModel, Measurements, StepShape, num_pairs
from llmopt.errors import PluginError
from llmopt.testing import tiny_model
from tests.llmopt.helpers import build_tiny

FOUND = Measurements(
    prompts=((1, 0.010), (16, 0.012), (128, 0.040), (512, 0.160)),
    rows=((1, 0.010), (4, 0.011), (16, 0.016)),
    context_token_s=1e-6,
    prefill_pair_s=2e-7,
    copy_fixed_s=1e-4,
    copy_byte_s=1e-10,
    max_tokens=2048,
)


class Wanting:
    """A plugin that asks for the cost model, and nothing else."""

    info = PluginInfo(name="wanting", layer="scheduling", promise="exact", summary="wants the cost model")

    @hookimpl
    def llmopt_wrap_schedule(self, context: Any) -> None:
        context.cost_model.wanted()


class Clock:
    """A clock that only the scripted executor moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


class Scripted:
    """An executor whose steps take a known time."""

    info = PluginInfo(name="scripted_cost", layer="kernel", promise="exact", summary="takes a known time")

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    @hookimpl
    def llmopt_wrap_execute(self, execute: Any) -> Any:
        def take_time(batch: Any, drafts: Any) -> Any:
            self.clock.now_s += true_cost(StepShape.of(batch))
            return execute(batch, drafts)

        return take_time


def true_cost(shape: StepShape) -> float:
    rows = 0.0003 * (shape.num_rows - 1)
    attention = 1e-6 * shape.num_context_tokens + 2e-7 * shape.num_prefill_pairs
    return 0.002 + 0.00005 * shape.num_tokens + rows + attention


def fitted() -> CostModel:
    model = CostModel()
    model.fit(FOUND)
    return model


def assert_monotone(model: CostModel) -> None:
    chooser = random.Random(1)
    for _ in range(500):
        shape = [chooser.randint(1, 3000), chooser.randint(1, 40), chooser.randint(0, 9000), chooser.randint(0, 10**6)]
        more = list(shape)
        more[chooser.randrange(4)] += chooser.randint(1, 500)
        assert model.step_s(*more) >= model.step_s(*shape) - 1e-12, (shape, more)


def test_it_gives_back_what_was_measured() -> None:
    model = fitted()
    for tokens, seconds in FOUND.prompts[1:]:
        assert model.step_s(tokens, 1, 0, num_pairs(tokens, 0)) == pytest.approx(seconds, rel=1e-6)
    assert model.step_s(1, 1, 1) == pytest.approx(0.010, rel=1e-6)
    assert model.step_s(16, 16, 32) == pytest.approx(0.016, rel=0.01)
    assert model.step_s(0) == 0.0
    assert model.copy_s(10**6) == pytest.approx(2e-4)
    assert model.copy_s(0) == 0.0


def test_between_and_beyond_the_points_it_goes_on_as_a_line() -> None:
    model = fitted()
    middle = model.step_s(72) * 2
    assert middle == pytest.approx(model.step_s(16) + model.step_s(128))
    assert model.step_s(4096) > 1.8 * model.step_s(2048)


def test_it_never_falls_when_something_grows_as_measured_and_after_a_thousand_odd_steps() -> None:
    model = fitted()
    assert_monotone(model)
    chooser = random.Random(0)
    for _ in range(1000):
        tokens = chooser.choice([1, 7, 16, 40, 300, 1500, 2500])
        shape = StepShape(
            tokens, chooser.randint(1, min(tokens, 30)), chooser.randint(0, 4000), chooser.randint(0, 9999)
        )
        model.observe(shape, chooser.lognormvariate(-3, 2))
    assert_monotone(model)


def test_a_row_reads_its_context_once_and_tokens_of_chunks_and_drafts_are_pairs() -> None:
    batch: Any = SimpleNamespace(
        num_scheduled=np.array([1, 4, 8]),
        seq_lens=np.array([50, 103, 20]),
        num_drafts=np.array([0, 3, 0]),
        num_tokens=13,
        num_requests=3,
    )
    assert StepShape.of(batch) == StepShape(13, 3, 50 + 100 + 12, num_pairs(3, 100) + num_pairs(8, 12))


def test_the_largest_prefill_fills_the_budget_and_no_more() -> None:
    model = fitted()
    for budget in (0.012, 0.03, 0.08, 0.3):
        for rows, context in ((0, 0), (8, 4000)):
            for start in (0, 700):
                count = model.largest_prefill(budget, rows, context, num_computed_tokens=start)
                shapes = [(rows + n, rows + 1, context + start, num_pairs(n, start)) for n in (count, count + 1)]
                cost = [model.step_s(*shape) for shape in shapes]
                assert count == 0 or cost[0] <= budget
                assert cost[1] > budget
    assert model.largest_prefill(0.005) == 0
    assert model.largest_prefill(100.0) == 2048
    assert model.largest_prefill(100.0, 48) == 2000
    assert model.largest_prefill(100.0, limit=30) == 30


def test_a_prompt_longer_than_a_step_is_computed_in_several() -> None:
    model = fitted()
    steps = model.step_s(2048, 1, 0, num_pairs(2048, 0)) + model.step_s(952, 1, 2048, num_pairs(952, 2048))
    assert model.recompute_s(3000) == pytest.approx(steps)
    assert model.recompute_s(3000, 2048) < model.recompute_s(3000)


def test_a_lasting_change_is_followed_and_carries_over_to_points_without_steps() -> None:
    model = fitted()
    before, long_before = model.step_s(8, 8, 4000), model.step_s(512)
    for _ in range(60):
        model.observe(StepShape(8, 8, 4000, 0), 2 * before)
    assert model.step_s(8, 8, 4000) == pytest.approx(2 * before, rel=0.05)
    assert model.step_s(512) > 1.3 * long_before
    for _ in range(80):
        model.observe(StepShape(8, 8, 4000, 0), before)
    assert model.step_s(8, 8, 4000) == pytest.approx(before, rel=0.05)


def test_long_contexts_alone_teach_what_contexts_cost() -> None:
    model, truth = fitted(), 4e-6
    chooser = random.Random(0)
    for _ in range(3000):
        context = chooser.choice([8, 100, 5000, 20000])
        model.observe(StepShape(4, 4, context, 0), 0.0112 + truth * context)
    assert model.step_s(4, 4, 20000) == pytest.approx(0.0112 + truth * 20000, rel=0.1)
    assert model.step_s(4, 4, 100) == pytest.approx(0.0112 + truth * 100, rel=0.15)


def test_one_pause_of_the_machine_hardly_moves_it() -> None:
    model = fitted()
    before = model.step_s(8, 8, 100)
    for _ in range(20):
        model.observe(StepShape(8, 8, 100, 0), before)
    model.observe(StepShape(8, 8, 100, 0), 1000 * before)
    assert model.step_s(8, 8, 100) < 1.06 * before
    model.observe(StepShape(512, 1, 0, 0), 1000.0)  # the first of its size
    assert model.step_s(512) < 1.3 * fitted().step_s(512)


def test_asking_an_unmeasured_model_says_what_to_do() -> None:
    with pytest.raises(PluginError, match="wanted"):
        CostModel().step_s(1)
    with pytest.raises(ValueError, match="at least one step"):
        CostModel().fit(Measurements(prompts=()))


def test_steps_that_are_alike_are_learned_from_together_and_pauses_among_them_do_no_harm() -> None:
    model = fitted()
    shape = StepShape(8, 8, 400, 0)
    before = model.step_s(*shape)
    for number in range(200):
        model.observe(shape, 50.0 if number % 4 == 0 else 1.3 * before)
    assert model.step_s(*shape) == pytest.approx(1.3 * before, rel=0.05)
    assert model.stats()["num_observed"] == 200


def test_nothing_is_measured_or_observed_unless_a_plugin_wants_it() -> None:
    with build_tiny() as pipe:
        pipe.batch([[5, 6, 7]], max_new_tokens=4, progress=False)
        assert not pipe.cost_model.is_wanted
        assert pipe.cost_model.measured is None
        assert "cost_model" not in pipe.stats()


def test_a_wanted_model_is_measured_in_build_and_refined_by_every_step() -> None:
    with build_tiny(plugins=[Wanting()]) as pipe:
        stats = pipe.stats()["cost_model"]
        assert stats["is_measured"]
        assert stats["num_observed"] == 0
        assert len(stats["step_ms"]) > 2
        pipe.batch([[5, 6, 7]], max_new_tokens=4, ignore_eos=True, progress=False)
        assert pipe.stats()["cost_model"]["num_observed"] == 4
        assert "tokens" in pipe.cost_model.table()
        assert_monotone(pipe.cost_model)


def test_it_finds_the_known_cost_of_an_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("llmopt.cost_measurement.time", clock)
    with build_tiny(plugins=[Scripted(clock), Wanting()], pool_bytes=1 << 23) as pipe:
        shapes = [StepShape(n, 1, 0, num_pairs(n, 0)) for n in (2, 16, 50, 128, 200, 1000)]
        shapes += [StepShape(64, 1, 0, num_pairs(64, 128)), StepShape(4, 4, 900, 0), StepShape(16, 16, 32, 0)]
        shapes += [StepShape(1, 1, 250, 0), StepShape(70, 7, 600, num_pairs(64, 10))]
        for shape in shapes:
            told = pipe.cost_model.step_s(
                shape.num_tokens, shape.num_rows, shape.num_context_tokens, shape.num_prefill_pairs
            )
            assert told == pytest.approx(true_cost(shape), rel=0.02), shape


def test_a_slow_model_is_measured_at_two_points_only(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("llmopt.cost_measurement.time", clock)
    clocks = Scripted(clock)
    with build_tiny(plugins=[clocks, Wanting()]) as pipe:
        monkeypatch.setattr("tests.llmopt.test_cost_model.true_cost", lambda shape: 0.8)
        before = clock.now_s
        measure(pipe)
        assert clock.now_s - before < 4.0
        assert pipe.cost_model.measured is not None
        assert [n for n, _ in pipe.cost_model.measured.prompts] == [1, 16]
        assert pipe.cost_model.step_s(8) == pytest.approx(0.8, rel=0.01)


def test_measuring_leaves_no_trace() -> None:
    for kind in ("llama", "gpt2"):
        with build_tiny(kind, plugins=[Wanting()]) as pipe:
            pipe.batch([[5, 6, 7]], max_new_tokens=4, progress=False)
            pool, queue = pipe.block_pool, pipe.queue
            free, slots = pool.free_blocks(), list(queue.free_slots)
            stats = {k: v for k, v in pipe.stats().items() if k != "cost_model"}
            states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
            measure(pipe, budget_s=0.2)
            assert pool.free_blocks() == free
            pool.check()
            assert queue.free_slots == slots
            assert len(queue) == 0
            assert {k: v for k, v in pipe.stats().items() if k != "cost_model"} == stats
            assert torch.equal(torch.get_rng_state(), states[0])
            assert np.random.get_state()[1].tolist() == states[1]
            assert random.getstate() == states[2]
            assert not pipe.model.training


def test_tokens_are_the_same_with_and_without_it() -> None:
    prompts = [[5, 6, 7, 8], [9, 10]]
    found = []
    for plugins in ([], [Wanting()]):
        with build_tiny(plugins=plugins) as pipe:
            found.append([o.token_ids for o in pipe.batch(prompts, max_new_tokens=12, progress=False)])
    assert found[0] == found[1]


def test_a_model_whose_prompts_cannot_be_cut_is_measured_too() -> None:
    changes = {"state_size": 8, "conv_kernel": 4, "expand": 2, "time_step_rank": 4}
    with build_tiny("mamba", plugins=[Wanting()], changes=changes) as pipe:
        assert pipe.capabilities.has_states
        assert pipe.cost_model.measured is not None
        assert pipe.cost_model.measured.prefill_pair_s == 0.0
        assert pipe.cost_model.step_s(64) > 0.0
        out = pipe.batch([[5, 6, 7]], max_new_tokens=4, ignore_eos=True, progress=False)
        assert len(out[0].token_ids) == 4
        assert pipe.stats()["cost_model"]["num_observed"] == 4


@pytest.mark.parametrize(("max_model_len", "block_size"), [(2, 32), (3, 1), (40, 8)])
def test_small_pools_are_measured_as_far_as_they_go(max_model_len: int, block_size: int) -> None:
    with build_tiny(
        plugins=[Wanting()], max_model_len=max_model_len, block_size=block_size, max_num_requests=1
    ) as pipe:
        assert pipe.cost_model.measured is not None
        assert pipe.cost_model.measured.prompts[-1][0] < max_model_len
        assert pipe.cost_model.step_s(1) > 0.0


def test_a_pool_of_attention_free_layers_copies_nothing() -> None:
    changes = {"state_size": 8, "conv_kernel": 4, "expand": 2, "time_step_rank": 4}
    with build_tiny("mamba", plugins=[Wanting()], changes=changes) as pipe:
        assert pipe.cost_model.copy_s(1000) == 0.0
    with llmopt.build(tiny_model(), [Wanting()]) as plain:
        assert plain.cost_model.copy_s(1000) > 0.0

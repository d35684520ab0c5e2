"""Chunks beside decodes: streams keep their pace, small prompts pass huge ones, and nobody starves."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

import llmopt
from llmopt.testing import assert_same_tokens, tiny_model, tiny_prompts
from llmopt_plugins.scheduling.chunked_prefill import ChunkedBudget, ChunkedPrefill
from tests.llmopt.helpers import assert_idle, pool_bytes
from tests.plugins.scheduling.simulation import LinearCost, Simulation


def simulation(chunk_size: int | None, max_itl_s: float | None = None, **options: Any) -> Simulation:
    def wrap(inner: Any, sim: Simulation) -> Any:
        return ChunkedBudget(inner, chunk_size, max_itl_s, sim.cost, sim.clock)

    return Simulation(budgets=[wrap], **options)


def stall(sim: Simulation) -> list[float]:
    """16 streams decode and a prompt of 4,096 tokens arrives; the gaps of the streams."""
    for number in range(16):
        sim.at(0.0, f"stream-{number}", 32, new=200)
    sim.at(0.5, "long", 4096, new=4)
    sim.run()
    return sorted(gap for number in range(16) for gap in sim.gaps(f"stream-{number}"))


def percentile(gaps: list[float], share: float) -> float:
    return gaps[int(share * (len(gaps) - 1))]


def test_without_chunks_a_long_prompt_stalls_every_stream_and_with_them_it_does_not() -> None:
    plain, chunked = stall(Simulation()), stall(simulation(None))
    assert max(plain) > 10 * statistics.median(plain)
    assert percentile(chunked, 0.99) <= max(chunked) <= 2.5 * statistics.median(chunked)


@pytest.mark.parametrize("target_s", [0.015, 0.030, 0.100])
def test_steps_beside_decodes_hold_the_target_and_use_it(target_s: float) -> None:
    sim = simulation(None, target_s)
    gaps = stall(sim)
    assert max(gaps) <= target_s + 1e-9
    chunks = [step["long"] for step in sim.steps if step.get("long", 0) > 1 and len(step) > 1]
    most = round((target_s - 0.010) / 0.0001)
    assert chunks[0] + 16 == most - most % 16  # of the rows that fit, those that fill tiles of 16


def test_steps_that_take_longer_than_predicted_make_the_next_ones_smaller() -> None:
    class Optimist(LinearCost):
        base_s, token_s = LinearCost.base_s / 1.5, LinearCost.token_s / 1.5

    sim = Simulation(budgets=[lambda inner, sim: ChunkedBudget(inner, None, 0.030, Optimist(), sim.clock)])  # type: ignore[arg-type]
    gaps = stall(sim)
    assert max(gaps) > 0.040
    assert percentile(gaps, 0.75) <= 0.034


def test_a_prompt_goes_on_although_the_target_leaves_no_room() -> None:
    sim = simulation(None, 0.001)
    sim.at(0.0, "stream", 8, new=40)
    sim.at(0.05, "prompt", 100, new=2)
    sim.run()
    assert {step["prompt"] for step in sim.steps if "stream" in step and step.get("prompt", 0) > 4} == {16}


def test_a_chunk_is_the_rest_of_a_step_after_its_decodes_and_never_nothing() -> None:
    sim = simulation(32)
    for number in range(8):
        sim.at(0.0, f"stream-{number}", 1, new=400)
    sim.at(0.05, "long", 200, new=2)
    for number in range(8, 40):
        sim.at(0.3, f"stream-{number}", 1, new=400)
    sim.run()
    sizes = [(len(step) - 1, step["long"]) for step in sim.steps if step.get("long", 0) > 1]
    assert all(chunk <= max(32 - decodes, 4) for decodes, chunk in sizes)
    assert sizes[0] == (8, 24)


def test_a_prompt_alone_is_not_cut_finer_than_it_has_to_be() -> None:
    sim = simulation(None)
    sim.at(0.0, "long", 3000, new=1)
    sim.run()
    assert [step["long"] for step in sim.steps] == [1024, 1024, 952]


def test_a_small_prompt_is_not_stuck_behind_a_huge_one_nor_does_the_huge_one_starve() -> None:
    sim = simulation(64)
    sim.at(0.0, "stream", 4, new=600)
    sim.at(0.1, "huge", 4096, new=2)
    for number in range(150):  # small ones without end, more than the chunk holds
        sim.at(0.2 + 0.02 * number, f"small-{number}", 60, new=1)
    sim.run()
    first = {name: times[0] for name, times in sim.times.items()}
    assert first["small-0"] - 0.2 < 0.1
    beside = [step["huge"] for step in sim.steps if step.get("huge", 0) > 1]
    assert min(beside[:-1]) >= 31  # half of every chunk
    assert first["huge"] - 0.1 < 2.2 * 4096 / 63 * 0.0165


def test_two_huge_prompts_and_a_small_one_the_small_one_is_first() -> None:
    sim = simulation(64)
    sim.at(0.0, "stream", 4, new=300)
    for name, size in (("one", 2000), ("two", 2000), ("small", 40)):
        sim.at(0.1, name, size, new=1)
    sim.run()
    assert sim.times["small"][0] < 0.2
    assert sim.times["one"][0] < sim.times["two"][0]


@pytest.mark.parametrize("plugins", [["chunked_prefill:chunk_size=4"], ["chunked_prefill:chunk_size=7", "paged_kv"],
                                     ["paged_kv", "chunked_prefill"]])  # fmt: skip
def test_tokens_are_those_of_the_model_whatever_the_chunks(plugins: list[str]) -> None:
    model = tiny_model()
    options: dict[str, Any] = {"block_size": 4, "max_model_len": 96, "pool_bytes": pool_bytes(60, 4)}
    with llmopt.build(model, plugins, **options) as pipe:
        assert_same_tokens(pipe, model, tiny_prompts(6, min_length=1, max_length=40), max_new_tokens=16)
        assert_idle(pipe)


def test_a_model_that_takes_whole_prompts_runs_with_small_chunks() -> None:
    model = tiny_model("mamba")
    prompts = tiny_prompts(4, min_length=5, max_length=30)
    with llmopt.build(model, ["chunked_prefill:chunk_size=4"]) as pipe:
        assert pipe.why_not is None
        assert_same_tokens(pipe, model, prompts, max_new_tokens=12)


def test_describe_and_stats_say_how_large_chunks_are() -> None:
    with llmopt.build(tiny_model(), ["chunked_prefill:chunk_size=8"]) as pipe:
        pipe.batch([[5] * 30], max_new_tokens=2, progress=False)
        assert pipe.stats()["budget.chunked_prefill"]["last_chunk"] == 8
        assert "steps of 8 tokens" in str(pipe.describe())


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"chunk_size": 0}, "chunk_size is a whole number of tokens"),
        ({"chunk_size": "many"}, 'or "auto", found'),
        ({"chunk_size": 512, "max_itl_ms": 20}, "goes with chunk_size=auto"),
        ({"max_itl_ms": 0}, "above 0"),
        ({"max_itl_ms": True}, "above 0"),
    ],
)
def test_bad_options_say_what_was_wanted(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        ChunkedPrefill(**options)


def test_chunks_that_slow_steps_made_as_small_as_can_be_grow_again() -> None:
    sim = simulation(None, 0.017)
    for number in range(16):
        sim.at(0.0, f"stream-{number}", 32, new=500)
    sim.at(0.5, "long", 8192, new=1)

    class Uneven(LinearCost):
        """What steps really take: three times as long for half a second."""

        def step_s(self, *shape: Any) -> float:
            return (3.0 if 0.5 < sim.now < 1.0 else 1.0) * super().step_s(*shape)

    sim.budget.cost, sim.cost = sim.cost, Uneven()
    sim.run()
    chunks = [step["long"] for step in sim.steps if step.get("long", 0) > 1 and len(step) > 1]
    assert min(chunks[:-1]) == 16
    assert chunks[0] == chunks[-2] == 48

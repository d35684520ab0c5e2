"""Two lines in one engine: decodes keep their share of the time, prompts get theirs, and neither starves."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

import llmopt
from llmopt.testing import assert_same_tokens, tiny_model, tiny_prompts
from llmopt_plugins.scheduling.pd_separation import PdSeparation
from llmopt_plugins.scheduling.pd_separation.slices import SlicedBudget
from tests.llmopt.helpers import assert_idle, pool_bytes
from tests.plugins.scheduling.simulation import Simulation


def simulation(
    slice_s: float = 0.050, decode_share: float = 0.5, patience_s: float = 1e9, **options: Any
) -> Simulation:
    def wrap(inner: Any, sim: Simulation) -> Any:
        return SlicedBudget(inner, sim.cost, slice_s, decode_share, patience_s, sim.clock)

    return Simulation(budgets=[wrap], **options)


def loaded(sim: Simulation, prompts: int = 8, size: int = 2000, new: int = 1200) -> Simulation:
    """Four streams, and prompts that come all at once."""
    for number in range(4):
        sim.at(0.0, f"stream-{number}", 8, new=new)
    for number in range(prompts):
        sim.at(0.2, f"prompt-{number}", size, new=1)
    sim.run()
    return sim


def shares(sim: Simulation) -> tuple[float, float]:
    """Seconds of steps with prompts and without, while both lines had work."""
    end = max(times[0] for name, times in sim.times.items() if name.startswith("prompt"))
    with_prompts = without = now = 0.0
    for step in sim.steps:
        length = sim.cost.step_s(sum(step.values()))
        now += length
        if 0.2 < now <= end:
            if any(name.startswith("prompt") for name in step):
                with_prompts += length
            else:
                without += length
    return with_prompts, without


@pytest.mark.parametrize("share", [0.25, 0.5, 0.8])
def test_decodes_have_their_share_of_the_time(share: float) -> None:
    with_prompts, without = shares(loaded(simulation(decode_share=share)))
    assert without / (with_prompts + without) == pytest.approx(share, abs=0.08)


def test_a_slice_is_as_long_as_it_may_be_and_no_longer() -> None:
    sim = loaded(simulation(slice_s=0.040))
    gaps = [gap for number in range(4) for gap in sim.gaps(f"stream-{number}")]
    assert max(gaps) == pytest.approx(0.040 + 0.0104, abs=1e-3)
    assert statistics.median(gaps) == pytest.approx(0.0104, abs=1e-3)  # most steps carry no prompt


def test_decodes_run_in_every_step() -> None:
    sim = loaded(simulation(), new=100)
    assert all("stream-0" in step for step in sim.steps[:100])
    assert len(sim.steps) > 100


def test_prompts_lose_patience_so_that_none_waits_for_ever() -> None:
    patient, impatient = (
        max(times[0] for name, times in loaded(simulation(decode_share=0.9, patience_s=patience)).times.items()
            if name.startswith("prompt"))
        for patience in (1e9, 0.5)
    )  # fmt: skip
    assert impatient < 0.5 * patient


def test_a_line_that_is_alone_has_everything() -> None:
    sim = simulation(slice_s=0.001, decode_share=0.9)
    sim.at(0.0, "prompt", 2000, new=1)
    sim.run()
    assert [step["prompt"] for step in sim.steps] == [1024, 976]


def test_a_small_prompt_does_not_wait_for_a_huge_one() -> None:
    sim = simulation()
    sim.at(0.0, "stream", 8, new=300)
    sim.at(0.1, "huge", 5000, new=1)
    sim.at(0.15, "small", 30, new=1)
    sim.run()
    assert sim.times["small"][0] < 0.35 < sim.times["huge"][0]


@pytest.mark.parametrize("plugins", [
    ["pd_separation"],
    ["pd_separation:slice_ms=0.01,decode_share=0.7", "paged_kv"],
    ["paged_kv", "batch_window", "pd_separation", "chunked_prefill:chunk_size=6"],
])  # fmt: skip
def test_tokens_are_those_of_the_model_whoever_has_the_turn(plugins: list[str]) -> None:
    model = tiny_model()
    options: dict[str, Any] = {"block_size": 4, "max_model_len": 96, "pool_bytes": pool_bytes(60, 4)}
    with llmopt.build(model, plugins, **options) as pipe:
        assert_same_tokens(pipe, model, tiny_prompts(6, min_length=1, max_length=40), max_new_tokens=16)
        assert_idle(pipe)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"mode": "elsewhere"}, 'mode is "slices"'),
        ({"slice_ms": 0}, "above 0"),
        ({"patience_ms": -1}, "patience_ms is a number"),
        ({"decode_share": 1.0}, "0 <= decode_share < 1"),
        ({"decode_share": "half"}, "decode_share is a number"),
    ],
)
def test_bad_options_say_what_was_wanted(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        PdSeparation(**options)

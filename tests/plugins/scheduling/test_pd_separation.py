"""Two lines in one engine: decodes keep their share of the time, prompts get theirs, and neither starves."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from llmopt_plugins.scheduling.pd_separation import PdSeparation
from llmopt_plugins.scheduling.pd_separation.slices import SlicedBudget
from tests.plugins.scheduling.simulation import Simulation


def simulation(
    slice_s: float | None = 0.050, decode_share: float = 0.5, patience_s: float = 1e9, **options: Any
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


def test_without_a_length_a_step_with_a_slice_takes_five_times_a_lone_decode_however_many_decode() -> None:
    for num_streams in (1, 60):
        sim = simulation(slice_s=None)
        for number in range(num_streams):
            sim.at(0.0, f"stream-{number}", 8, new=200)
        sim.at(0.2, "prompt", 2000, new=1)
        sim.run()
        # 10.1 ms alone; the slices of 60 decodes, which take 16 ms, are smaller
        assert max(sim.gaps("stream-0")[10:]) == pytest.approx(5 * 0.0101, abs=1e-3)


def test_a_slice_has_the_time_of_one_decode_even_when_decodes_alone_take_longer_than_a_step_should() -> None:
    sim = simulation(slice_s=None, max_num_requests=500)
    for number in range(450):  # 55 ms a step
        sim.at(0.0, f"stream-{number}", 1, new=60)
    sim.at(0.2, "prompt", 2000, new=1)
    sim.run()
    slices = [step["prompt"] for step in sim.steps if "prompt" in step and len(step) > 400]
    assert max(slices[:-1]) == 101


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


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"mode": "elsewhere"}, 'mode is "slices"'),
        ({"slice_ms": 0}, 'slice_ms is a number of milliseconds above 0, or "auto", found 0'),
        ({"slice_ms": "short"}, "slice_ms is a number"),
        ({"patience_ms": 0}, "patience_ms is a number of milliseconds above 0, found 0"),
        ({"decode_share": 1.0}, "0 <= decode_share < 1"),
        ({"decode_share": "half"}, "decode_share is a share of the time"),
    ],
)
def test_bad_options_say_what_was_wanted(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        PdSeparation(**options)

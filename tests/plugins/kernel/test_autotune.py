"""autotune: a value other than the default is chosen when it is faster, once, and kept for this machine and model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import llmopt
from llmopt import native
from llmopt.errors import PluginRequirementError
from llmopt.testing import assert_same_tokens, tiny_model, tiny_prompts
from llmopt_plugins.kernel import autotune
from llmopt_plugins.kernel.autotune import Autotune, Tunable, tune

needs_core = pytest.mark.skipif(native.core() is None, reason=str(native.why_not()))


class Machine:
    """A clock that steps move on: ``cost(value, rows)`` says by how much."""

    def __init__(self, cost: Callable[[int, int], float]) -> None:
        self.cost = cost
        self.value = 0
        self.now = 0.0

    def apply(self, value: int) -> None:
        self.value = value

    def measure(self, rows: int) -> Callable[[], None]:
        def step() -> None:
            self.now += self.cost(self.value, rows)

        return step

    def tune(self, default: int, candidates: tuple[int, ...], is_threshold: bool = False) -> int:
        tunable = Tunable("number", default, candidates, self.apply, is_threshold)
        best = tune(tunable, self.measure, 1.0, clock=lambda: self.now)
        assert self.value == best, "what was chosen is applied"
        return best


# -- its own logic ---------------------------------------------------------------------------------------------------
def test_the_fastest_value_is_chosen() -> None:
    assert Machine(lambda value, rows: abs(value - 20) + 10).tune(8, (4, 8, 16, 32)) == 16


def test_the_default_stays_unless_another_is_clearly_faster() -> None:
    assert Machine(lambda value, rows: 1.0 if value == 8 else 0.98).tune(8, (4, 8, 16)) == 8
    assert Machine(lambda value, rows: 1.0 if value == 8 else 0.96).tune(8, (8, 16)) == 16


def test_a_value_that_is_faster_only_while_the_machine_is_busy_is_not_chosen() -> None:
    machine = Machine(lambda value, rows: 0.001)

    def cost(value: int, rows: int) -> float:
        is_busy = machine.now < 0.8  # most of the measurement: medians over all of it would be taken in
        return 0.001 if value == 8 and not is_busy else 0.005 if value == 8 else 0.002

    machine.cost = cost
    assert machine.tune(8, (8, 16)) == 8


def tiles_win_from(crossing: int, gain: float = 0.5) -> Callable[[int, int], float]:
    """Above the threshold a step costs 1; below it, more from `crossing` rows on and less before."""
    return lambda threshold, rows: 1.0 if rows >= threshold else 1.0 + (gain if rows >= crossing else -gain)


@pytest.mark.parametrize("crossing", [1, 2, 4])
def test_a_threshold_is_the_number_of_rows_from_which_on_more_is_better(crossing: int) -> None:
    assert Machine(tiles_win_from(crossing)).tune(5, (1, 2, 4, 8), is_threshold=True) == crossing


def test_a_threshold_that_decides_like_the_default_is_the_default() -> None:
    assert Machine(tiles_win_from(4)).tune(3, (1, 2, 4, 8), is_threshold=True) == 3


def test_a_threshold_whose_sides_are_equal_stays() -> None:
    assert Machine(lambda value, rows: 1.0).tune(5, (1, 2, 4, 8), is_threshold=True) == 5


def test_a_side_that_never_wins_is_put_out_of_reach() -> None:
    assert Machine(tiles_win_from(1000)).tune(5, (1, 2, 4, 8), is_threshold=True) == 9


def test_a_measurement_that_fails_leaves_the_default() -> None:
    machine = Machine(lambda value, rows: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        machine.tune(8, (4, 8))
    assert machine.value == 8


@pytest.mark.parametrize("budget_s", [0, -1, 601])
def test_a_budget_out_of_range_is_refused(budget_s: float) -> None:
    with pytest.raises(ValueError, match="0 < budget_s <= 600"):
        Autotune(budget_s=budget_s)


# -- what is kept ----------------------------------------------------------------------------------------------------
CHOICES = [Tunable("number", 8, (4, 8, 16), lambda value: None)]


def test_what_was_found_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file.json"
    autotune.write_result(path, {"isa": "avx2"}, {"number": 16})
    assert autotune.read_result(path, {"isa": "avx2"}, CHOICES) == {"number": 16}
    assert [file.name for file in path.parent.iterdir()] == ["file.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        json.dumps({"key": {"isa": "amx"}, "values": {"number": 16}}),
        json.dumps({"key": {"isa": "avx2"}, "values": {}}),
        json.dumps({"key": {"isa": "avx2"}, "values": {"number": 7}}),
        json.dumps({"key": {"isa": "avx2"}, "values": {"number": "16"}}),
        json.dumps({"key": {"isa": "avx2"}, "values": [16]}),
    ],
)
def test_a_damaged_or_foreign_file_counts_as_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    assert autotune.read_result(path, {"isa": "avx2"}, CHOICES) is None


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    autotune.write_result(tmp_path / "file" / "x.json", {}, {})
    assert "cannot be kept" in caplog.text


# -- in a pipeline ---------------------------------------------------------------------------------------------------
@needs_core
@pytest.mark.native
def test_a_model_is_measured_once_and_its_tokens_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMOPT_CACHE", str(tmp_path))
    model, calls = tiny_model(), []
    real = autotune.tune
    monkeypatch.setattr(autotune, "tune", lambda choice, *rest: calls.append(choice.name) or real(choice, *rest))
    for _ in range(2):
        with llmopt.build(model, ["native", Autotune(budget_s=0.1)]) as pipe:
            assert any(note.startswith("autotune: prefetch_bytes") for note in pipe.notes)
            assert pipe.block_pool.num_used == 0
            assert_same_tokens(pipe, model, tiny_prompts(3))
    assert calls == ["prefetch_bytes"]
    (file,) = (tmp_path / "autotune").iterdir()
    file.write_text("damaged")
    llmopt.build(model, ["native", Autotune(budget_s=0.1)]).close()
    assert len(calls) == 2


def test_without_native_it_says_what_is_missing() -> None:
    with pytest.raises(PluginRequirementError, match="requires 'native'"):
        llmopt.build(tiny_model(), ["autotune"])

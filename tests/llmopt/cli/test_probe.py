from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from llmopt import machine_limits
from llmopt.cli.app import app

GIVEN = json.loads((Path(__file__).parents[2] / "machine_limits.json").read_text())


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["probe", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_probe_shows_a_row_per_working_set_and_per_kind() -> None:
    text = run()
    for part in (
        "a machine of the tests",
        "1 MiB",
        "1024 MiB",
        "1 thread",
        "2 threads",
        "80.0",
        "bfloat16_tile",
        "2000",
    ):
        assert part in text


def test_probe_as_json_is_the_file_of_the_cache() -> None:
    assert json.loads(run("--json")) == GIVEN


def test_refresh_measures_again_and_keeps_the_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = machine_limits.MachineLimits.from_dict(GIVEN)
    asked: list[float] = []

    def measure(device: object, seconds: float) -> machine_limits.Measured:
        asked.append(seconds)
        return given.bandwidth, given.peaks

    monkeypatch.setattr(machine_limits, "measure", measure)
    monkeypatch.setenv("LLMOPT_CACHE", str(tmp_path))
    found = json.loads(run("--json", "--refresh", "--seconds", "0.5"))
    assert asked == [0.5]
    assert found["peaks"] == GIVEN["peaks"]
    (kept,) = (tmp_path / "machine").iterdir()
    assert json.loads(kept.read_text()) == found

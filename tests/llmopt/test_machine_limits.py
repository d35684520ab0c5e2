"""Limits are read sensibly, kept under the right key, and measured again when what was kept is of no use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmopt import container, machine_limits
from llmopt.errors import ConfigError
from llmopt.machine_limits import MachineLimits, limits_path, machine_key, measure_cpu, measure_with_torch, working_sets

MIB = 1 << 20
LIMITS = MachineLimits(
    key={"device": "cpu"},
    bandwidth={1: [(MIB, 40e9), (64 * MIB, 10e9)], 4: [(MIB, 100e9), (8 * MIB, 30e9), (64 * MIB, 50e9)]},
    peaks={"float32": {1: 1e11, 4: 4e11}, "bfloat16_dot": {1: 2e11, 4: 8e11}, "bfloat16_tile": {1: 1e12, 4: 4e12}},
    measured_at="today",
    measured_in_s=1.5,
)
MEASURED = (LIMITS.bandwidth, LIMITS.peaks)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    """A cache of its own, and a measurement that only counts its calls."""
    calls: list[float] = []

    def measure(device: Any, seconds: float) -> Any:
        calls.append(seconds)
        return MEASURED

    monkeypatch.delenv("LLMOPT_MACHINE_LIMITS")
    monkeypatch.setenv("LLMOPT_CACHE", str(tmp_path))
    monkeypatch.setattr(machine_limits, "measure", measure)
    return calls


def test_bandwidth_is_read_between_the_sizes_and_held_beyond_them() -> None:
    assert LIMITS.bytes_per_s(1, 1) == LIMITS.bytes_per_s(MIB, 1) == 40e9
    assert LIMITS.bytes_per_s(8 * MIB, 1) == pytest.approx(20e9)  # half-way in logarithms
    assert LIMITS.bytes_per_s(1 << 40, 1) == 10e9


def test_bandwidth_never_rises_with_the_working_set() -> None:
    rates = [LIMITS.bytes_per_s(size * MIB) for size in (0.5, 1, 2, 4, 8, 16, 32, 64, 128)]
    assert rates == sorted(rates, reverse=True)
    assert LIMITS.bytes_per_s(8 * MIB) == 50e9  # the slow measurement of a moment is outdone by a larger set's


def test_the_time_for_more_bytes_is_longer() -> None:
    times = [LIMITS.seconds(size * MIB, 0, "float32") for size in (1, 2, 8, 64, 500)]
    assert times == sorted(times)
    assert len(set(times)) == len(times)


def test_figures_are_for_all_threads_unless_asked_and_for_the_nearest_smaller_number() -> None:
    assert LIMITS.num_threads == 4
    assert LIMITS.bytes_per_s(MIB) == 100e9
    assert LIMITS.bytes_per_s(MIB, 3) == 40e9
    assert LIMITS.ops_per_s("float32", 2) == 1e11


def test_a_type_has_the_peak_of_the_fastest_instruction_that_serves_it() -> None:
    assert LIMITS.ops_per_s("bfloat16") == 4e12
    assert LIMITS.ops_per_s("int8") == 4e12  # no integer instruction was measured: as bfloat16
    assert LIMITS.ops_per_s("float16") == LIMITS.ops_per_s("float32") == 4e11
    assert LIMITS.ops_per_s("float64") == 4e11


def test_a_limit_is_the_longer_of_moving_and_computing() -> None:
    assert LIMITS.seconds(100e9, 0, "float32") == pytest.approx(2.0)
    assert LIMITS.seconds(1, 4e12, "bfloat16") == pytest.approx(1.0)
    assert LIMITS.seconds(100e9, 4e11, "float32") == pytest.approx(2.0)


def test_limits_survive_json() -> None:
    assert MachineLimits.from_dict(json.loads(json.dumps(LIMITS.to_dict()))) == LIMITS


@pytest.mark.parametrize(
    "change",
    [
        {"bandwidth": {}},
        {"bandwidth": {"1": []}},
        {"bandwidth": {"1": [[MIB, -1.0]]}},
        {"bandwidth": {"1": [[MIB, float("nan")]]}},
        {"bandwidth": {"one": [[MIB, 1.0]]}},
        {"bandwidth": [1, 2]},
        {"peaks": {}},
        {"peaks": {"bfloat16_dot": {"1": 1.0}}},
        {"peaks": {"float32": {}}},
        {"peaks": {"float32": {"1": "fast"}}},
        {"key": None},
    ],
)
def test_damaged_limits_are_recognised(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no limits of a machine"):
        MachineLimits.from_dict(LIMITS.to_dict() | change)


def test_a_machine_is_measured_once_and_again_when_asked(measured: list[float]) -> None:
    first = machine_limits.machine_limits(seconds=2.0)
    assert first.bandwidth == LIMITS.bandwidth
    assert machine_limits.machine_limits() == first
    assert measured == [2.0]
    machine_limits.machine_limits(refresh=True)
    assert len(measured) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"key": {}}', "null", '{"bandwidth": 3}'])
def test_a_damaged_cache_file_is_measured_again(measured: list[float], text: str) -> None:
    machine_limits.machine_limits()
    path = limits_path(machine_key())
    path.write_text(text)
    assert machine_limits.machine_limits().bandwidth == LIMITS.bandwidth
    assert len(measured) == 2
    assert MachineLimits.from_dict(json.loads(path.read_text())).bandwidth == LIMITS.bandwidth


def test_limits_of_another_machine_are_not_used(measured: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    machine_limits.machine_limits()
    monkeypatch.setattr(container, "num_cpus", lambda: ((0, 1, 2), 3))
    machine_limits.machine_limits()
    monkeypatch.setattr(container, "memory", lambda: (1 << 30, 1 << 31))
    machine_limits.machine_limits()
    assert len(measured) == 3
    path = limits_path(machine_key())
    path.write_text(json.dumps(LIMITS.to_dict()))  # right name, other key
    machine_limits.machine_limits()
    assert len(measured) == 4


def test_a_cache_that_cannot_be_written_does_not_stop_anybody(
    measured: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LLMOPT_CACHE", str(tmp_path / "file"))
    assert machine_limits.machine_limits().bandwidth == LIMITS.bandwidth


def test_a_given_file_is_used_as_it_is(measured: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "limits.json"
    monkeypatch.setenv("LLMOPT_MACHINE_LIMITS", str(path))
    with pytest.raises(ConfigError, match=r"LLMOPT_MACHINE_LIMITS=.*cannot be used"):
        machine_limits.machine_limits()
    path.write_text(json.dumps(LIMITS.to_dict()))
    assert machine_limits.machine_limits() == LIMITS
    assert measured == []


def test_the_key_names_processor_cpus_memory_and_versions() -> None:
    key = machine_key()
    assert {"format", "llmopt", "device", "name", "num_cpus", "num_threads", "memory_gib", "isa"} <= key.keys()


def test_no_working_set_is_larger_than_a_quarter_of_the_memory() -> None:
    assert working_sets(64 << 30) == [MIB << exponent for exponent in range(11)]
    assert working_sets(100 * MIB) == [MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB]
    assert working_sets(MIB) == [MIB // 4]


@pytest.mark.native
def test_the_compiled_measurement_covers_all_sizes_threads_and_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "memory", lambda: (16 * MIB, 32 * MIB))
    monkeypatch.setattr(container, "num_cpus", lambda: ((0, 0, 0), 3))
    bandwidth, peaks = measure_cpu(0.05)
    assert {threads: [size for size, _ in points] for threads, points in bandwidth.items()} == {
        threads: [MIB, 2 * MIB, 4 * MIB] for threads in (1, 3)
    }
    assert "float32" in peaks
    assert all(set(by_threads) == {1, 3} for by_threads in peaks.values())
    made = MachineLimits({}, bandwidth, peaks)
    assert MachineLimits.from_dict(made.to_dict()) == made


def test_torch_measures_where_there_is_no_compiled_core() -> None:
    bandwidth, peaks = measure_with_torch("cpu", [MIB // 4, MIB], 32, 0.02)
    assert [size for size, _ in bandwidth[1]] == [MIB // 4, MIB]
    assert {"float32", "bfloat16"} <= peaks.keys()
    made = MachineLimits({}, bandwidth, peaks)
    assert MachineLimits.from_dict(made.to_dict()) == made


@pytest.mark.gpu
def test_a_gpu_is_measured_with_copies_and_products() -> None:
    bandwidth, peaks = measure_with_torch("cuda", [MIB, 64 * MIB], 1024, 0.5)
    made = MachineLimits({}, bandwidth, peaks)
    assert made.bytes_per_s(64 * MIB) > 1e10
    assert {"float32", "bfloat16", "float16"} <= peaks.keys()

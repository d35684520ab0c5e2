"""The native pool takes the CPUs that this process may use, and leaves the host program one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from llmopt.errors import ConfigError
from llmopt.threads import num_native_threads, one_torch_thread


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLMOPT_NUM_THREADS", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def count(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cpus: int, quota: str = "max 100000", option: int | None = None
) -> int:
    """Threads with a made-up affinity mask and cgroup quota."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)), raising=False)
    cgroup, proc = folder / "cgroup", folder / "proc"
    (proc / "self").mkdir(parents=True, exist_ok=True)
    (proc / "self" / "cgroup").write_text("0::/\n")
    cgroup.mkdir(exist_ok=True)
    (cgroup / "cpu.max").write_text(quota + "\n")
    return num_native_threads(option, cgroup=cgroup, proc=proc)


@pytest.mark.parametrize(("cpus", "threads"), [(1, 1), (2, 2), (3, 2), (4, 3), (64, 63)])
def test_one_cpu_stays_free_when_there_are_more_than_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpus: int, threads: int
) -> None:
    assert count(tmp_path, monkeypatch, cpus) == threads


@pytest.mark.parametrize(
    ("quota", "threads"), [("100000 100000", 1), ("50000 100000", 1), ("290000 100000", 2), ("450000 100000", 3)]
)
def test_the_quota_counts_rounded_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, threads: int
) -> None:
    assert count(tmp_path, monkeypatch, 8, quota) == threads


def test_the_quota_of_version_1_counts_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cgroup" / "cpu"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("100000\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert count(tmp_path, monkeypatch, 8) == 1


@pytest.mark.parametrize(("ranks", "threads"), [("2", 3), ("3", 2), ("8", 1), ("20", 1), ("nonsense", 7)])
def test_ranks_on_one_machine_share_its_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: str, threads: int
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert count(tmp_path, monkeypatch, 8) == threads


def test_the_variable_overrides_the_rule_and_the_option_overrides_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMOPT_NUM_THREADS", "5")
    assert count(tmp_path, monkeypatch, 2) == 5
    assert count(tmp_path, monkeypatch, 2, option=7) == 7
    monkeypatch.setenv("LLMOPT_NUM_THREADS", "")
    assert count(tmp_path, monkeypatch, 2) == 2


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_a_variable_that_is_no_number_of_threads_is_refused_with_its_value(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("LLMOPT_NUM_THREADS", value)
    with pytest.raises(ConfigError, match=f"LLMOPT_NUM_THREADS is '{value}'"):
        num_native_threads()


def test_an_option_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="the number of threads is 0"):
        num_native_threads(0)


def test_threads_far_beyond_the_cpus_are_refused() -> None:
    with pytest.raises(ConfigError, match="CPUs"):
        num_native_threads(100_000)


def test_cpus_that_somebody_counted_are_not_counted_again() -> None:
    assert num_native_threads(num_cpus=6) == 5
    assert num_native_threads(num_cpus=1) == 1


def test_torch_has_one_thread_inside_and_its_number_back_after_an_error() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with one_torch_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
        with pytest.raises(IndexError), one_torch_thread():
            torch.zeros(1)[2]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)

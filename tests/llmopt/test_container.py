"""Memory and CPUs that the container allows, read from made-up cgroup files of both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmopt import container

GIB = 1 << 30
V1_UNLIMITED = 9223372036854771712


class Files:
    """A made-up /sys/fs/cgroup and /proc."""

    def __init__(self, root: Path) -> None:
        self.cgroup = root / "cgroup"
        self.proc = root / "proc"
        self.write(self.proc / "meminfo", f"MemTotal: {64 * GIB // 1024} kB\nMemFree: 1 kB\n"
                   f"MemAvailable: {48 * GIB // 1024} kB\nHugePages_Total:       0\n")  # fmt: skip
        self.group("0::/")

    @staticmethod
    def write(path: Path, text: str | int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def group(self, lines: str) -> None:
        """The groups that this process belongs to, as /proc/self/cgroup lists them."""
        self.write(self.proc / "self" / "cgroup", lines)

    def v2(self, folder: str, **files: str | int) -> None:
        for name, text in files.items():
            self.write(self.cgroup / folder / name.replace("_", ".", 1), text)

    def v1(self, controller: str, folder: str, **files: str | int) -> None:
        for name, text in files.items():
            self.write(self.cgroup / controller / folder / name.replace("_", ".", 1), text)

    def memory(self) -> tuple[int, int]:
        return container.memory(self.cgroup, self.proc)

    def num_cpus(self) -> int:
        return container.num_cpus(self.cgroup, self.proc)[1]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


# -- memory ----------------------------------------------------------------------------------------------------------
def test_without_a_container_the_host_counts(files: Files) -> None:
    assert files.memory() == (48 * GIB, 64 * GIB)


def test_a_limit_below_the_host_bounds_what_may_be_taken(files: Files) -> None:
    files.v2("", memory_max=2 * GIB, memory_current=GIB // 2)
    assert files.memory() == (3 * GIB // 2, 2 * GIB)


def test_the_limit_of_version_1_bounds_it_as_well(files: Files) -> None:
    files.v1("memory", "", memory_limit_in_bytes=2 * GIB, memory_usage_in_bytes=GIB // 2)
    assert files.memory() == (3 * GIB // 2, 2 * GIB)


def test_max_means_no_limit(files: Files) -> None:
    files.v2("", memory_max="max", memory_current=GIB // 2)
    assert files.memory() == (48 * GIB, 64 * GIB)


def test_the_number_that_version_1_writes_for_no_limit_is_none(files: Files) -> None:
    files.v1("memory", "", memory_limit_in_bytes=V1_UNLIMITED, memory_usage_in_bytes=GIB // 2)
    assert files.memory() == (48 * GIB, 64 * GIB)


def test_a_limit_above_what_the_host_has_does_not_help(files: Files) -> None:
    files.v2("", memory_max=1024 * GIB, memory_current=GIB)
    assert files.memory() == (48 * GIB, 64 * GIB)


def test_pages_of_files_do_not_count_as_used_because_they_can_be_reclaimed(files: Files) -> None:
    """A memory-mapped checkpoint of 60 GiB fills the page cache of the group."""
    files.write(files.proc / "meminfo", f"MemTotal: {256 * GIB // 1024} kB\nMemAvailable: {200 * GIB // 1024} kB")
    files.v2("", memory_max=64 * GIB, memory_current=int(61.5 * GIB))
    files.v2("", memory_stat=f"anon {GIB}\nfile {60 * GIB}\ninactive_file {60 * GIB}\nactive_file 0")
    available, total = files.memory()
    assert abs(available / GIB - 62.5) < 0.6
    assert total == 64 * GIB


def test_version_1_counts_file_pages_of_the_whole_group(files: Files) -> None:
    files.v1("memory", "", memory_limit_in_bytes=8 * GIB, memory_usage_in_bytes=7 * GIB)
    files.v1("memory", "", memory_stat=f"inactive_file {GIB}\ntotal_inactive_file {5 * GIB}")
    assert files.memory() == (6 * GIB, 8 * GIB)


def test_the_tightest_of_nested_groups_counts(files: Files) -> None:
    files.group("0::/pod/inner")
    files.v2("", memory_max="max", memory_current=30 * GIB)
    files.v2("pod", memory_max=4 * GIB, memory_current=3 * GIB)
    files.v2("pod/inner", memory_max=6 * GIB, memory_current=GIB)
    assert files.memory() == (GIB, 4 * GIB)


def test_the_group_is_found_when_the_container_sees_only_its_own_subtree(files: Files) -> None:
    files.group("0::/../../somewhere/else")  # what a cgroup namespace may show
    files.v2("", memory_max=2 * GIB, memory_current=GIB)
    assert files.memory() == (GIB, 2 * GIB)


def test_both_versions_side_by_side_are_both_read(files: Files) -> None:
    files.group("12:cpu,cpuacct:/job\n4:memory:/job\n0::/job")
    files.v1("memory", "job", memory_limit_in_bytes=3 * GIB, memory_usage_in_bytes=GIB)
    files.v2("job", memory_max=5 * GIB, memory_current=GIB)
    assert files.memory() == (2 * GIB, 3 * GIB)


def test_more_used_than_allowed_leaves_nothing_and_never_less(files: Files) -> None:
    files.v2("", memory_max=GIB, memory_current=2 * GIB)
    assert files.memory() == (0, GIB)


@pytest.mark.parametrize("text", ["", "garbage", "-"])
def test_a_file_that_cannot_be_read_is_no_limit(files: Files, text: str) -> None:
    files.v2("", memory_max=text, memory_current=GIB)
    assert files.memory() == (48 * GIB, 64 * GIB)


def test_a_kernel_without_memavailable_gives_free_memory(files: Files) -> None:
    files.write(files.proc / "meminfo", f"MemTotal: {64 * GIB // 1024} kB\nMemFree: {5 * GIB // 1024} kB")
    assert files.memory() == (5 * GIB, 64 * GIB)


# -- CPUs ------------------------------------------------------------------------------------------------------------
@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize(
    ("quota", "count"),
    [("max 100000", 8), ("200000 100000", 2), ("250000 100000", 2), ("50000 100000", 1), ("6400000 100000", 8)],
)
def test_the_cpu_quota_bounds_the_threads(files: Files, quota: str, count: int) -> None:
    files.v2("", cpu_max=quota)
    assert files.num_cpus() == count


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize(("quota", "count"), [(-1, 8), (300000, 3), (20000, 1)])
def test_the_cpu_quota_of_version_1_bounds_them_as_well(files: Files, mount: str, quota: int, count: int) -> None:
    files.group("3:cpu,cpuacct:/job")
    files.v1(mount, "job", cpu_cfs_quota_us=quota, cpu_cfs_period_us=100000)
    assert files.num_cpus() == count


@pytest.mark.usefixtures("eight_cpus")
def test_the_cpu_quota_of_an_outer_group_binds(files: Files) -> None:
    files.group("0::/pod/inner")
    files.v2("pod", cpu_max="100000 50000")
    files.v2("pod/inner", cpu_max="max 100000")
    assert files.num_cpus() == 2


def test_the_affinity_mask_is_returned_with_its_ids(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 3, 9}, raising=False)
    assert container.num_cpus(files.cgroup, files.proc) == ((3, 5, 9), 3)


# -- this machine ----------------------------------------------------------------------------------------------------
def test_this_machine_gives_numbers_that_make_sense() -> None:
    available, total = container.memory()
    assert 0 < available <= total
    ids, count = container.num_cpus()
    assert 1 <= count <= len(ids)

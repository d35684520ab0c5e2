"""What the container around this process allows: memory and CPUs, from cgroup v1 and v2 files."""

from __future__ import annotations

import os
from pathlib import Path

_UNLIMITED = 1 << 60  # cgroup v1 writes a number near 2**63 for "no limit"


def host_memory(proc: Path = Path("/proc")) -> tuple[int, int]:
    """Bytes of host memory: ``(available, total)``, as the kernel reports them."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:  # not Linux
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        return pages * size // 2, pages * size
    fields = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines) if rest}
    return fields.get("MemAvailable", fields.get("MemFree", 0)), fields["MemTotal"]


def memory(cgroup: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> tuple[int, int]:
    """Bytes this process may still take, and bytes it may hold at all: ``(available, total)``.

    The cgroup limit counts page cache as used; pages of files can be reclaimed, so they are given back here.
    """
    available, total = host_memory(proc)
    for folder, limit_name, usage_name, cache_name in _memory_files(cgroup, proc):
        limit = _read_int(folder / limit_name)
        usage = _read_int(folder / usage_name)
        if limit is None or usage is None or limit >= _UNLIMITED:
            continue
        cache = _read_stat(folder / "memory.stat", cache_name)
        available = min(available, max(0, limit - usage + cache))
        total = min(total, limit)
    return available, total


def num_cpus(cgroup: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> tuple[tuple[int, ...], int]:
    """CPU ids of the affinity mask, and how many of them the cgroup's quota pays for: ``(ids, count)``, count >= 1."""
    ids = (
        tuple(sorted(os.sched_getaffinity(0)))
        if hasattr(os, "sched_getaffinity")
        else tuple(range(os.cpu_count() or 1))
    )
    count = float(len(ids))
    v1 = [f for name in ("cpu", "cpu,cpuacct") for f in _folders(cgroup / name, proc, "cpu")]
    for folder in _folders(cgroup, proc, "") + v1:
        try:
            quota, period = (folder / "cpu.max").read_text().split()
            if quota != "max":
                count = min(count, int(quota) / int(period))
        except (OSError, ValueError):
            quota_us, period_us = _read_int(folder / "cpu.cfs_quota_us"), _read_int(folder / "cpu.cfs_period_us")
            if quota_us is not None and period_us and quota_us > 0:
                count = min(count, quota_us / period_us)
    return ids, max(1, int(count))


def _memory_files(cgroup: Path, proc: Path) -> list[tuple[Path, str, str, str]]:
    v2 = [(f, "memory.max", "memory.current", "inactive_file") for f in _folders(cgroup, proc, "")]
    v1 = [
        (f, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        for f in _folders(cgroup / "memory", proc, "memory")
    ]
    return v2 + v1


def _folders(root: Path, proc: Path, controller: str) -> list[Path]:
    """The group of this process and the groups around it, whose limits bind as well."""
    folders = [root]
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return folders
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            group = root
            for part in Path(path.lstrip("/")).parts:
                group = group / part
                if group.is_dir() and group not in folders:
                    folders.append(group)
    return folders


def _read_int(path: Path) -> int | None:
    """The number in a file; None when there is no file, or it says "max"."""
    try:
        return int(path.read_text().strip())
    except (OSError, ValueError):
        return None


def _read_stat(path: Path, name: str) -> int:
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0

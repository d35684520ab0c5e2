"""Memory nodes of this machine, and the system calls that bind threads and pages to one. No library is needed."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_NUMBERS = {  # (mbind, set_mempolicy)
    "x86_64": (237, 238),
    "aarch64": (235, 237),
}
_MPOL_DEFAULT, _MPOL_PREFERRED = 0, 1
_MPOL_MF_MOVE = 2  # only pages that no other process maps, so no privilege is needed
_MASK_BITS = 1024


@dataclass(frozen=True, slots=True)
class Node:
    """One memory node."""

    number: int
    cpus: tuple[int, ...]  # ids of its CPUs that are online


def read_nodes(folder: Path = Path("/sys/devices/system/node")) -> list[Node]:
    """The nodes in the order of their numbers; empty where the system does not show them."""
    nodes = []
    for entry in folder.glob("node[0-9]*"):
        try:
            cpus = parse_cpus((entry / "cpulist").read_text())
            nodes.append(Node(int(entry.name.removeprefix("node")), cpus))
        except (OSError, ValueError):
            continue
    return sorted(nodes, key=lambda node: node.number)


def parse_cpus(text: str) -> tuple[int, ...]:
    """ "0-2,5" as (0, 1, 2, 5)."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(cpus)


def choose_cpus(nodes: Sequence[Node], allowed: Sequence[int], rank: int, num_ranks: int) -> tuple[int, list[int]]:
    """Node and CPUs of one rank among `num_ranks`: ``(node, cpus)``.

    Never a CPU outside of `allowed` and never none. A rank stays on one node; ranks share a CPU only when there are
    more ranks than CPUs.

    :param allowed: CPUs this process may use; one of them at least belongs to a node.
    """
    usable = {node.number: sorted(set(node.cpus) & set(allowed)) for node in nodes}
    usable = {number: cpus for number, cpus in usable.items() if cpus}
    if not usable:
        raise ValueError(f"none of the CPUs {sorted(allowed)} belongs to a node")
    ranks: dict[int, list[int]] = {number: [] for number in usable}
    for each in range(num_ranks):
        # An empty node first, then the one that has most CPUs per rank afterwards.
        best = max(usable, key=lambda n: (not ranks[n], len(usable[n]) / (len(ranks[n]) + 1), -n))
        ranks[best].append(each)
    number = next(n for n, members in ranks.items() if rank in members)
    cpus, members = usable[number], ranks[number]
    place, count = members.index(rank), len(members)
    if count >= len(cpus):
        return number, [cpus[place % len(cpus)]]
    return number, cpus[place * len(cpus) // count : (place + 1) * len(cpus) // count]


def bind_threads(cpus: Sequence[int]) -> dict[int, set[int]]:
    """Bind every thread of this process to `cpus`; what each was allowed before.

    :raises OSError: the calling thread may not be bound.
    """
    before = {0: set(os.sched_getaffinity(0))}
    os.sched_setaffinity(0, cpus)
    for thread in _other_threads():
        try:
            before[thread] = set(os.sched_getaffinity(thread))
            os.sched_setaffinity(thread, cpus)
        except OSError:  # it has ended
            before.pop(thread, None)
    return before


def unbind_threads(before: dict[int, set[int]]) -> None:
    """Undo `bind_threads`; threads that started meanwhile become as free as the one that bound them was."""
    if not before:
        return
    for thread in [0, *_other_threads()]:
        try:
            os.sched_setaffinity(thread, before.get(thread, before[0]))
        except OSError:  # it has ended, or the allowed CPUs have changed
            continue


def _other_threads() -> list[int]:
    try:
        threads = [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        return []
    return [thread for thread in threads if thread != threading.get_native_id()]


def prefer_node(node: int | None) -> None:
    """New pages of the calling thread come from `node` while it has some; None: as the system likes.

    :raises OSError: not allowed (containers filter this call), or not known on this system.
    """
    mode = _MPOL_DEFAULT if node is None else _MPOL_PREFERRED
    _call(1, mode, None if node is None else _mask(node), 0 if node is None else _MASK_BITS)


def move_pages(address: int, num_bytes: int, node: int) -> int:
    """Move the whole pages inside ``[address, address + num_bytes)`` to `node`; the number of bytes in them.

    :raises OSError: as for `prefer_node`.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    begin, end = -(-address // page) * page, (address + num_bytes) // page * page
    if end <= begin:
        return 0
    _call(0, begin, end - begin, _MPOL_PREFERRED, _mask(node), _MASK_BITS, _MPOL_MF_MOVE)
    return end - begin


def _mask(node: int) -> ctypes.Array[ctypes.c_ulong]:
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (_MASK_BITS // bits))()
    mask[node // bits] = 1 << node % bits
    return mask


def _call(which: int, *arguments: object) -> None:
    numbers = _NUMBERS.get(platform.machine())
    if numbers is None or platform.system() != "Linux":
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    words = [ctypes.c_ulong(each) if isinstance(each, int) else each for each in arguments]
    if syscall(ctypes.c_long(numbers[which]), *words) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))

"""Which CPUs decode, and which do the prefill."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from llmopt_plugins.hardware.numa_nodes import bind_threads, unbind_threads

if TYPE_CHECKING:
    from llmopt.stages import Machine, Probe

logger = logging.getLogger("llmopt")


@dataclass(frozen=True, slots=True)
class Share:
    """What one process computes on."""

    cpus: tuple[int, ...]  # to bind to; empty: not bound
    num_threads: int


class SplitProbe:
    """Look at the machine, keep a part of its CPUs for the prefill, and report the rest.

    :param num_cpus: CPUs of all workers together; None: half of what there is, rounded down.
    """

    def __init__(self, inner: Probe, num_workers: int, num_cpus: int | None) -> None:
        self.inner = inner
        self.num_workers = num_workers
        self.num_cpus = num_cpus
        self.workers: list[Share] = []
        self.own = Share((), 1)
        self._before: dict[int, set[int]] = {}
        self._torch_threads: int | None = None

    def __call__(self) -> Machine:
        machine = self.inner()
        self.own, self.workers = split(machine.cpus, machine.num_threads, self.num_workers, self.num_cpus)
        if self.own.cpus and hasattr(os, "sched_setaffinity"):
            try:
                self._before = bind_threads(self.own.cpus)
            except OSError as error:
                logger.warning("pd_separation: threads may not be bound (%s); the processes share all CPUs.", error)
        if self.own.num_threads < torch.get_num_threads():
            self._torch_threads = torch.get_num_threads()
            torch.set_num_threads(self.own.num_threads)
        return replace(machine, cpus=self.own.cpus or machine.cpus, num_threads=self.own.num_threads)

    def close(self) -> None:
        """Let the threads of this process run where they might before."""
        before, self._before = self._before, {}
        unbind_threads(before)
        if self._torch_threads is not None:
            torch.set_num_threads(self._torch_threads)
            self._torch_threads = None


def split(
    cpus: tuple[int, ...], num_threads: int, num_workers: int, num_cpus: int | None = None
) -> tuple[Share, list[Share]]:
    """The share of the decode process, which keeps the first CPUs, and those of the workers.

    With one CPU all share it. A cgroup's quota (``num_threads`` below the number of CPUs) is split in proportion.
    """
    if len(cpus) < 2:
        return Share((), max(1, num_threads)), [Share((), 1)] * num_workers
    wanted = len(cpus) // 2 if num_cpus is None else num_cpus
    taken = min(max(1, wanted), len(cpus) - 1)
    own, others = cpus[:-taken], cpus[-taken:]
    per_cpu = min(1.0, num_threads / len(cpus))
    shares = []
    for number in range(num_workers):
        mine = others[number * taken // num_workers : (number + 1) * taken // num_workers] or others
        shares.append(Share(mine, max(1, int(len(mine) * per_cpu))))
    return Share(own, max(1, int(len(own) * per_cpu))), shares

"""Threads and weights on one memory node.

Stage: probe, place (wrap).   Promise: exact, only the place of threads and pages changes.
Helps: machines with several memory nodes, where reading another node's memory takes about twice as long.   Hurts: a
model that one node's CPUs or memory cannot serve alone.
Source: Linux, "NUMA Memory Policy" (kernel documentation); the system calls sched_setaffinity, set_mempolicy and mbind.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, Literal

from llmopt import PluginInfo, hookimpl
from llmopt.threads import num_local_ranks
from llmopt_plugins.hardware.numa_nodes import (
    Node,
    bind_threads,
    choose_cpus,
    move_pages,
    prefer_node,
    read_nodes,
    unbind_threads,
)
from llmopt_plugins.option_checks import check_int

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmopt.build_context import BuildContext
    from llmopt.config import PipelineConfig
    from llmopt.stages import Machine, Place, Probe


logger = logging.getLogger(__name__)


class Binding:
    """One node for this process, and what of it could be had."""

    def __init__(self, node: int | Literal["auto"]) -> None:
        self.wanted = node
        self.node: int | None = None
        self.cpus: tuple[int, ...] = ()
        self.num_bytes = 0  # of weights that lie on the node
        self.why_not: list[str] = []
        self._before: dict[int, set[int]] = {}  # thread -> CPUs it was allowed
        self._memory_bound = False

    def bind_cpus(self) -> None:
        """Bind all threads of the process; those that start later inherit it."""
        nodes = [node for node in read_nodes() if node.cpus]
        if not hasattr(os, "sched_getaffinity"):
            self.why_not.append("this system does not bind threads")
            return
        allowed = sorted(os.sched_getaffinity(0))
        if not nodes:
            self.why_not.append("NUMA unknown: this system does not show its memory nodes")
            return
        if self.wanted != "auto":
            nodes = [node for node in nodes if node.number == self.wanted]
            if not set(allowed) & {cpu for node in nodes for cpu in node.cpus}:
                self.why_not.append(f"no CPU of node {self.wanted} may be used here (allowed: {_ranges(allowed)})")
                return
        elif len(nodes) == 1:
            self.why_not.append("there is one memory node, so there is nothing to bind")
            return
        number, cpus = self._choose(nodes, allowed)
        try:
            self._before = bind_threads(cpus)
        except OSError as error:
            self.why_not.append(f"threads may not be bound: {error.strerror}")
            return
        self.node, self.cpus = number, tuple(cpus)

    def _choose(self, nodes: list[Node], allowed: list[int]) -> tuple[int, list[int]]:
        num_ranks = num_local_ranks()
        rank = int(os.environ.get("LOCAL_RANK", "0")) if num_ranks > 1 else 0
        return choose_cpus(nodes, allowed, rank % num_ranks, num_ranks)

    def bind_memory(self, model: PreTrainedModel) -> None:
        """Move the weights to the node; what is allocated later comes from it while it has memory."""
        if self.node is None or model.device.type != "cpu":
            return
        try:
            prefer_node(self.node)
            self._memory_bound = True
            for tensor in [*model.parameters(), *model.buffers()]:
                if tensor.device.type == "cpu":
                    storage = tensor.untyped_storage()
                    self.num_bytes += move_pages(storage.data_ptr(), storage.nbytes(), self.node)
        except OSError as error:
            self.why_not.append(f"memory may not be bound: {error.strerror}")

    def warn(self) -> None:
        """Say once what is missing."""
        if self.why_not:
            logger.warning("numa_binding: %s. Running on without it.", "; ".join(self.why_not))

    def undo(self) -> None:
        """Let the threads run where they might before; pages stay where they are."""
        before, self._before = self._before, {}
        unbind_threads(before)
        if self._memory_bound:
            self._memory_bound = False
            try:
                prefer_node(None)
            except OSError as error:
                logger.warning("numa_binding: memory stays bound: %s.", error.strerror)

    def stats(self) -> dict[str, Any]:
        return {"node": self.node, "cpus": list(self.cpus), "num_bytes": self.num_bytes, "why_not": list(self.why_not)}

    def describe(self) -> str:
        if self.node is None:
            return "not bound: " + "; ".join(self.why_not)
        told = f"node {self.node}, CPUs {_ranges(list(self.cpus))}, {self.num_bytes / 1e6:.0f} MB of weights bound"
        return "; ".join([told, *self.why_not])


class NumaProbe:
    """Bind threads, then look at the machine: it is as large as what the process is bound to."""

    def __init__(self, inner: Probe, binding: Binding) -> None:
        self.inner = inner
        self.binding = binding

    def __call__(self) -> Machine:
        self.binding.bind_cpus()
        return self.inner()

    def close(self) -> None:
        self.binding.undo()


class NumaPlace:
    """Place the model, then move its pages."""

    def __init__(self, inner: Place, binding: Binding) -> None:
        self.inner = inner
        self.binding = binding

    def __call__(self, model: PreTrainedModel, machine: Machine) -> PreTrainedModel:
        placed = self.inner(model, machine)
        self.binding.bind_memory(placed)
        self.binding.warn()
        return placed

    def stats(self) -> dict[str, Any]:
        """Node, CPUs, bytes of weights on the node, and what could not be had."""
        return self.binding.stats()

    def describe(self) -> str:
        """The same as text."""
        return self.binding.describe()


class NumaBinding:
    """Bind this process to one memory node."""

    info = PluginInfo(
        name="numa_binding",
        layer="hardware",
        promise="exact",
        summary="threads and weight pages on one memory node",
    )

    def __init__(self, node: int | Literal["auto"] = "auto") -> None:
        """:param node: number of the node; "auto": the one with most CPUs of this process, another one per rank."""
        if node != "auto":
            check_int("node", node, 0, other=', or "auto"')
        self.node = node
        self._binding: Binding | None = None

    @hookimpl
    def llmopt_wrap_probe(self, probe: Probe, config: PipelineConfig, context: BuildContext) -> Probe:
        self._binding = Binding(self.node)
        return NumaProbe(probe, self._binding)

    @hookimpl
    def llmopt_wrap_place(self, place: Place, config: PipelineConfig, context: BuildContext) -> Place:
        assert self._binding is not None  # the machine is looked at first
        return NumaPlace(place, self._binding)


def _ranges(cpus: list[int]) -> str:
    """[0, 1, 2, 5] as "0-2,5"."""
    parts: list[str] = []
    start = 0
    for i in range(1, len(cpus) + 1):
        if i == len(cpus) or cpus[i] != cpus[i - 1] + 1:
            parts.append(str(cpus[start]) if i - start == 1 else f"{cpus[start]}-{cpus[i - 1]}")
            start = i
    return ",".join(parts)

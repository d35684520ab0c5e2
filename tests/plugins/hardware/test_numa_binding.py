"""numa_binding: one node for each process, inside of what it may use; where that cannot be, a warning and on."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import llmopt
from llmopt.errors import PluginOptionError
from llmopt.registry import make_plugin
from llmopt.testing import assert_same_tokens, tiny_model, tiny_prompts
from llmopt_plugins.hardware import numa_binding, numa_nodes
from llmopt_plugins.hardware.numa_binding import NumaBinding
from llmopt_plugins.hardware.numa_nodes import Node, choose_cpus, parse_cpus, read_nodes

MODEL = tiny_model()
TWO_NODES = [Node(0, (0, 1, 2, 3)), Node(1, (4, 5, 6, 7))]


# -- topology --------------------------------------------------------------------------------------------------------
def test_nodes_are_read_with_their_cpus_that_are_online(tmp_path: Path) -> None:
    for name, cpus in (("node1", "4-7"), ("node0", "0,2-3"), ("node10", ""), ("possible", "0-10")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cpulist").write_text(cpus + "\n")
    (tmp_path / "node2").mkdir()  # without a list
    assert read_nodes(tmp_path) == [Node(0, (0, 2, 3)), Node(1, (4, 5, 6, 7)), Node(10, ())]


def test_a_system_that_does_not_show_nodes_has_none(tmp_path: Path) -> None:
    assert read_nodes(tmp_path / "missing") == []


def test_lists_of_cpus_are_read() -> None:
    assert parse_cpus("0-2,5\n") == (0, 1, 2, 5)
    assert parse_cpus("\n") == ()


# -- choice ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("allowed", [[1, 2, 5], [0, 1, 2, 3, 4, 5, 6, 7], [1, 5, 6], [6], [0, 4, 99]])
def test_ranks_get_cpus_of_one_node_inside_of_what_is_allowed_and_apart_while_there_are_enough(
    allowed: list[int], num_ranks: int
) -> None:
    chosen = [choose_cpus(TWO_NODES, allowed, rank, num_ranks) for rank in range(num_ranks)]
    in_nodes = {cpu for node in TWO_NODES for cpu in node.cpus}
    for number, cpus in chosen:
        assert cpus
        assert set(cpus) <= set(allowed) & set(TWO_NODES[number].cpus)
    if num_ranks <= len(set(allowed) & in_nodes):
        assert len({cpu for _, cpus in chosen for cpu in cpus}) == sum(len(cpus) for _, cpus in chosen)


def test_two_ranks_get_a_node_each_and_one_gets_the_larger() -> None:
    assert choose_cpus(TWO_NODES, [1, 2, 5], 0, 1) == (0, [1, 2])
    assert [choose_cpus(TWO_NODES, [1, 2, 5], rank, 2) for rank in (0, 1)] == [(0, [1, 2]), (1, [5])]
    assert choose_cpus(TWO_NODES, [3, 4, 5], 0, 1) == (1, [4, 5])


def test_cpus_outside_of_all_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"none of the CPUs \[99\]"):
        choose_cpus(TWO_NODES, [99], 0, 1)


# -- binding ---------------------------------------------------------------------------------------------------------
class System:
    """A machine of two nodes that notes what is asked of it."""

    def __init__(self, patch: pytest.MonkeyPatch, nodes: list[Node]) -> None:
        self.bound: list[list[int]] = []
        self.preferred: list[int | None] = []
        self.moved: list[tuple[int, int, int]] = []
        self.undone: list[dict[int, set[int]]] = []
        patch.setattr(numa_binding, "read_nodes", lambda: nodes)
        patch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
        patch.setattr(numa_binding, "bind_threads", self.bind)
        patch.setattr(numa_binding, "unbind_threads", self.undone.append)
        patch.setattr(numa_binding, "prefer_node", self.preferred.append)
        patch.setattr(numa_binding, "move_pages", self.move)

    def bind(self, cpus: list[int]) -> dict[int, set[int]]:
        self.bound.append(list(cpus))
        return {0: set(range(8))}

    def move(self, address: int, num_bytes: int, node: int) -> int:
        self.moved.append((address, num_bytes, node))
        return num_bytes


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "numa_binding" in r.getMessage()]


def test_threads_and_weights_go_to_one_node_and_closing_frees_the_threads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    system = System(monkeypatch, TWO_NODES)
    with llmopt.build(MODEL, ["numa_binding"]) as pipe:
        assert system.bound == [[0, 1, 2, 3]]
        assert system.preferred == [0]
        storages = {p.untyped_storage().data_ptr() for p in MODEL.parameters()}
        assert storages <= {address for address, _, _ in system.moved}
        assert {node for _, _, node in system.moved} == {0}
        figures = pipe.stats()["place.numa_binding"]
        assert figures["node"] == 0
        assert figures["num_bytes"] >= sum(p.untyped_storage().nbytes() for p in MODEL.parameters())
        assert "node 0, CPUs 0-3" in str(pipe.describe())
        assert system.undone == []
    assert system.undone == [{0: set(range(8))}]
    assert system.preferred == [0, None]
    assert warnings_of(caplog) == []


def test_a_node_is_bound_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    system = System(monkeypatch, TWO_NODES)
    with llmopt.build(MODEL, [NumaBinding(node=1)]):
        assert system.bound == [[4, 5, 6, 7]]
        assert system.preferred == [1]


def test_ranks_go_to_different_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    system = System(monkeypatch, TWO_NODES)
    with llmopt.build(MODEL, ["numa_binding"]):
        assert system.bound == [[4, 5, 6, 7]]


def test_memory_that_may_not_be_bound_is_one_warning_and_threads_stay_bound(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    system = System(monkeypatch, TWO_NODES)

    def refuse(node: int | None) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(numa_binding, "prefer_node", refuse)
    with llmopt.build(MODEL, ["numa_binding"]) as pipe:
        assert system.bound == [[0, 1, 2, 3]]
        assert_same_tokens(pipe, MODEL, tiny_prompts(2))
        assert "memory may not be bound: Operation not permitted" in str(pipe.describe())
    assert len(warnings_of(caplog)) == 1


def test_threads_that_may_not_be_bound_are_one_warning_and_nothing_is_bound(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    system = System(monkeypatch, TWO_NODES)

    def refuse(cpus: list[int]) -> dict[int, set[int]]:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(numa_binding, "bind_threads", refuse)
    with llmopt.build(MODEL, ["numa_binding"]) as pipe:
        assert_same_tokens(pipe, MODEL, tiny_prompts(2))
        assert pipe.stats()["place.numa_binding"]["node"] is None
    assert (system.preferred, system.moved) == ([], [])
    assert len(warnings_of(caplog)) == 1


@pytest.mark.parametrize(
    ("nodes", "node", "reason"),
    [
        ([], "auto", "NUMA unknown"),
        ([Node(0, tuple(range(8)))], "auto", "there is one memory node"),
        (TWO_NODES, 7, "no CPU of node 7 may be used here (allowed: 0-7)"),
        ([*TWO_NODES, Node(2, (8, 9))], 2, "no CPU of node 2 may be used here"),
    ],
)
def test_where_there_is_nothing_to_bind_one_warning_says_so_and_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, nodes: list[Node], node: Any, reason: str
) -> None:
    system = System(monkeypatch, nodes)
    with llmopt.build(MODEL, [NumaBinding(node=node)]) as pipe:
        assert_same_tokens(pipe, MODEL, tiny_prompts(2))
        assert reason in str(pipe.describe())
    assert system.bound == []
    assert len(warnings_of(caplog)) == 1
    assert reason in warnings_of(caplog)[0]


def test_all_threads_of_this_process_are_bound_and_freed_again() -> None:
    before = os.sched_getaffinity(0)
    one = [min(before)]
    stop, masks = threading.Event(), []

    def other() -> None:
        stop.wait(10)
        masks.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=other)
    thread.start()
    saved = numa_nodes.bind_threads(one)
    try:
        assert os.sched_getaffinity(0) == set(one)
        stop.set()
        thread.join()
        assert masks == [set(one)]
    finally:
        numa_nodes.unbind_threads(saved)
    assert os.sched_getaffinity(0) == before


def test_pages_are_moved_by_the_system_call_or_refused_with_its_error() -> None:
    """On the one node that every Linux machine has; contents stay."""
    tensor = torch.arange(1 << 20)
    storage = tensor.untyped_storage()
    try:
        num_bytes = numa_nodes.move_pages(storage.data_ptr(), storage.nbytes(), 0)
    except OSError as error:
        assert error.errno  # noqa: PT017  a container filters it, or another processor
    else:
        assert storage.nbytes() - 2 * 65536 <= num_bytes <= storage.nbytes()
        with pytest.raises(OSError, match=r".+"):
            numa_nodes.move_pages(storage.data_ptr(), storage.nbytes(), 1000)  # no such node
    assert torch.equal(tensor, torch.arange(1 << 20))


def test_less_than_a_page_is_left_where_it_is() -> None:
    assert numa_nodes.move_pages(1 << 20, 100, 0) == 0


@pytest.mark.parametrize("node", [-1, "some", 1.5, True])
def test_a_node_that_cannot_be_one_is_refused(node: Any) -> None:
    with pytest.raises(PluginOptionError, match="node"):
        make_plugin("numa_binding", {"node": node})

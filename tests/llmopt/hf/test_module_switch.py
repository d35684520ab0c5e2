"""Modules get other forwards on the thread of a step, for its duration, and nowhere else."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llmopt.hf import module_switch
from llmopt.hf.module_switch import ModuleSwitch, why_not

X = torch.ones(1, 2)


def make(number: float) -> Any:
    return lambda x: torch.full_like(x, number)


def test_inside_of_the_block_the_other_forward_runs_and_outside_the_modules_own() -> None:
    module = nn.Identity()
    switch = ModuleSwitch({module: make(5)})
    assert torch.equal(module(X), X)
    with switch:
        assert module(X).mean() == 5
    assert torch.equal(module(X), X)
    assert "forward" not in vars(module)


def test_an_exception_in_the_block_restores_the_module() -> None:
    module = nn.Identity()
    with pytest.raises(KeyError), ModuleSwitch({module: make(5)}):
        raise KeyError
    assert "forward" not in vars(module)


def test_another_thread_gets_the_modules_own_forward_meanwhile() -> None:
    module, found = nn.Identity(), []
    with ModuleSwitch({module: make(5)}):
        thread = threading.Thread(target=lambda: found.append(module(X)))
        thread.start()
        thread.join()
    assert torch.equal(found[0], X)


def test_two_threads_switch_one_module_each_in_its_way() -> None:
    module = nn.Identity()
    barrier, found = threading.Barrier(2), {}

    def run(number: int) -> None:
        switch = ModuleSwitch({module: make(number)})
        for _ in range(20):
            barrier.wait(timeout=10)
            with switch:
                found.setdefault(number, set()).add(module(X).mean().item())
        switch.close()

    threads = [threading.Thread(target=run, args=(number,)) for number in (3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {3: {3.0}, 4: {4.0}}
    assert "forward" not in vars(module)


def test_of_nested_blocks_the_inner_one_has_its_way_and_the_outer_one_returns() -> None:
    first, second = nn.Identity(), nn.Identity()
    outer, inner = ModuleSwitch({first: make(1), second: make(2)}), ModuleSwitch({second: make(3)})
    for _ in range(2):
        with outer:
            with inner:
                assert (first(X).mean(), second(X).mean()) == (1, 3)
            assert (first(X).mean(), second(X).mean()) == (1, 2)
    assert torch.equal(second(X), X)


def test_hooks_of_a_module_run_around_the_other_forward() -> None:
    module, seen = nn.Identity(), []
    module.register_forward_pre_hook(lambda module, args: seen.append("before"))
    module.register_forward_hook(lambda module, args, output: output + 1)
    with ModuleSwitch({module: make(5)}):
        assert module(X).mean() == 6
    assert seen == ["before"]


def test_a_module_with_a_forward_of_its_own_is_left_alone() -> None:
    module = nn.Identity()
    module.forward = make(7)  # type: ignore[method-assign]  # what accelerate does
    assert "accelerate" in str(why_not(module))
    with pytest.raises(ValueError, match="forward of Identity cannot be replaced"):
        ModuleSwitch({module: make(5)})


def test_a_forward_that_is_set_while_a_step_runs_stays() -> None:
    module = nn.Identity()
    switch = ModuleSwitch({module: make(5)})
    with switch:
        module.forward = make(7)  # type: ignore[method-assign]
    assert module(X).mean() == 7
    with switch:
        assert module(X).mean() == 7
    assert module(X).mean() == 7


def test_a_closed_switch_lets_go_of_its_modules() -> None:
    module = nn.Identity()
    one, two = ModuleSwitch({module: make(1)}), ModuleSwitch({module: make(2)})
    one.close()
    assert id(module) in module_switch._records
    with two:
        assert module(X).mean() == 2
    two.close()
    two.close()
    assert id(module) not in module_switch._records


def test_a_tracer_sees_the_operations_of_the_module() -> None:
    module = nn.Linear(2, 2)
    with ModuleSwitch({module: make(5)}):
        traced = torch.compile(lambda x: module(x), backend="eager", fullgraph=True)
        found: Tensor = traced(X)
    torch.testing.assert_close(found, module(X))

"""Weights that differ from those that prefill workers loaded are noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from llmopt.testing import tiny_model
from llmopt_plugins.scheduling.pd_separation.weight_mark import WeightMark


@torch.no_grad()
def write(model: Any) -> None:
    model.model.layers[0].mlp.up_proj.weight.mul_(2.0)


def exchange(model: Any) -> None:
    linear = model.model.layers[1].mlp.up_proj
    linear.weight = torch.nn.Parameter(linear.weight.detach().clone())


def wrap(model: Any) -> None:
    layer = model.model.layers[1]
    layer.mlp = torch.nn.Sequential(layer.mlp)


def add_module(model: Any) -> None:
    model.model.layers[0].mlp.extra = torch.nn.Linear(2, 2)


def add_parameter(model: Any) -> None:
    model.model.layers[0].mlp.scale = torch.nn.Parameter(torch.ones(2))


@pytest.mark.parametrize("change", [write, exchange, wrap, add_module, add_parameter])
def test_a_change_is_noticed_and_not_forgotten(change: Callable[[Any], None]) -> None:
    model = tiny_model()
    mark = WeightMark(model)
    assert mark.is_same()
    model(torch.tensor([[5, 6]]))
    assert mark.is_same()
    change(model)
    assert not mark.is_same()
    assert not mark.is_same()


def test_weights_made_in_inference_mode_are_compared_as_objects() -> None:
    with torch.inference_mode():
        model = tiny_model()
    mark = WeightMark(model)
    assert mark.is_same()
    exchange(model)
    assert not mark.is_same()

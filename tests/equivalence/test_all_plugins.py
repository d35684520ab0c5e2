"""Every built-in plugin that promises exact tokens, all in one pipeline; new ones take part once registered."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import llmopt
from llmopt.errors import PluginConflictError, PluginUnavailableError
from llmopt.pipeline import InferencePipeline
from llmopt.plugin_info import info_of
from llmopt.testing import assert_same_tokens, tiny_model, tiny_prompts
from llmopt_plugins import BUILTIN
from tests.llmopt.helpers import assert_idle, pool_bytes

OPTIONS: dict[str, Any] = {"block_size": 4, "max_model_len": 96, "pool_bytes": pool_bytes(80, 4), "self_test": False}


def available(model: Any) -> list[type]:
    """Exact plugins that can be built alone; those that compile for minutes keep company in their own tests."""
    found = []
    for plugin in BUILTIN:
        info = info_of(plugin)
        if info.promise != "exact" or not info.in_company:
            continue
        try:
            llmopt.build(model, [*info.requires, plugin()], **OPTIONS).close()
        except PluginUnavailableError:
            continue
        found.append(plugin)
    return found


def build_all(model: Any, plugins: list[type]) -> tuple[InferencePipeline, list[type]]:
    """A pipeline with all of them, and those that had to go because they cannot stand beside others of the list."""
    kept = list(plugins)
    for plugin in plugins:
        names = {info_of(other).name for other in kept if other is not plugin}
        if names & set(info_of(plugin).conflicts):
            kept.remove(plugin)
    return llmopt.build(model, [plugin() for plugin in kept], **OPTIONS), [p for p in plugins if p not in kept]


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMOPT_NUM_THREADS", "1")


@pytest.mark.parametrize("order", [1, -1], ids=["listed", "reversed"])
def test_all_plugins_together_have_the_tokens_of_the_model(order: int) -> None:
    model = tiny_model()
    plugins = available(model)
    assert len(plugins) >= 8
    try:
        pipe, left_out = build_all(model, plugins[::order])
    except PluginConflictError as error:
        pytest.fail(f"plugins that do not say that they conflict cannot be built together: {error}")
    with pipe:
        assert pipe.why_not is None
        assert all(info_of(plugin).conflicts for plugin in left_out)
        prompts = tiny_prompts(6, min_length=1, max_length=40)
        for _ in range(2):  # what was kept from the first round is used in the second
            assert_same_tokens(pipe, model, prompts, max_new_tokens=16)
        assert_idle(pipe)
    with torch.no_grad():  # the model was not touched
        assert torch.isfinite(model(torch.tensor([[5, 6, 7]])).logits).all()

from __future__ import annotations

from typing import Any

import pytest
import torch

import llmopt
from llmopt import PluginInfo, hookimpl
from llmopt.errors import PluginUnavailableError
from llmopt.testing import tiny_model


class _WrapExecute:
    """A plugin that does something to the logits."""

    def __init__(self, change: Any, promise: str = "exact") -> None:
        self.change = change
        self.info = PluginInfo(name="changes_logits", layer="kernel", promise=promise)  # type: ignore[arg-type]

    @hookimpl
    def llmopt_wrap_execute(self, execute: Any) -> Any:
        return lambda batch, drafts: self.change(execute(batch, drafts))


def _raise(logits: torch.Tensor) -> torch.Tensor:
    raise ValueError("no kernel for this shape")


def test_a_plugin_that_fails_on_the_model_is_refused_by_name() -> None:
    with pytest.raises(PluginUnavailableError, match="changes_logits.*no kernel for this shape"):
        llmopt.build(tiny_model(), [_WrapExecute(_raise)])


def test_a_plugin_that_promises_exact_output_and_changes_logits_is_refused() -> None:
    with pytest.raises(PluginUnavailableError, match="changes_logits.*promises exact"):
        llmopt.build(tiny_model(), [_WrapExecute(lambda logits: logits * 1.05)])


def test_a_lossy_plugin_may_change_logits_and_keeps_the_engine() -> None:
    with llmopt.build(tiny_model(), [_WrapExecute(lambda logits: logits * 1.05, "lossy")]) as pipe:
        assert pipe.why_not is None
        assert pipe.block_pool.num_used == 0
        assert len(pipe.queue) == 0


def test_a_scheduler_that_waits_for_company_does_not_fail_the_self_test() -> None:
    class Waits:
        info = PluginInfo(name="waits", layer="scheduling", promise="exact")

        @hookimpl
        def llmopt_wrap_schedule(self, schedule: Any) -> Any:
            self.calls = 0

            def later(queue: Any) -> Any:
                self.calls += 1
                return schedule(queue) if self.calls % 3 == 0 else None

            return later

    model = tiny_model()
    with llmopt.build(model, [Waits()]) as pipe:
        assert pipe.why_not is None
        ids = torch.tensor([[5, 6, 7]])
        assert torch.equal(pipe.generate(ids, max_new_tokens=4), model.generate(ids, max_new_tokens=4))


def test_a_wrong_engine_is_not_used_and_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from llmopt.hf.executor import HfExecute

    honest = HfExecute.__call__
    monkeypatch.setattr(HfExecute, "__call__", lambda self, batch, drafts: honest(self, batch, drafts) + 1.0)
    with llmopt.build(tiny_model()) as pipe:
        assert pipe.why_not is not None
        assert "differ" in pipe.why_not
        assert "differ" in str(pipe.describe())


def test_plugins_named_for_a_model_that_the_engine_cannot_run_are_refused() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    model = T5ForConditionalGeneration(config).eval()
    with pytest.raises(PluginUnavailableError, match="'paged_kv' would do nothing.*encoder-decoder"):
        llmopt.build(model, ["paged_kv"])
    with llmopt.build(model, "auto") as pipe:
        assert "encoder-decoder" in pipe.describe().left_out["paged_kv"]

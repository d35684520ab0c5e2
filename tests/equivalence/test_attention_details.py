"""Details of attention in which models differ: windows, rotary embeddings that depend on length, unknown arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.mistral.modeling_mistral import MistralAttention

from llmopt import build
from llmopt.pipeline import InferencePipeline
from tests.equivalence.packed_configs import tiny_packed_model
from tests.equivalence.test_packed_models import IDS, MASK, assert_engine_ran, generate

ORIGINAL_LEN = 24  # tokens up to which a scaled rotary embedding was trained


@pytest.mark.parametrize("window", [2, 4, 5, 15, 16, 29, 200])
def test_a_window_of_any_size_sees_what_transformers_sees(window: int) -> None:
    model = tiny_packed_model("mistral", sliding_window=window)
    with build(model, max_tokens_per_step=5, block_size=4) as pipe:
        assert torch.equal(generate(pipe), generate(model))
        assert_engine_ran(pipe)


@pytest.mark.parametrize("head_dim", [4, 8, 12, 24])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3", "deepseek_v3"])
def test_heads_of_any_size_are_stored_whole(model_type: str, head_dim: int) -> None:
    if model_type == "deepseek_v3":
        changes = {"qk_rope_head_dim": head_dim, "head_dim": head_dim, "v_head_dim": 20}
    else:
        changes = {"head_dim": head_dim}
    model = tiny_packed_model(model_type, **changes)
    with build(model, max_tokens_per_step=5, block_size=4) as pipe:
        assert torch.equal(generate(pipe), generate(model))
        assert_engine_ran(pipe)


def scaled(kind: str) -> Any:
    """A model whose rotary embedding changes for all rows when one passes ORIGINAL_LEN."""
    if kind == "dynamic":
        rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
        return tiny_packed_model("llama", max_position_embeddings=ORIGINAL_LEN, rope_parameters=rope)
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        **factors,
        "original_max_position_embeddings": ORIGINAL_LEN,
        "factor": 4.0,
    }
    return tiny_packed_model(
        "phi3", original_max_position_embeddings=ORIGINAL_LEN, rope_parameters=rope, sliding_window=None, head_dim=8
    )


def run(model: Any, num_new: int) -> Tensor:
    out: Tensor = model.generate(IDS, attention_mask=MASK, max_new_tokens=num_new, do_sample=False)
    return out


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_rotary_embedding_that_depends_on_length_is_left_to_transformers_past_its_original_length(kind: str) -> None:
    model = scaled(kind)
    within = ORIGINAL_LEN - IDS.shape[1]
    with build(model, max_tokens_per_step=5, block_size=4) as pipe:
        assert torch.equal(run(pipe, within), run(model, within))
        assert_engine_ran(pipe)
        assert torch.equal(run(pipe, within + 6), run(model, within + 6))
        assert sum(pipe.generate.fall_backs.values()) == 1
        assert any(str(ORIGINAL_LEN) in reason for reason in pipe.generate.fall_backs)
        # the long call must not leave its rotary embedding behind
        assert torch.equal(run(pipe, within), run(model, within))
        assert sum(pipe.generate.fall_backs.values()) == 1


def with_forward(patch: pytest.MonkeyPatch, cls: type, **extra: Any) -> None:
    """Let an attention class hand more arguments to the attention function."""
    forward = cls.forward  # type: ignore[attr-defined]

    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **{**kwargs, **extra})

    patch.setattr(cls, "forward", patched)


def assert_refused(pipe: InferencePipeline, model: Any, reason: str) -> None:
    assert pipe.why_not is not None
    assert reason in pipe.why_not
    assert torch.equal(generate(pipe), generate(model))


def test_an_attention_argument_that_the_engine_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_packed_model("llama")
    with_forward(monkeypatch, LlamaAttention, new_bias=torch.ones(1))
    assert_refused(build(model), model, "'new_bias'")


def test_attention_that_looks_ahead_is_refused() -> None:
    model: Any = tiny_packed_model("llama", is_causal=False)
    assert_refused(build(model), model, "its mask is another than its attention function is told")


def test_a_window_that_attention_is_not_told_of_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_packed_model("mistral", sliding_window=40)  # longer than any prompt of the self-test
    for layer in model.model.layers:
        assert isinstance(layer.self_attn, MistralAttention)
    interface = "transformers.models.mistral.modeling_mistral.ALL_ATTENTION_FUNCTIONS.get_interface"
    from transformers.models.mistral import modeling_mistral

    original = modeling_mistral.ALL_ATTENTION_FUNCTIONS.get_interface

    def forgetful(name: str, default: Any) -> Any:
        function = original(name, default)

        def call(*args: Any, sliding_window: int | None = None, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(interface, forgetful)
    assert_refused(build(model), model, "its mask is another than its attention function is told: causal, no window")


def test_a_window_as_long_as_the_context_is_none() -> None:
    model = tiny_packed_model("phimoe", sliding_window=256)  # its attention is never told of windows
    with build(model) as pipe:
        assert torch.equal(generate(pipe), generate(model))
        assert_engine_ran(pipe)


@pytest.mark.parametrize("step_tokens", [1, 2, 3, 6, 7, 8])
def test_the_self_test_runs_in_steps_of_any_size(step_tokens: int) -> None:
    model = tiny_packed_model("llama")
    with build(model, max_tokens_per_step=step_tokens) as pipe:
        assert torch.equal(generate(pipe), generate(model))
        assert_engine_ran(pipe)


def test_the_self_test_refuses_an_engine_that_computes_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from llmopt.baseline.kernel import BaselineAttend

    attend = BaselineAttend.__call__

    def wrong(self: Any, layer: Any, query: Tensor, **options: Any) -> Tensor:
        return attend(self, layer, query, **{**options, "scale": 2 * options["scale"]})

    monkeypatch.setattr(BaselineAttend, "__call__", wrong)
    model = tiny_packed_model("llama")
    assert_refused(build(model), model, "self-test")

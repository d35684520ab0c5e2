"""What the native decoder refuses, and the reason that it gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import llmopt
from llmopt.errors import PluginUnavailableError
from llmopt.testing import tiny_model
from llmopt_plugins.kernel.native.decoder_spec import read_decoder, why_not_native
from tests.equivalence.packed_configs import tiny_packed_model


def test_a_model_of_an_unknown_family_is_refused_by_name_and_left_out_by_auto() -> None:
    model = tiny_model("opt")
    reason = why_not_native(model)
    assert reason is not None
    assert "OPTForCausalLM" in reason
    with pytest.raises(PluginUnavailableError, match="'native'.*OPTForCausalLM"):
        llmopt.build(model, ["native"])
    with llmopt.build(model, "auto") as pipe:
        assert "OPTForCausalLM" in pipe.describe().left_out["native"]


def test_a_subclass_of_a_known_model_is_refused() -> None:
    model: Any = tiny_model("llama")
    model.__class__ = type("LlamaForCausalLM", (type(model),), {})
    assert "none of the known families" in str(why_not_native(model))


def test_a_module_of_another_class_is_refused_with_its_name() -> None:
    class Quantized(nn.Linear):
        pass

    model: Any = tiny_model("llama")
    model.model.layers[1].mlp.up_proj.__class__ = Quantized
    assert "model.layers.1.mlp.up_proj of class" in str(why_not_native(model))


def test_hooks_are_refused() -> None:
    model: Any = tiny_model("llama")
    hook = model.model.layers[0].register_forward_hook(lambda *_: None)
    assert "model.layers.0 with forward hooks" in str(why_not_native(model))
    hook.remove()
    assert why_not_native(model) is None


def test_a_replaced_forward_is_refused() -> None:
    model: Any = tiny_model("llama")
    model.model.norm.forward = lambda x: x
    assert "model.norm whose forward was replaced" in str(why_not_native(model))


def test_a_dispatched_model_is_refused() -> None:
    from accelerate import dispatch_model

    model: Any = dispatch_model(tiny_model("llama"), {"": "cpu"}, force_hooks=True)
    assert why_not_native(model) is not None


def test_a_model_with_adapters_inside_is_refused() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model("llama"), peft.LoraConfig(target_modules=["q_proj"], r=2))
    assert "q_proj" in str(why_not_native(model.get_base_model()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    model = tiny_model("llama", dtype=dtype)
    assert str(dtype).removeprefix("torch.") in str(why_not_native(model))


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("olmoe", {"clip_qkv": 5.0}, "clip_qkv=5.0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("llama", {"hidden_act": "tanh"}, "Tanh"),
        ("llama", {"sliding_window": 5}, "sliding_window=5"),
    ],
)
def test_an_option_that_the_decoder_does_not_have_is_refused(
    model_type: str, changes: dict[str, Any], reason: str
) -> None:
    assert reason in str(why_not_native(tiny_packed_model(model_type, **changes)))


def test_a_model_without_weights_can_be_read() -> None:
    whole = tiny_model("qwen3")
    config = whole.config
    with torch.device("meta"):
        empty = type(whole)(config)
    mine, other = read_decoder(empty), read_decoder(whole)
    assert (mine.matrices, mine.vectors, mine.layers) == (other.matrices, other.vectors, other.layers)
    assert torch.equal(mine.ropes[0].inv_freq, other.ropes[0].inv_freq)


def test_tied_embeddings_are_packed_once() -> None:
    assert "embedding" not in read_decoder(tiny_model("llama", tie_word_embeddings=True)).matrices
    assert "embedding" in read_decoder(tiny_model("llama", tie_word_embeddings=False)).matrices

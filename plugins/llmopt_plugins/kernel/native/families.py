"""The model classes that the native decoder runs: how each names its parts, and which of the known variants it uses.

A new family whose layers are made of the same parts is one more entry here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Family:
    """One class of causal language models in transformers, and the names of its attributes."""

    cls: str  # name of the class
    module: str  # module of transformers that defines it and its parts
    base: str = "model"  # attribute that holds the decoder without its head
    embedding: str = "embed_tokens"
    position_embedding: str | None = None  # learned positions
    layers: str = "layers"
    final_norm: str = "norm"
    # norms of a layer: before and after attention, before and after the MLP; None: there is none
    norms: tuple[str | None, str | None, str | None, str | None] = (
        "input_layernorm",
        None,
        "post_attention_layernorm",
        None,
    )
    adds_one: bool = False  # RMS norms store their weight minus one
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # or one fused projection
    output: str = "o_proj"
    norm_spans_heads: bool = False  # q_norm and k_norm go over all heads
    has_softcap: bool = False  # attention is told of `attn_logit_softcapping`
    window: Literal["none", "config", "layer"] = "none"  # whose `sliding_window` counts: the model's or the attention's
    mlp: str = "mlp"
    up: tuple[str, ...] = ("gate_proj", "up_proj")  # two: gate and up; one: fused if `is_gated`
    is_gated: bool = True
    down: str = "down_proj"
    activation: str = "act_fn"
    ropes: Literal["one", "layer_types", "none"] = "one"  # rotary embeddings of the model
    norm_top: Literal["always", "config"] = "config"  # MoE: whether weights of chosen experts are made to sum to one


def _in(name: str) -> str:
    return f"transformers.models.{name}.modeling_{name}"


_FOUR_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)

FAMILIES: dict[str, Family] = {
    family.cls: family
    for family in (
        Family("LlamaForCausalLM", _in("llama")),
        Family("MistralForCausalLM", _in("mistral"), window="config"),
        Family("Qwen2ForCausalLM", _in("qwen2"), window="layer"),
        Family("Qwen3ForCausalLM", _in("qwen3"), window="layer"),
        Family("SmolLM3ForCausalLM", _in("smollm3"), window="layer"),
        Family(
            "Phi3ForCausalLM",
            _in("phi3"),
            qkv=("qkv_proj",),
            up=("gate_up_proj",),
            activation="activation_fn",
            window="config",
        ),
        Family("Gemma2ForCausalLM", _in("gemma2"), norms=_FOUR_NORMS, adds_one=True, window="layer", has_softcap=True),
        Family(
            "Gemma3ForCausalLM", _in("gemma3"), norms=_FOUR_NORMS, adds_one=True, window="layer", ropes="layer_types"
        ),
        Family(
            "Olmo2ForCausalLM",
            _in("olmo2"),
            norms=(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
            norm_spans_heads=True,
        ),
        Family("GraniteForCausalLM", _in("granite")),
        Family(
            "Starcoder2ForCausalLM",
            _in("starcoder2"),
            up=("c_fc",),
            down="c_proj",
            activation="act",
            is_gated=False,
            window="config",
        ),
        Family(
            "GPT2LMHeadModel",
            _in("gpt2"),
            base="transformer",
            embedding="wte",
            position_embedding="wpe",
            layers="h",
            final_norm="ln_f",
            norms=("ln_1", None, "ln_2", None),
            attention="attn",
            qkv=("c_attn",),
            output="c_proj",
            up=("c_fc",),
            down="c_proj",
            activation="act",
            is_gated=False,
            ropes="none",
        ),
        Family("MixtralForCausalLM", _in("mixtral"), window="config", norm_top="always"),
        Family("Qwen3MoeForCausalLM", _in("qwen3_moe"), window="layer"),
        Family("OlmoeForCausalLM", _in("olmoe"), norm_spans_heads=True),
    )
}
"""Class name -> how to read it."""

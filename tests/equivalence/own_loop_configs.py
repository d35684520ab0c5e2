"""Tiny models that the engine leaves to the model's own loop, each with the reason that it must give."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from tests.equivalence.packed_configs import BASE, LEAVE_OUT, WINDOW, vary

_INTERFACE = "attention interface"
_LAYERS = "layers of type"
_OWN = "overrides _update_model_kwargs_for_generation"
_MASK = "its mask is another than its attention function is told"
_CROSS = "encoder-decoder"

_NO_BASE: dict[str, Any] = dict.fromkeys(
    ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"),
    LEAVE_OUT,
)
_PLAIN_HEADS: dict[str, Any] = {"head_dim": LEAVE_OUT}
_DECODER: dict[str, Any] = {"is_decoder": True, **_PLAIN_HEADS}
_EXPERTS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_INDEXED: dict[str, Any] = {
    **_EXPERTS,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 4,
    "num_key_value_heads": 4,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 4,
}
_BART: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
_T5: dict[str, Any] = {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4}


@dataclass(frozen=True, slots=True)
class OwnLoop:
    """One such model."""

    reason: str  # part of what `describe` must say
    fields: dict[str, Any] = field(default_factory=dict)  # of the config, beside BASE
    note: str = ""  # set where only some configs of a type fall back: what they have in common
    is_encoder_decoder: bool = False
    model_type: str = ""  # where it differs from the key


OWN_LOOP_CONFIGS: dict[str, OwnLoop] = {
    "axk2": OwnLoop(_LAYERS, _INDEXED),
    "big_bird": OwnLoop(_INTERFACE, {**_DECODER, "attention_type": "original_full"}),
    "bloom": OwnLoop(_INTERFACE, {"n_layer": 3, "n_head": 4, **_PLAIN_HEADS}),
    "cpmant": OwnLoop(_INTERFACE, {"dim_head": 8, "dim_ff": 48, **_PLAIN_HEADS}),
    "deepseek_v32": OwnLoop(_LAYERS, _INDEXED),
    "deepseek_v4": OwnLoop(_LAYERS, {**_EXPERTS, "q_lora_rank": 16, "o_lora_rank": 16}),
    "doge": OwnLoop("a mask that depends on more than positions", {"sliding_window": WINDOW}),
    "falcon": OwnLoop(_INTERFACE, _PLAIN_HEADS),
    "falcon-alibi": OwnLoop(_INTERFACE, {**_PLAIN_HEADS, "alibi": True}, "with ALiBi", model_type="falcon"),
    "glm_moe_dsa": OwnLoop(_LAYERS, _INDEXED),
    "gpt_neo": OwnLoop(
        _INTERFACE,
        {
            **_NO_BASE,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": WINDOW,
        },
    ),
    "gpt_neox_japanese": OwnLoop(_INTERFACE, _PLAIN_HEADS),
    "hy_v4": OwnLoop(_LAYERS, _EXPERTS),
    "inkling_text": OwnLoop("position_bias", _EXPERTS),
    "llama4_text": OwnLoop(
        _LAYERS, {**_EXPERTS, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2, "attention_chunk_size": 8}
    ),
    "megatron-bert": OwnLoop(_INTERFACE, _DECODER),
    "minimax": OwnLoop("dynamic cache", {**_EXPERTS, "block_size": 8}),
    "mpt": OwnLoop(_INTERFACE, {**_NO_BASE, "d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 256}),
    "openai-gpt": OwnLoop(_INTERFACE, {**_NO_BASE, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}),
    "phimoe-window": OwnLoop(
        _MASK, {**_EXPERTS, "sliding_window": WINDOW}, "with a window shorter than the context", model_type="phimoe"
    ),
    "qwen2_moe-window": OwnLoop(
        _MASK,
        {
            **_EXPERTS,
            "shared_expert_intermediate_size": 16,
            "sliding_window": WINDOW,
            "use_sliding_window": True,
            "max_window_layers": 1,
        },
        "with a window shorter than the context",
        model_type="qwen2_moe",
    ),
    "rembert": OwnLoop(_INTERFACE, _DECODER),
    "roformer": OwnLoop(_INTERFACE, _DECODER),
    "rwkv": OwnLoop(_OWN, {"attention_hidden_size": 32, "context_length": 256, **_PLAIN_HEADS}),
    "solar_open-window": OwnLoop(
        "and the attention function is told of no window",
        {**_EXPERTS, "sliding_window": WINDOW},
        "with a stray sliding_window in the config, which shortens the cache and not the attention",
        model_type="solar_open",
    ),
    "trocr": OwnLoop(
        _INTERFACE,
        {
            **_NO_BASE,
            "d_model": 32,
            "decoder_layers": 3,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 48,
            "cross_attention_hidden_size": 32,
        },
    ),
    "xglm": OwnLoop(_INTERFACE, {**_NO_BASE, "d_model": 32, "ffn_dim": 48, "num_layers": 3, "attention_heads": 4}),
    "xlm": OwnLoop(_INTERFACE, {**_NO_BASE, "emb_dim": 32, "n_layers": 3, "n_heads": 4}),
    "xlnet": OwnLoop(
        _OWN,
        {**_NO_BASE, "max_position_embeddings": LEAVE_OUT, "d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 48},
    ),
    # models with an encoder
    "bart": OwnLoop(_CROSS, _BART, is_encoder_decoder=True),
    "bigbird_pegasus": OwnLoop(_CROSS, _BART, is_encoder_decoder=True),
    "blenderbot": OwnLoop(_CROSS, _BART, is_encoder_decoder=True),
    "blenderbot-small": OwnLoop(_CROSS, _BART, is_encoder_decoder=True),
    "led": OwnLoop(_CROSS, _BART, is_encoder_decoder=True),
    "longt5": OwnLoop(_CROSS, _T5, is_encoder_decoder=True),
    "m2m_100": OwnLoop(_CROSS, _BART, is_encoder_decoder=True),
    "marian": OwnLoop(_CROSS, _BART, is_encoder_decoder=True),
    "mbart": OwnLoop(_CROSS, _BART, is_encoder_decoder=True),
    "mt5": OwnLoop(_CROSS, _T5, is_encoder_decoder=True),
    "mvp": OwnLoop(_CROSS, _BART, is_encoder_decoder=True),
    "nllb-moe": OwnLoop(_CROSS, _BART, is_encoder_decoder=True),
    "pegasus": OwnLoop(_CROSS, _BART, is_encoder_decoder=True),
    "plbart": OwnLoop(_CROSS, _BART, is_encoder_decoder=True),
    "t5": OwnLoop(_CROSS, _T5, is_encoder_decoder=True),
    "umt5": OwnLoop(_CROSS, _T5, is_encoder_decoder=True),
}
"""Model type, or a variant of one -> how it is made and why the engine leaves it alone."""

_SHARED = ("vocab_size", "max_position_embeddings", "pad_token_id", "bos_token_id", "eos_token_id")


def tiny_own_loop_model(name: str) -> PreTrainedModel:
    """Make a model of `OWN_LOOP_CONFIGS` with varied random weights, always the same."""
    case = OWN_LOOP_CONFIGS[name]
    fields: dict[str, Any] = {**BASE, **case.fields}
    auto: Any = AutoModelForCausalLM
    if case.is_encoder_decoder:
        fields = {**{k: BASE[k] for k in _SHARED}, **case.fields, "decoder_start_token_id": BASE["bos_token_id"]}
        auto = AutoModelForSeq2SeqLM
    config = AutoConfig.for_model(case.model_type or name, **{k: v for k, v in fields.items() if v is not LEAVE_OUT})
    return vary(auto.from_config(config, dtype=torch.float32))

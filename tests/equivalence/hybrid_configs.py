"""Tiny configs of models with recurrent, convolution or linear-attention layers: model type -> keyword arguments."""

from __future__ import annotations

from typing import Any

_BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,  # tied, tiny random models repeat their last token
}
_EXPERTS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_MAMBA1: dict[str, Any] = {"mamba_d_state": 8, "mamba_dt_rank": 4}
_LATENT: dict[str, Any] = {"kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
_MAMBA2: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
_DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

HYBRID_CONFIGS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {
        **_BASE,
        **_EXPERTS,
        **_LATENT,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "n_group": 1,
        "topk_group": 1,
    },
    "bamba": {**_BASE, **_MAMBA2, "attn_layer_indices": [1]},
    "falcon_h1": {**_BASE, **_MAMBA2, "head_dim": 8, "mamba_d_ssm": 64, "mamba_expand": 2},
    "falcon_mamba": {**_BASE, "state_size": 8, "expand": 2},
    "granitemoehybrid": {
        **_BASE,
        **_EXPERTS,
        **_MAMBA2,
        "layer_types": ["mamba", "attention", "mamba", "attention"],
        "mamba_expand": 2,
        "shared_intermediate_size": 32,
    },
    "jamba": {
        **_BASE,
        **_EXPERTS,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        **_MAMBA1,
    },
    "kimi_linear": {
        **_BASE,
        **_EXPERTS,
        **_LATENT,
        "num_key_value_heads": 4,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "lara_mini": {
        **_BASE,
        **_EXPERTS,
        **_DELTA,
        "head_dim": 8,
        "shared_expert_intermediate_size": 16,
        "sliding_window": 6,
    },
    "lfm2": {**_BASE, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {
        **_BASE,
        **_EXPERTS,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "num_dense_layers": 1,
    },
    "lfm3": {**_BASE, "head_dim": 8},
    "mamba": {**_BASE, "state_size": 8, "expand": 2},
    "mamba2": {**_BASE, "num_heads": 8, "head_dim": 8, "state_size": 8, "expand": 2, "n_groups": 1},
    "nemotron_h": {
        **_BASE,
        **_EXPERTS,
        "head_dim": 8,
        "hybrid_override_pattern": "M*M-",
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "expand": 2,
    },
    "olmo_hybrid": {**_BASE, **_DELTA, "head_dim": 8},
    "qwen3_5_moe_text": {**_BASE, **_EXPERTS, **_DELTA, "head_dim": 8, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": {**_BASE, **_DELTA, "head_dim": 8},
    "qwen3_next": {**_BASE, **_EXPERTS, **_DELTA, "head_dim": 8, "shared_expert_intermediate_size": 16},
    "recurrent_gemma": {**_BASE, "attention_window_size": 16, "lru_width": 32},
    "zamba": {**_BASE, **_MAMBA1, "layer_types": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 2},
    "zamba2": {
        **_BASE,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "mamba_d_state": 8,
        "n_mamba_heads": 8,
        "num_mem_blocks": 1,
    },
    "zaya": {
        **_BASE,
        **_EXPERTS,
        "head_dim": 8,
        "num_experts_per_tok": 1,
        "layer_types": ["hybrid", "hybrid_sliding"] * 2,
        "sliding_window": 6,
        "router_hidden_size": 16,
    },
}

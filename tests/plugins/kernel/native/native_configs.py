"""Tiny models of the families that the native decoder runs, with every option of their configurations on and off."""

from __future__ import annotations

from typing import Any

from tests.equivalence.packed_configs import WINDOW

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [9.0] * 4,
    "original_max_position_embeddings": 64,
    "factor": 4.0,
}

FAMILY_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-odd-sizes": ("llama", {"intermediate_size": 50, "mlp_bias": True, "vocab_size": 91, "head_dim": 12}),
    "llama-one-key-head": ("llama", {"num_key_value_heads": 1}),
    "llama-all-key-heads": ("llama", {"num_key_value_heads": 4}),
    "llama-linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "llama-llama3-rope": ("llama", {"rope_parameters": _LLAMA3}),
    "llama-yarn-rope": ("llama", {"rope_parameters": _YARN}),
    "llama-dynamic-rope": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "llama-gelu": ("llama", {"hidden_act": "gelu"}),
    "llama-gelu-tanh": ("llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-relu": ("llama", {"hidden_act": "relu"}),
    "llama-relu2": ("llama", {"hidden_act": "relu2"}),
    "mistral": ("mistral", {}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "mistral-window-of-2": ("mistral", {"sliding_window": 2}),
    "mistral-window-as-long-as-the-context": ("mistral", {"sliding_window": 256}),
    "qwen2": ("qwen2", {}),
    "qwen2-no-window": ("qwen2", {"use_sliding_window": False}),
    "qwen3": ("qwen3", {}),
    "qwen3-biases": ("qwen3", {"attention_bias": True, "use_sliding_window": False}),
    "smollm3": ("smollm3", {}),
    "smollm3-some-layers-without-rope": (
        "smollm3",
        {"no_rope_layers": [1, 0, 1], "layer_types": ["full_attention"] * 3, "use_sliding_window": False},
    ),
    "smollm3-biases": ("smollm3", {"attention_bias": True, "mlp_bias": True}),
    "phi3": ("phi3", {}),
    "phi3-no-window": ("phi3", {"sliding_window": None}),
    "phi3-partial-rotary": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "phi3-longrope": (
        "phi3",
        {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 64, "sliding_window": None, "head_dim": 8},
    ),
    "gemma2": ("gemma2", {}),
    "gemma2-no-softcaps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2-biases": ("gemma2", {"attention_bias": True, "query_pre_attn_scalar": 20}),
    "gemma3": ("gemma3_text", {}),
    "gemma3-softcap": ("gemma3_text", {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.0}),
    "gemma3-two-ropes": (
        "gemma3_text",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            }
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo2-biases": ("olmo2", {"attention_bias": True}),
    "granite": ("granite", {}),
    "granite-multipliers": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.5,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "starcoder2": ("starcoder2", {}),
    "starcoder2-no-biases": ("starcoder2", {"use_bias": False, "sliding_window": None}),
    "gpt2": ("gpt2", {}),
    "gpt2-scales": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "n_inner": 40, "activation_function": "gelu"}),
    "gpt2-unscaled": ("gpt2", {"scale_attn_weights": False, "activation_function": "relu"}),
    "mixtral": ("mixtral", {}),
    "mixtral-no-window": ("mixtral", {"sliding_window": None, "num_experts_per_tok": 1}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe-normalized": ("qwen3_moe", {"norm_topk_prob": True, "sliding_window": None, "attention_bias": True}),
    "qwen3_moe-mixed": ("qwen3_moe", {"mlp_only_layers": [1], "num_experts_per_tok": 3}),
    "olmoe": ("olmoe", {}),
    "olmoe-normalized": ("olmoe", {"norm_topk_prob": True, "attention_bias": True, "num_key_value_heads": 4}),
}
"""Name -> model type and fields beside those of `tests.equivalence.packed_configs`. Windows have `WINDOW` tokens."""

assert WINDOW < 11, "prompts are longer than the windows"

REPEATING = {"llama-tied"}
"""Models that repeat themselves, whatever their weights; their logits are compared all the same."""

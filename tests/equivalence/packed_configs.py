"""Tiny models of the decoder-only types that the engine runs packed.

Sizes are as small as a type allows, and chosen so that mistakes show: head_dim is not hidden_size / num_heads, and
windows are shorter than the prompts. Weights are drawn anew, so that greedy output is varied and depends on attention.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

WINDOW = 6  # sliding window in tokens, shorter than most prompts and longer than a block
LEAVE_OUT = object()  # a field of BASE that a type does not take

BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # hidden_size / num_attention_heads would be 8
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,  # tied, tiny random models repeat their last token
}
_PLAIN_HEADS: dict[str, Any] = {"head_dim": LEAVE_OUT}  # types whose head_dim is hidden_size / num_attention_heads
_SLIDING: dict[str, Any] = {"sliding_window": WINDOW}
_MIXED: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_HALF: dict[str, Any] = {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1}
_EXPERTS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_GROUPED: dict[str, Any] = {
    **_EXPERTS,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_LATENT: dict[str, Any] = {  # latent attention: heads are made of a compressed key and a rotary part
    **_GROUPED,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 4,
    "num_key_value_heads": 4,
}
_BERT: dict[str, Any] = {"is_decoder": True, **_PLAIN_HEADS}
_GPT: dict[str, Any] = {
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "n_ctx": 256,
    "rotary_dim": 4,
    **dict.fromkeys(("head_dim", "num_key_value_heads", "intermediate_size"), LEAVE_OUT),
}

PACKED_CONFIGS: dict[str, dict[str, Any]] = {
    "afmoe": {**_EXPERTS, **_MIXED},
    "apertus": {},
    "apertus1p5_text": {},
    "arcee": {},
    "aria_text": _EXPERTS,
    "axk1": _LATENT,
    "beam": {**_EXPERTS, **_SLIDING},
    "bert": _BERT,
    "bert-generation": _BERT,
    "biogpt": _PLAIN_HEADS,
    "bitnet": _PLAIN_HEADS,
    "camembert": _BERT,
    "codegen": _GPT,
    "cohere": {},
    "cohere2": _MIXED,
    "cohere2_moe": {**_EXPERTS, **_MIXED},
    "ctrl": {"n_embd": 32, "dff": 48, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "cwm": _SLIDING,
    "data2vec-text": _BERT,
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 3,
        "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads"), LEAVE_OUT),
        **dict.fromkeys(("num_key_value_heads", "head_dim", "intermediate_size"), LEAVE_OUT),
    },
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "diffllama": {},
    "dots1": {**_GROUPED, **_MIXED, "n_group": 1},
    "electra": _BERT,
    "ernie": _BERT,
    "ernie4_5": {},
    "ernie4_5_moe": _EXPERTS,
    "exaone": {},
    "exaone4": _MIXED,
    "exaone_moe": {**_EXPERTS, **_MIXED},
    "flex_olmo": _EXPERTS,
    "flint": _SLIDING,
    "gemma": {},
    "gemma2": {**_MIXED, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 1.0},
    "gemma3_text": {**_MIXED, "query_pre_attn_scalar": 8},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,  # the last two layers attend over the keys of the first two
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": WINDOW,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 96,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {
        **_SLIDING,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 96,
        "global_head_dim": 24,  # layers differ in the size of what they store
    },
    "gemma4_unified_text": {**_SLIDING, "global_head_dim": 24},
    "glm": {},
    "glm4": {},
    "glm4_moe": _GROUPED,
    "glm4_moe_lite": _LATENT,
    "gpt-sw3": _GPT,
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_neox": _PLAIN_HEADS,
    "gpt_oss": {**_EXPERTS, **_SLIDING},
    "gptj": _GPT,
    "granite": {},
    "granite_swa": _SLIDING,
    "granitemoe": _EXPERTS,
    "granitemoe_swa": {**_EXPERTS, **_SLIDING},
    "granitemoeshared": {**_EXPERTS, "shared_intermediate_size": 16},
    "helium": {"head_dim": 8},
    "hrm_text": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": _EXPERTS,
    "hy_v3": _EXPERTS,
    "hyperclovax": {},
    "internlm3": {},
    "iquestcoder": {},
    "jais2": {},
    "jetmoe": {**_EXPERTS, "kv_channels": 8, "head_dim": LEAVE_OUT},
    "kolibri1": {**_EXPERTS, **_MIXED},
    "laguna": {**_EXPERTS, **_MIXED},
    "llama": {},
    "longcat_flash": _LATENT,
    "mellum": {**_EXPERTS, **_MIXED},
    "mimo_v2_flash": {**_EXPERTS, **_SLIDING},
    "minicpm3": _LATENT,
    "minimax_m2": _EXPERTS,
    "minimax_m3_vl_text": _EXPERTS,
    "ministral": _MIXED,
    "ministral3": _SLIDING,
    "mistral": _SLIDING,
    "mixtral": {**_EXPERTS, **_SLIDING},
    "modernbert-decoder": {"head_dim": LEAVE_OUT, "local_attention": WINDOW, "global_attn_every_n_layers": 2},
    "moshi": {},
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": _MIXED,
    "olmoe": {**_EXPERTS, **_PLAIN_HEADS},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16, **_PLAIN_HEADS},
    "persimmon": _PLAIN_HEADS,
    "phi": _PLAIN_HEADS,
    "phi3": _SLIDING,
    "phimoe": _EXPERTS,
    "qwen2": _HALF,
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3": _HALF,
    "qwen3_moe": {**_EXPERTS, **_HALF},
    "roberta": _BERT,
    "roberta-prelayernorm": _BERT,
    "roc_bert": _BERT,
    "sarvam_mla": _LATENT,
    "sarvam_moe": _EXPERTS,
    "seed_oss": {},
    "smollm3": {**_MIXED, "use_sliding_window": True},
    "solar_open": _EXPERTS,
    "stablelm": _PLAIN_HEADS,
    "starcoder2": _SLIDING,
    "vaultgemma": {**_MIXED, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 1.0},
    "xlm-roberta": _BERT,
    "xlm-roberta-xl": _BERT,
    "xmod": {**_BERT, "languages": ["en"], "default_language": "en"},
    "youtu": _LATENT,
}
"""Model type -> fields beside BASE."""

# How weights are drawn where the usual way gives output that repeats itself or hardly depends on attention.
_SMALL_EMBEDDINGS: dict[str, Any] = {"embedding_std": 0.1}  # layers then weigh more than the token that came last
_DRAWS: dict[str, dict[str, Any]] = {
    "bert": {"seed": 2},
    "deepseek_v3": _SMALL_EMBEDDINGS,
    "gemma": _SMALL_EMBEDDINGS,
    "gemma2": _SMALL_EMBEDDINGS,
    "gemma3_text": _SMALL_EMBEDDINGS,
    "gemma4_unified_text": _SMALL_EMBEDDINGS,
    "gpt_neox": {"seed": 5},
    "jais2": {"seed": 2},
    "minicpm3": _SMALL_EMBEDDINGS,
    "opt": {"seed": 2},
    "sarvam_mla": _SMALL_EMBEDDINGS,
    "vaultgemma": _SMALL_EMBEDDINGS,
    "xmod": {"seed": 4},
}


def tiny_packed_model(model_type: str, **changes: Any) -> PreTrainedModel:
    """Make a model of a type of `PACKED_CONFIGS` with varied random weights, always the same."""
    fields = {**BASE, **PACKED_CONFIGS.get(model_type, {}), **changes}
    config = AutoConfig.for_model(model_type, **{name: v for name, v in fields.items() if v is not LEAVE_OUT})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return vary(model, **_DRAWS.get(model_type, {}))


@torch.no_grad()
def vary(model: PreTrainedModel, seed: int = 1, embedding_std: float = 1.0) -> PreTrainedModel:
    """Draw all weights anew: matrices keep the size of what passes through them, vectors are moved a little."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = model.get_input_embeddings().weight
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter is embeddings:
            parameter.copy_(embedding_std * noise)
        elif parameter.ndim > 1:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(0.2 * noise)  # biases, norms and sinks that are 0 or 1 would hide mistakes
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):  # of the choice of experts
            buffer.add_(0.2 * torch.randn(buffer.shape, generator=generator))
    model.generation_config.eos_token_id = None  # rows have the same length, so that all of it is compared
    model.generation_config.pad_token_id = 0
    return model.eval()

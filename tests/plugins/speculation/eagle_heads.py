"""Draft heads for tiny models, written in each published layout with its names and shapes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

LAYOUTS = ("eagle1", "eagle1_speculators", "eagle3", "eagle3_specforge", "eagle3_speculators")
DRAFT_VOCAB = 200


def layer(size: int, inner: int, heads: int, kv_heads: int, dim: int, inputs: int) -> dict[str, Tensor]:
    """A decoder layer's matrices, without norms."""
    return {
        "self_attn.q_proj.weight": torch.randn(heads * dim, inputs) / inputs**0.5,
        "self_attn.k_proj.weight": torch.randn(kv_heads * dim, inputs) / inputs**0.5,
        "self_attn.v_proj.weight": torch.randn(kv_heads * dim, inputs) / inputs**0.5,
        "self_attn.o_proj.weight": torch.randn(size, heads * dim) / size**0.5,
        "mlp.gate_proj.weight": torch.randn(inner, size) / size**0.5,
        "mlp.up_proj.weight": torch.randn(inner, size) / size**0.5,
        "mlp.down_proj.weight": torch.randn(size, inner) / inner**0.5,
    }


def draft_vocabulary(vocab: int, count: int = DRAFT_VOCAB) -> dict[str, Tensor]:
    """``d2t`` and ``t2d`` of some tokens, the first few among them."""
    chosen = torch.cat([torch.arange(3), 3 + torch.randperm(vocab - 3)[: count - 3]]).sort().values
    known = torch.zeros(vocab, dtype=torch.bool)
    known[chosen] = True
    return {"d2t": chosen - torch.arange(count), "t2d": known}


def write_head(
    folder: Path,
    layout: str,
    *,
    size: int = 64,
    vocab: int = 512,
    num_layers: int = 2,
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
    changes: Mapping[str, Tensor | None] | None = None,
) -> Path:
    """Write a head with random weights.

    :param config: fields of ``config.json`` to change; None takes one away.
    :param changes: tensors to change, by their names in the file; None takes one away.
    """
    folder.mkdir(parents=True, exist_ok=True)
    facts: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": size,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "vocab_size": vocab,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        weights, extra = _make(layout, size, vocab)
    if layout == "eagle3_specforge":
        facts["architectures"] = ["LlamaForCausalLMEagle3"]
        facts |= {
            "rope_theta": 5000.0,
            "rope_scaling": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        }
    else:
        facts["rope_theta"] = 10000.0
    found: dict[str, Any] = {**facts, **extra}
    if layout.endswith("speculators"):
        found = {"transformer_layer_config": facts, "speculators_version": "0.3.0", **extra}
    if layout.startswith("eagle3"):  # two layers have no three places of the default
        found.setdefault("eagle_aux_hidden_state_layer_ids", [0, 1, 2] if num_layers == 2 else None)
    for name, value in (config or {}).items():
        found[name] = value
        if value is None:
            del found[name]
    for name, tensor in (changes or {}).items():
        weights.pop(name, None)
        if tensor is not None:
            weights[name] = tensor
    (folder / "config.json").write_text(json.dumps({k: v for k, v in found.items() if v is not None}))
    weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    if layout == "eagle1":
        torch.save(weights, folder / "pytorch_model.bin")
    else:
        save_file(weights, folder / "model.safetensors")
    return folder


def _make(layout: str, size: int, vocab: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    ones = {
        name: 1.0 + 0.1 * torch.randn(size) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    }
    parts = layer(size, 96, 4, 2, size // 4, size if layout.startswith("eagle1") else 2 * size)
    if layout.startswith("eagle1"):
        fc = torch.randn(size, 2 * size) / size**0.5
        parts["post_attention_layernorm.weight"] = ones["post_attention_layernorm"]
        if layout == "eagle1":
            named = {f"layers.0.{name}": tensor for name, tensor in parts.items()}
            embedding = torch.randn(vocab, size)
            return {"embed_tokens.weight": embedding, "fc.weight": fc, "fc.bias": torch.randn(size), **named}, {
                "bias": True
            }
        named = {f"transformer.{name}": tensor for name, tensor in parts.items()}
        named |= {
            "fusion_fc.weight": fc,
            "embedding_layernorm.weight": torch.ones(size),
            "pre_lm_head_layernorm.weight": torch.ones(size),
        }
        return named, {"speculators_model_type": "eagle", "fusion_bias": False, "layernorms": True}
    parts |= {f"{name}.weight": tensor for name, tensor in ones.items()}
    prefix = "layers.0." if layout == "eagle3_speculators" else "midlayer."
    named = {f"{prefix}{name}": tensor for name, tensor in parts.items()}
    named |= {
        "fc.weight": torch.randn(size, 3 * size) / (3 * size) ** 0.5,
        "norm.weight": 1.0 + 0.1 * torch.randn(size),
        "lm_head.weight": torch.randn(DRAFT_VOCAB, size) / size**0.5,
        **draft_vocabulary(vocab),
    }
    extra: dict[str, Any] = {"draft_vocab_size": DRAFT_VOCAB}
    if layout == "eagle3_specforge":
        named |= {f"fc_norm.{i}.weight": 1.0 + 0.1 * torch.randn(size) for i in range(3)}
        ids = extra["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1], "use_aux_hidden_state": True}
        assert ids
    if layout == "eagle3_speculators":
        named["layers.0.self_attn.q_norm.weight"] = 1.0 + 0.1 * torch.randn(size // 4)
        named["layers.0.self_attn.k_norm.weight"] = 1.0 + 0.1 * torch.randn(size // 4)
        extra |= {"speculators_model_type": "eagle3", "norm_before_residual": True, "norm_output": True}
    return named, extra

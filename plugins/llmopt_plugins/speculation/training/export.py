"""Writing a trained drafter in the layout that other engines publish and read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from llmopt_plugins.speculation.eagle.model import Eagle3Head

if TYPE_CHECKING:
    from llmopt_plugins.speculation.training.medusa import MedusaHeads


def export_eagle3(head: Eagle3Head, folder: Path, provenance: Mapping[str, Any]) -> None:
    """Write ``config.json`` and ``model.safetensors`` in the official EAGLE-3 layout, in bfloat16.

    The embedding and the frozen output rows are the target's own and are left out: a loader takes them from there.

    :param provenance: kept in the configuration under ``llmopt``.
    """
    facts = head.config
    rope = dict(facts.rope_parameters)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": facts.hidden_size,
        "target_hidden_size": facts.target_hidden_size,
        "intermediate_size": facts.intermediate_size,
        "num_attention_heads": facts.num_attention_heads,
        "num_key_value_heads": facts.num_key_value_heads,
        "head_dim": facts.head_dim,
        "hidden_act": facts.hidden_act,
        "attention_bias": facts.attention_bias,
        "mlp_bias": facts.mlp_bias,
        "rms_norm_eps": facts.rms_norm_eps,
        "max_position_embeddings": facts.max_position_embeddings,
        "rope_theta": rope.get("rope_theta", 10000.0),  # older engines read this one, newer ones the next
        "rope_parameters": rope,
        "vocab_size": facts.vocab_size,
        "draft_vocab_size": facts.draft_vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "llmopt": dict(provenance),
    }
    tensors = {
        name: value.to(torch.bfloat16).contiguous() if value.is_floating_point() else value.contiguous()
        for name, value in head.state_dict().items()
        if name not in ("lm_head.weight", "embed_tokens.weight")
    }
    _write(folder, config, tensors, "model.safetensors")


def export_medusa(heads: MedusaHeads, folder: Path, provenance: Mapping[str, Any]) -> None:
    """Write Medusa heads without output matrices: the form in which all heads share the target's own."""
    config = {
        "medusa_num_heads": len(heads.blocks),
        "medusa_num_layers": 1,
        "hidden_size": heads.linears[0].in_features,
        "base_model_name_or_path": str(provenance.get("target", "")),
        "llmopt": dict(provenance),
    }
    tensors = {}
    for number, block in enumerate(heads.linears):
        tensors[f"{number}.0.linear.weight"] = block.weight.detach().to(torch.bfloat16).contiguous()
        tensors[f"{number}.0.linear.bias"] = block.bias.detach().to(torch.bfloat16).contiguous()
    _write(folder, config, tensors, "medusa_lm_head.safetensors")


def _write(folder: Path, config: Mapping[str, Any], tensors: dict[str, torch.Tensor], name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{name}.partial"
    save_file(tensors, partial)
    partial.replace(folder / name)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

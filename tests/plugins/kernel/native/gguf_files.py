"""GGUF files of tiny models, written with the gguf package. Blocks of the K formats are random bits: nothing quantizes
to them in Python, and any bits are a valid block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

BLOCKS = {Type.Q4_K: (256, 144), Type.Q6_K: (256, 210)}


def random_blocks(kind: Type, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Quantized bytes ``[..., bytes of a row]``; weights of a size that suits a model."""
    values, num_bytes = BLOCKS[kind]
    count = int(np.prod(shape)) // values
    blocks = rng.integers(0, 256, size=(count, num_bytes), dtype=np.uint8)
    scale = (rng.uniform(0.5, 2.0, size=(count, 1)) * 2e-4).astype(np.float16).view(np.uint8)
    if kind is Type.Q4_K:
        blocks[:, 0:2] = scale
        blocks[:, 2:4] = (rng.uniform(0.5, 2.0, size=(count, 1)) * 1e-3).astype(np.float16).view(np.uint8)
    else:
        blocks[:, 192:208] = rng.integers(-20, 20, size=(count, 16)).astype(np.int8).view(np.uint8)
        blocks[:, 208:210] = scale
    return blocks.reshape(*shape[:-1], -1)


def quantized(weight: np.ndarray, kind: Type, rng: np.random.Generator) -> np.ndarray:
    """A weight in blocks; for the K formats, random ones of the same shape."""
    if kind in BLOCKS:
        return random_blocks(kind, weight.shape, rng)
    return gguf.quantize(weight, kind)


def rotated(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows in the order of llama.cpp: values that are rotated together side by side."""
    return weight.reshape(num_heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: Any, kind: Type, *, changed: dict[str, Any] | None = None, seed: int = 0,
               metadata: dict[str, Any] | None = None) -> None:  # fmt: skip
    """Write a tiny Llama or Qwen2 model with its matrices in one type and a byte vocabulary.

    :param metadata: more keys, texts or numbers.
    :param changed: tensors by their names in the file, in place of the model's; None leaves one out.
    """
    config, rng = model.config, np.random.default_rng(seed)
    arch = {"llama": "llama", "qwen2": "qwen2"}[config.model_type]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    tokens = [chr(33 + i) if i < 90 else f"<{i}>" for i in range(config.vocab_size)]
    tokens[100] = "!!"
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["! !"])
    for key, value in (metadata or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(key, value)
    for name in ("bos", "eos", "pad"):
        getattr(writer, f"add_{name}_token_id")(getattr(config, f"{name}_token_id") or 0)
    names = gguf.get_tensor_name_map(
        next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch), config.num_hidden_layers
    )
    tensors: dict[str, Any] = {}
    for name, parameter in model.named_parameters():
        weight = parameter.detach().float().numpy()
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if arch == "llama" and (".q_proj" in name or ".k_proj" in name):
            heads = config.num_attention_heads if ".q_proj" in name else config.num_key_value_heads
            weight = rotated(weight, heads)
        tensors[stored] = weight
    tensors |= changed or {}
    for stored, weight in tensors.items():
        if weight is None:
            continue
        if isinstance(weight, tuple):  # raw bytes and their type
            writer.add_tensor(stored, weight[0], raw_dtype=weight[1])
        elif weight.ndim == 2 and kind not in (Type.F32, Type.F16):
            writer.add_tensor(stored, quantized(weight, kind, rng), raw_dtype=kind)
        else:
            writer.add_tensor(
                stored, weight.astype(np.float16 if kind is Type.F16 and weight.ndim == 2 else np.float32)
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

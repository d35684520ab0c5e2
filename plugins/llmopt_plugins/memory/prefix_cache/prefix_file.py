"""A named prefix as a safetensors file: its tokens and their KV, with what is needed to refuse the wrong ones."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llmopt.errors import LlmoptError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from llmopt.config import PipelineConfig
    from llmopt.kv_cache import KVCache, LayerKV

_FORMAT = "llmopt prefix 1"
_NUM_SAMPLED = 64  # parameters of which some values are read


class PrefixFileError(LlmoptError, ValueError):
    """A file that is no prefix, is damaged, or belongs to another model."""


@dataclass(slots=True)
class Prefix:
    """The KV of the first tokens of a sequence."""

    name: str
    salt: bytes  # as `salt_of` makes it
    token_ids: Tensor  # [T] int32
    tensors: dict[str, Tensor]  # "<layer>.key" and "<layer>.value": [T, heads, dim]


def fingerprint(model: PreTrainedModel, config: PipelineConfig, kv_cache: KVCache) -> str:
    """What makes KV of two models interchangeable: configuration, some values of the weights, and what is stored."""
    import torch

    from llmopt.ops.quantized_rows import ROW_FORMAT

    parts: list[object] = [json.dumps(model.config.to_dict(), sort_keys=True, default=str)]
    kernel = config.kernel
    parts.append((kernel.weight_bits, kernel.head_bits, kernel.weight_group_size, kernel.weight_minimum))
    parts.append([(i, repr(shape)) for i, shape in sorted(kv_cache.shapes.items())])
    if any(shape.is_quantized for shape in kv_cache.shapes.values()):
        parts.append(ROW_FORMAT)
    named = sorted(model.named_parameters(), key=lambda pair: pair[0])
    for name, parameter in named[:: max(1, len(named) // _NUM_SAMPLED)]:
        parts.append((name, str(parameter.dtype), tuple(parameter.shape)))
        if parameter.device.type != "meta" and parameter.numel():
            flat = parameter.detach().reshape(-1) if parameter.is_contiguous() else parameter.detach().flatten()
            parts.append(flat[:: max(1, flat.numel() // 16)][:16].to(torch.float32).tolist())
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def gather(kv_cache: KVCache, blocks: list[int]) -> dict[str, Tensor]:
    """Copy blocks out of the pool, tokens first: ``[len(blocks) * block_size, heads, dim]`` on the CPU."""
    import torch

    found: dict[str, Tensor] = {}
    for index, layer in kv_cache.layers.items():
        for kind, stored in (("key", layer.key), ("value", layer.value)):
            picked = stored[torch.tensor(blocks, device=stored.device)]  # [N, heads, block_size, dim]
            found[f"{index}.{kind}"] = picked.transpose(1, 2).flatten(0, 1).contiguous().cpu()
    return found


def scatter(kv_cache: KVCache, tensors: dict[str, Tensor], places: list[int], blocks: list[int]) -> None:
    """Copy the blocks number ``places`` of a prefix to ``blocks`` of the pool."""
    size = kv_cache.block_size
    for index, layer in kv_cache.layers.items():
        for place, block in zip(places, blocks, strict=True):
            rows = slice(place * size, (place + 1) * size)
            _fill(layer, block, tensors[f"{index}.key"][rows], tensors[f"{index}.value"][rows])


def _fill(layer: LayerKV, block: int, key: Tensor, value: Tensor) -> None:
    layer.key[block] = key.transpose(0, 1).to(layer.key.device)
    layer.value[block] = value.transpose(0, 1).to(layer.value.device)


def write(path: Path, prefix: Prefix, model: str) -> None:
    """Write a prefix; the file appears whole or not at all.

    :param model: its `fingerprint`.
    """
    from safetensors.torch import save_file

    tensors = {"token_ids": prefix.token_ids, **prefix.tensors}
    metadata = {"format": _FORMAT, "name": prefix.name, "salt": prefix.salt.hex(), "model": model}
    metadata["checksum"] = _checksum(metadata, tensors)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        save_file(tensors, partial, metadata)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read(path: Path, model: str, kv_cache: KVCache) -> Prefix:
    """Read a prefix that this model has computed.

    :raises PrefixFileError: says what is wrong with the file, and what to do.
    :raises FileNotFoundError: there is none.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"there is no prefix file {str(path)!r}. `save` writes one.")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                found = metadata.get("format", "no format")
                raise PrefixFileError(f"{path} is no prefix file: found {found!r}, expected {_FORMAT!r}.")
            if metadata.get("model") != model:
                raise PrefixFileError(
                    f"{path} holds KV of another model, or of this one with other weights or dtypes. Save the prefix "
                    "again with this model."
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
    except (SafetensorError, OSError, ValueError) as error:
        if isinstance(error, PrefixFileError):
            raise
        raise PrefixFileError(f"{path} is damaged: {error}. Save the prefix again.") from error
    claimed = metadata.pop("checksum", "")
    if claimed != _checksum(metadata, tensors):
        raise PrefixFileError(f"{path} is damaged: its checksum is wrong. Save the prefix again.")
    token_ids = tensors.pop("token_ids")
    for index, shape in kv_cache.shapes.items():
        for kind, heads, dim in (
            ("key", shape.num_key_heads, shape.key_width),
            ("value", shape.num_value_heads, shape.value_width),
        ):
            stored = tensors.get(f"{index}.{kind}")
            wanted = (len(token_ids), heads, dim)
            if stored is None or tuple(stored.shape) != wanted or stored.dtype != shape.stored_dtype:
                found = None if stored is None else (tuple(stored.shape), stored.dtype)
                raise PrefixFileError(
                    f"{path}: layer {index} needs {kind}s {wanted} of {shape.stored_dtype}, found {found}."
                )
    return Prefix(metadata["name"], bytes.fromhex(metadata["salt"]), token_ids, tensors)


def _checksum(metadata: dict[str, str], tensors: dict[str, Tensor]) -> str:
    import torch

    digest = hashlib.blake2b(repr(sorted(metadata.items())).encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(repr((name, tuple(tensor.shape), str(tensor.dtype))).encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()

"""Medusa heads from a file, in any of the layouts in which they are published.

{i}.{j}.linear.weight, .bias       block j of head i, and {i}.{layers}.weight its output matrix (medusa_lm_head.pt or
                                   .safetensors); without output matrices the heads share that of the model
medusa_head.{i}. ...               the same inside the weights of a whole model
blocks.{i}.layers.{j}.weight       as serving engines convert them; lm_heads.{i}.weight, or one lm_head.weight or
                                   original_lm_head.weight for all; token_map: ids of a shorter output matrix

The number of heads is counted: published configs name another one than their files hold.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from llmopt.errors import ModelError

_FILES = (
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_PLAIN = re.compile(r"(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")
_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_OUTPUT = re.compile(r"lm_heads\.(\d+)\.weight")
_SHARED = ("lm_head.weight", "original_lm_head.weight")
_WHOLE = "medusa_head."


@dataclass(slots=True)
class Head:
    """Guesses the token that stands some places ahead."""

    blocks: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # "weight" [h, h], perhaps "bias" [h]
    output: Tensor | None = None  # [rows, h]; None: that of the model


@dataclass(slots=True)
class Heads:
    """All heads of a checkpoint: head ``k`` guesses token ``t + 2 + k`` from the final hidden state of token ``t``."""

    heads: list[Head]
    token_map: Tensor | None  # [rows] int64: the id that each row of an output matrix stands for; None: its number
    source: Path


def read_heads(path: Path, hidden_size: int, vocab_size: int) -> Heads:
    """Read a folder or a file.

    :param hidden_size: of the model that the heads are for.
    :param vocab_size: rows of its output matrix.
    :raises ModelError: there are no heads, the file is damaged, holds other things, or belongs to another model.
    """
    source = _find(path)
    tensors = dict(_read(source))
    if any(key.startswith(_WHOLE) for key in tensors):  # the other keys are the model's
        tensors = {k.removeprefix(_WHOLE): v for k, v in tensors.items() if k.startswith(_WHOLE)}
    heads: dict[int, Head] = {}
    shared: Tensor | None = None
    token_map: Tensor | None = None
    outputs: dict[int, tuple[int, Tensor]] = {}  # of the plain layout: its place tells the number of blocks
    for key, tensor in tensors.items():
        if plain := _PLAIN.fullmatch(key):
            head, place = heads.setdefault(int(plain[1]), Head()), int(plain[2])
            if plain[3] == "weight":
                outputs[int(plain[1])] = place, tensor
                head.output = tensor
            else:
                head.blocks.setdefault(place, {})[plain[3].removeprefix("linear.")] = tensor
        elif block := _BLOCK.fullmatch(key):
            heads.setdefault(int(block[1]), Head()).blocks.setdefault(int(block[2]), {})[block[3]] = tensor
        elif output := _OUTPUT.fullmatch(key):
            heads.setdefault(int(output[1]), Head()).output = tensor
        elif key in _SHARED:
            shared = tensor
        elif key == "token_map":
            token_map = tensor.long()
        else:
            raise _wrong(source, f"it holds {key!r}, which no layout of Medusa heads has")
    if not heads:
        raise _wrong(source, "it holds no heads")
    for number, (place, _) in outputs.items():
        if place != len(heads[number].blocks):
            raise _wrong(
                source, f"head {number} has {len(heads[number].blocks)} blocks and its output matrix at {place}"
            )
    found = Heads([heads[i] for i in sorted(heads)], token_map, source)
    if shared is not None:
        for head in found.heads:
            head.output = shared if head.output is None else head.output
    _check(found, sorted(heads), hidden_size, vocab_size)
    return found


def _check(found: Heads, numbers: list[int], hidden_size: int, vocab_size: int) -> None:
    source, heads = found.source, found.heads
    if numbers != list(range(len(numbers))):
        raise _wrong(source, f"heads are numbered from 0 on, and it has {numbers}: one is missing")
    if len({head.output is None for head in heads}) > 1:
        raise _wrong(source, "some heads have an output matrix and others have none")
    for number, head in enumerate(heads):
        if sorted(head.blocks) != list(range(len(heads[0].blocks))):
            raise _wrong(source, f"head {number} has blocks {sorted(head.blocks)}, head 0 {sorted(heads[0].blocks)}")
        for place, block in head.blocks.items():
            shape = tuple(block["weight"].shape) if "weight" in block else None
            if shape != (hidden_size, hidden_size):
                raise _wrong(
                    source,
                    f"block {place} of head {number} has a matrix {shape}, the model a hidden size of {hidden_size}",
                )
            if "bias" in block and tuple(block["bias"].shape) != (hidden_size,):
                raise _wrong(source, f"block {place} of head {number} has a bias {tuple(block['bias'].shape)}")
            if not all(bool(tensor.isfinite().all()) for tensor in block.values()):
                raise _wrong(source, f"block {place} of head {number} holds values that are no numbers")
        if head.output is None:
            continue
        rows = vocab_size if found.token_map is None else found.token_map.numel()
        if tuple(head.output.shape) != (rows, hidden_size):
            raise _wrong(
                source,
                f"head {number} has an output matrix {tuple(head.output.shape)}, and the model a vocabulary of "
                f"{vocab_size} and a hidden size of {hidden_size}"
                + (f", of which token_map names {rows}" if found.token_map is not None else ""),
            )
    if found.token_map is not None:
        if heads[0].output is None:
            raise _wrong(source, "it has a token_map and no output matrix whose rows it could name")
        low, high = int(found.token_map.min()), int(found.token_map.max())
        if low < 0 or high >= vocab_size or found.token_map.unique().numel() != found.token_map.numel():
            raise _wrong(source, f"token_map names ids from {low} to {high}, and the vocabulary has {vocab_size}")


def _find(path: Path) -> Path:
    if path.is_file():
        return path
    for name in _FILES:
        if (path / name).is_file():
            return path / name
    raise ModelError(f"medusa found no heads at {path}: a file, or a folder with one of {', '.join(_FILES)}.")


def _read(source: Path) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a file, or of all files that an index names."""
    try:
        if source.name.endswith(".index.json"):
            for name in sorted(set(json.loads(source.read_text())["weight_map"].values())):
                yield from _read(source.parent / name)
        elif source.suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(source, framework="pt") as file:
                keys = list(file.keys())
                wanted = [key for key in keys if key.startswith(_WHOLE)] or keys
                for key in wanted:
                    yield key, file.get_tensor(key)
        else:
            yield from _load_pickle(source).items()
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"medusa cannot read {source}: {error}. Is the file complete?") from error


def _load_pickle(source: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:  # its text proposes to run what the file contains
        raise ModelError(
            f"medusa cannot read {source}: it is no file of tensors alone, as torch.save writes."
        ) from error
    return found


def _wrong(source: Path, reason: str) -> ModelError:
    return ModelError(f"medusa cannot use {source}: {reason}.")

"""Reading a draft head: the official EAGLE layouts, SpecForge's and speculators', told apart by what the files hold.

Every layout becomes the same torch module (`Eagle3Head`, `Eagle1Head`). What a checkpoint leaves out on purpose, the
embedding and the output matrix, comes from the target. What does not fit the target, or is not whole, is refused with
the reason; a tensor that nobody reads is an error too, because a skipped one would only lower acceptance.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from llmopt.hf.capabilities import text_config
from llmopt_plugins.speculation.eagle.model import Eagle3Config, Eagle3Head
from llmopt_plugins.speculation.eagle.model1 import Eagle1Head

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_FILES = ("model.safetensors", "pytorch_model.bin")
_RENAMES = (
    (r"^model\.", ""),
    (r"^layers\.0\.", "midlayer."),
    (r"^transformer\.", "midlayer."),
    (r"^fusion_fc\.", "fc."),
    (r"^embedding_layernorm\.", "token_norm."),
    (r"^hidden_states_layernorm\.", "feature_norm."),
    (r"^pre_lm_head_layernorm\.", "norm."),
)
_UNREAD = re.compile(r"rotary_emb\.inv_freq$|^verifier_")  # made anew, or the target's own


class HeadError(Exception):
    """A checkpoint cannot draft for a target. The message is a reason that can follow "the draft head"."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a head must fit."""

    hidden_size: int
    vocab_size: int  # rows of the embedding
    num_tokens: int | None  # ids that the tokenizer has; rows past them are padding. None: not known
    num_layers: int
    dtype: torch.dtype


@dataclass(slots=True)
class HeadFiles:
    """A checkpoint before its weights fill a module."""

    folder: Path
    config: dict[str, Any]  # as the file says
    facts: dict[str, Any]  # the part of it that describes the layer
    weights: dict[str, Tensor]  # names of the official EAGLE-3 layout
    version: int  # 1 (and 2), or 3
    is_speculators: bool
    readings: list[tuple[int, ...]] = field(default_factory=list)  # which layers the taps may be, the likely one first


def shipped_head(model: PreTrainedModel) -> Path | None:
    """The folder of a head that comes with llmopt and was trained on this model; None when there is none."""
    folders = [path.parent for path in sorted((Path(__file__).parent / "heads").glob("*/config.json"))]
    if not folders:
        return None
    mark = target_mark(model)
    marks = [
        json.loads((folder / "config.json").read_text()).get("llmopt", {}).get("target_mark") for folder in folders
    ]
    return next((folder for folder, found in zip(folders, marks, strict=True) if found == mark), None)


def target_mark(model: PreTrainedModel) -> str:
    """A hash of some weights of a target, the same in every dtype that holds them exactly: who a head belongs to."""
    decoder: Any = model.get_decoder()
    digest = hashlib.sha256()
    norm = getattr(decoder, "norm", None)
    for weight in (*((norm.weight,) if norm is not None else ()), model.get_input_embeddings().weight[:64]):
        digest.update(weight.detach().to(torch.float32).cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]


def target_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Target:
    """What a head must fit."""
    config: Any = text_config(model)
    return Target(
        hidden_size=config.hidden_size,
        vocab_size=model.get_input_embeddings().weight.shape[0],
        num_tokens=None if tokenizer is None else len(tokenizer),
        num_layers=config.num_hidden_layers,
        dtype=model.dtype,
    )


def read_files(folder: Path, target: Target, aux_layers: Sequence[int] | None = None) -> HeadFiles:
    """Read a folder, and find out what its head is and which hidden states it wants.

    :param aux_layers: layers whose inputs are the taps, whatever the config says.
    :raises HeadError: no head is there, or none that fits the target.
    """
    config = _read_config(folder)
    weights = _renamed(_read_weights(folder))
    kind = config.get("speculators_model_type")
    if kind is not None and kind not in ("eagle", "eagle3"):
        raise HeadError(f"is of the speculators type {kind!r}; eagle and eagle3 are read")
    if "fc.weight" not in weights:
        raise HeadError(f"has no fc.weight among {', '.join(sorted(weights)[:8])}, ...: it is no EAGLE head")
    is_third = "midlayer.hidden_norm.weight" in weights
    if kind is not None and is_third != (kind == "eagle3"):
        raise HeadError(f"says it is {kind!r}, and its tensors are those of EAGLE-{3 if is_third else 1}")
    more = {int(found[1]) for name in weights if (found := re.match(r"layers\.(\d+)\.", name))}
    if more:
        raise HeadError(f"has {1 + max(more)} layers, and only heads of one layer are read; choose one of these")
    files = HeadFiles(
        folder=folder,
        config=config,
        facts=dict(config.get("transformer_layer_config") or config),
        weights=weights,
        version=3 if is_third else 1,
        is_speculators=kind is not None,
    )
    files.readings = _readings(files, target, aux_layers)
    return files


def make_head(files: HeadFiles, target: Target, embedding: nn.Module, output: nn.Module) -> Eagle3Head | Eagle1Head:
    """The head as a module in the target's dtype, in evaluation mode.

    :param embedding: the target's input embedding, for a head that brings none.
    :param output: the target's output matrix.
    :raises HeadError: sizes or tensors do not fit; says which.
    """
    weights = dict(files.weights)
    ids = _target_ids(files, weights, target)
    if "lm_head.weight" not in weights:
        whole = output.state_dict()["weight"].detach()
        is_all = len(ids) == len(whole) and torch.equal(ids, torch.arange(len(whole)))
        weights["lm_head.weight"] = whole if is_all else whole[ids]  # no copy where it can be the same
    config = _head_config(files, weights, target)
    has_embedding = "embed_tokens.weight" in weights
    with torch.device("meta"):
        if files.version == 3:
            head: Eagle3Head | Eagle1Head = Eagle3Head(config, own_embedding=has_embedding)
        else:
            head = Eagle1Head(
                config,
                own_embedding=has_embedding,
                token_norm="token_norm.weight" in weights,
                feature_norm="feature_norm.weight" in weights,
                input_norm="midlayer.input_layernorm.weight" in weights,
                output_norm="norm.weight" in weights,
            )
    weights["d2t"] = ids - torch.arange(len(ids))
    if files.version == 3:
        known = torch.zeros(target.vocab_size, dtype=torch.bool)
        known[ids] = True
        weights["t2d"] = known
    if has_embedding:
        weights["embed_tokens.weight"] = _fit_embedding(weights["embed_tokens.weight"], target)
    _check_tensors(weights, head.state_dict())
    made = {name: w if w.dtype in (torch.int64, torch.bool) else w.to(target.dtype) for name, w in weights.items()}
    head.load_state_dict(made, assign=True)
    head.rotary_emb = type(head.rotary_emb)(config.rope_config())
    head.requires_grad_(False)
    if not has_embedding and embedding.state_dict()["weight"].shape[1] != config.hidden_size:
        raise HeadError(
            f"brings no embedding, and is {config.hidden_size} wide while the target's has "
            f"{embedding.state_dict()['weight'].shape[1]} values"
        )
    return head.eval()


# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------
def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise HeadError(f"has no config.json that can be read ({error})") from error
    except ValueError as error:
        raise HeadError(f"has a config.json that is not JSON ({error})") from error
    if not isinstance(config, dict):
        raise HeadError("has a config.json that is no object")
    return config


def _read_weights(folder: Path) -> dict[str, Tensor]:
    for name in _FILES:
        path = folder / name
        if not path.exists():
            continue
        try:
            if name.endswith(".safetensors"):
                from safetensors.torch import load_file

                return load_file(path)
            found = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:  # its text proposes to run what the file contains
            raise HeadError(f"has a file {name} that is no file of tensors alone, as torch.save writes") from error
        except Exception as error:  # each reader has its own
            raise HeadError(f"has a file {name} that cannot be read, perhaps cut short ({error})") from error
        if not isinstance(found, dict) or not all(isinstance(w, Tensor) for w in found.values()):
            raise HeadError(f"has a file {name} that is no table of tensors")
        return found
    raise HeadError(f"has neither {' nor '.join(_FILES)} in {folder}")


def _renamed(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if _UNREAD.search(name):
            continue
        new = name
        for old, by in _RENAMES:
            new = re.sub(old, by, new)
        if new in found:
            raise HeadError(f"has {new} twice, under two names")
        found[new] = weight
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Taps
# ---------------------------------------------------------------------------------------------------------------------
def _readings(files: HeadFiles, target: Target, aux_layers: Sequence[int] | None) -> list[tuple[int, ...]]:
    """The hidden states that the head may want, as numbers of layers that they enter."""
    count = target.num_layers
    if files.version == 1:
        return [(count,)]
    if aux_layers is not None:
        found = [tuple(aux_layers)]
    else:
        nested = files.config.get("eagle_config") or {}
        ids = nested.get("eagle_aux_hidden_state_layer_ids") or files.config.get("eagle_aux_hidden_state_layer_ids")
        if ids is None:
            found = [(2, count // 2, count - 3)]
        else:
            entering, leaving = tuple(ids), tuple(i + 1 for i in ids)
            # heads of SGLang and SpecForge list layers whose outputs they read, vLLM's those that the states enter
            found = [entering, leaving] if files.is_speculators else [leaving, entering]
    fitting = [taps for taps in found if all(isinstance(i, int) and 0 <= i <= count for i in taps) and taps]
    if not fitting:
        raise HeadError(f"reads hidden states of layers {list(found[0])}, and the target has layers 0 to {count - 1}")
    return fitting


# ---------------------------------------------------------------------------------------------------------------------
# Sizes
# ---------------------------------------------------------------------------------------------------------------------
def _head_config(files: HeadFiles, weights: Mapping[str, Tensor], target: Target) -> Eagle3Config:
    facts, config = files.facts, files.config
    fc = weights["fc.weight"]
    if fc.dim() != 2:
        raise HeadError(f"has fc.weight of shape {list(fc.shape)}")
    size = int(facts.get("hidden_size") or fc.shape[0])
    num_taps = len(files.readings[0])
    tap_size = int(config.get("target_hidden_size") or facts.get("target_hidden_size") or 0) or target.hidden_size
    if tap_size != target.hidden_size:
        raise HeadError(f"was made for a target {tap_size} wide, this one has a hidden size of {target.hidden_size}")
    wanted = 2 * size if files.version == 1 else num_taps * tap_size
    if list(fc.shape) != [size, wanted]:
        what = "embedding and feature" if files.version == 1 else f"{num_taps} taps of the target's {tap_size} values"
        raise HeadError(f"has fc.weight of shape {list(fc.shape)}; {what} need {[size, wanted]}")
    if files.version == 1 and size != target.hidden_size:
        raise HeadError(f"has a hidden size of {size}, the target one of {target.hidden_size}")
    heads = int(facts.get("num_attention_heads") or 0)
    if heads < 1:
        raise HeadError("has a config.json without num_attention_heads")
    act = str(facts.get("hidden_act", "silu"))
    norm_output = bool(config.get("norm_output", False))
    if config.get("norm_output") is False and not files.is_speculators and "norm.weight" not in weights:
        raise HeadError("has no norm in front of its output matrix (norm_output is false), which is not read")
    return Eagle3Config(
        hidden_size=size,
        target_hidden_size=tap_size,
        num_taps=num_taps,
        num_attention_heads=heads,
        num_key_value_heads=int(facts.get("num_key_value_heads") or heads),
        head_dim=int(facts.get("head_dim") or size // heads),
        intermediate_size=int(facts.get("intermediate_size") or weights["midlayer.mlp.up_proj.weight"].shape[0]),
        vocab_size=target.vocab_size,
        draft_vocab_size=int(weights["lm_head.weight"].shape[0]),
        rms_norm_eps=float(facts.get("rms_norm_eps", 1e-6)),
        rope_parameters=_rope(facts),
        max_position_embeddings=int(facts.get("max_position_embeddings") or 2048),
        hidden_act=act,
        attention_bias="midlayer.self_attn.q_proj.bias" in weights,
        mlp_bias="midlayer.mlp.up_proj.bias" in weights,
        qk_norm="midlayer.self_attn.q_norm.weight" in weights,
        fc_bias="fc.bias" in weights,
        fc_norm="fc_norm.0.weight" in weights,
        norm_before_fc="input_norm.weight" in weights,
        norm_before_residual=bool(config.get("norm_before_residual", False)),
        feeds_normed=norm_output and files.is_speculators,
    )


def _rope(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary embedding, from either generation of names."""
    rope = dict(facts.get("rope_parameters") or {})
    if not rope:
        rope = dict(facts.get("rope_scaling") or {})
        rope.setdefault("rope_type", rope.pop("type", "default"))
        rope["rope_theta"] = facts.get("rope_theta", 10000.0)
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", facts.get("rope_theta", 10000.0))
    return rope


def _target_ids(files: HeadFiles, weights: dict[str, Tensor], target: Target) -> Tensor:
    """The target's id of each id of the draft vocabulary; takes ``d2t`` and ``t2d`` out of the weights."""
    d2t, t2d = weights.pop("d2t", None), weights.pop("t2d", None)
    vocab = int(files.facts.get("vocab_size") or target.vocab_size)
    enough = target.num_tokens if target.num_tokens is not None else max(vocab, target.vocab_size)
    if vocab != target.vocab_size and min(vocab, target.vocab_size) < enough:
        raise HeadError(
            f"was made for a vocabulary of {vocab} tokens, the target has {target.vocab_size}"
            + (f" of which the tokenizer uses {target.num_tokens}" if target.num_tokens is not None else "")
        )
    rows = weights["lm_head.weight"].shape[0] if "lm_head.weight" in weights else None
    count = int(files.config.get("draft_vocab_size") or files.facts.get("draft_vocab_size") or rows or vocab)
    if rows is not None and rows != count:
        raise HeadError(f"says a draft vocabulary of {count} tokens, and its lm_head.weight has {rows} rows")
    if d2t is None:
        if count != vocab:
            raise HeadError(f"drafts {count} of {vocab} tokens and has no d2t, which says which ones")
        ids = torch.arange(count)
    else:
        if d2t.shape != (count,):
            raise HeadError(f"has d2t of shape {list(d2t.shape)} for a draft vocabulary of {count} tokens")
        ids = d2t.long() + torch.arange(count)
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size):
        if d2t is None:  # rows that only pad
            raise HeadError(f"drafts ids up to {int(ids.max())}, the target has {target.vocab_size}")
        raise HeadError(f"has d2t that leads to token {int(ids.max())}, the target has {target.vocab_size}")
    if len(torch.unique(ids)) != len(ids):
        raise HeadError("has d2t that leads to one token twice")
    if t2d is not None and count != vocab:  # with the whole vocabulary it may be a dummy
        if t2d.shape != (vocab,):
            raise HeadError(f"has t2d of shape {list(t2d.shape)} for a vocabulary of {vocab} tokens")
        marked = t2d.bool().nonzero()[:, 0]
        if not torch.equal(marked, ids.sort().values):
            raise HeadError("has d2t and t2d that do not name the same tokens")
    return ids


def _fit_embedding(weight: Tensor, target: Target) -> Tensor:
    """Rows for the whole of the target's vocabulary; those that only pad may be missing or too many."""
    missing = target.vocab_size - weight.shape[0]
    if missing > 0:
        return torch.cat([weight, weight.new_zeros((missing, *weight.shape[1:]))])
    return weight[: target.vocab_size]


def _check_tensors(weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    missing = sorted(set(expected) - set(weights))
    if missing:
        raise HeadError(f"lacks {', '.join(missing)}")
    unknown = sorted(set(weights) - set(expected))
    if unknown:
        raise HeadError(f"has tensors that are not read: {', '.join(unknown)}")
    broken = [name for name, tensor in weights.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    if broken:
        raise HeadError(f"has values that are no numbers in {', '.join(broken)}")
    for name, tensor in expected.items():
        if weights[name].shape != tensor.shape:
            raise HeadError(
                f"has {name} of shape {list(weights[name].shape)}, its config.json needs {list(tensor.shape)}"
            )

"""What the engine can do with a Hugging Face model, found out before anything is built."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from llmopt.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers.configuration_utils import PreTrainedConfig

    from llmopt.kv_cache import LayerShape

Layout = Literal["packed", "rows"]

_PACKED_LAYERS = {"full_attention", "sliding_attention", "dummy"}
_STATE_LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba"}

# Model types that prepare their decode inputs themselves, in ways the engine does not repeat.
_OWN_GENERATION = ("_sample", "_prefill", "_get_logits_processor", "_update_model_kwargs_for_generation")


@dataclass(slots=True)
class Capabilities:
    """How the engine runs a model. ``why_not`` is set when it cannot."""

    layout: Layout = "packed"  # packed: [1, T] ragged; rows: [B, 1] decodes and one [1, L] forward per prompt
    layer_types: list[str] = field(default_factory=list)  # per layer, as transformers names them
    layer_shapes: dict[int, LayerShape] = field(default_factory=dict)  # what each attention layer stores
    state_bytes: int = 0  # recurrent states of one running request, all layers
    gather: bool = False  # attention modules change keys after the cache: hand them the whole history
    kv_reach: int | None = None  # last keys that any layer sees, the query's own included; None: some layer sees all
    vocab_size: int = 0  # ids that may be in a prompt
    position_limit: int | None = None  # longest sequence the model was made for
    takes_position_ids: bool = True
    takes_logits_to_keep: bool = True
    why_not: str | None = None  # the reason for falling back to the model's own generate

    @property
    def has_states(self) -> bool:
        """Whether layers keep recurrent states, which neither chunks nor forks can split."""
        return self.layout == "rows"


def input_device(model: PreTrainedModel) -> torch.device:
    """Where the model wants its ids. accelerate's hooks know it when the weights themselves are offloaded."""
    embeddings = model.get_input_embeddings()
    device = getattr(getattr(embeddings, "_hf_hook", None), "execution_device", None)
    return torch.device(device) if device is not None else embeddings.weight.device


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """The part of the config that describes the decoder."""
    return model.config.get_text_config(decoder=True)


def inspect_model(model: PreTrainedModel) -> Capabilities:
    """Decide from class and config alone whether and how the engine can run a model."""
    found = Capabilities()
    try:
        _inspect(model, found)
    except UnsupportedModelError as error:
        found.why_not = str(error)
    return found


def _inspect(model: PreTrainedModel, found: Capabilities) -> None:
    if not isinstance(model, GenerationMixin):
        raise UnsupportedModelError(f"{type(model).__name__} cannot generate")
    config = text_config(model)
    if model.config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise UnsupportedModelError("encoder-decoder models and cross-attention are not supported by the engine")
    _check_own_generation(model)
    parameters = inspect.signature(model.forward).parameters
    found.takes_position_ids = "position_ids" in parameters
    found.takes_logits_to_keep = "logits_to_keep" in parameters
    embeddings = model.get_input_embeddings()
    found.vocab_size = int(getattr(embeddings, "num_embeddings", config.vocab_size))
    found.position_limit = _position_limit(config)
    found.layer_types = _layer_types(config)
    kinds = set(found.layer_types)
    unknown = kinds - _PACKED_LAYERS - _STATE_LAYERS
    if unknown:
        raise UnsupportedModelError(f"layers of type {', '.join(sorted(unknown))} are not supported by the engine")
    found.layout = "rows" if kinds & _STATE_LAYERS else "packed"
    if found.layout == "packed" and not model._can_set_attn_implementation():
        raise UnsupportedModelError(f"{type(model).__name__} does not go through transformers' attention interface")


def _check_own_generation(model: PreTrainedModel) -> None:
    cls = type(model)
    if cls.generate is not GenerationMixin.generate:
        raise UnsupportedModelError(f"{cls.__name__} has its own generate")
    own = vars(model).get("generate")
    if own is not None and not type(own).__module__.startswith("llmopt."):  # `llmopt.accelerate` puts ours there
        raise UnsupportedModelError("the checkpoint brings its own generate")
    for name in _OWN_GENERATION:
        if getattr(cls, name, None) is not getattr(GenerationMixin, name, None):
            raise UnsupportedModelError(f"{cls.__name__} overrides {name} of transformers' generate")
    if not cls._supports_default_dynamic_cache():
        raise UnsupportedModelError(f"{cls.__name__} does not work with transformers' dynamic cache")


def _layer_types(config: PreTrainedConfig) -> list[str]:
    try:
        types, _ = get_layer_types_and_kwargs(config)
    except Exception as error:
        raise UnsupportedModelError(f"its layer types cannot be read from the config ({error})") from error
    return [str(t) for t in types]


def _position_limit(config: PreTrainedConfig) -> int | None:
    """Longest sequence, or None when the config names none.

    Rotary embeddings of type "dynamic" and "longrope" depend on the longest sequence of a batch once it passes the
    original length; up to there rows are independent, so the engine stops there.
    """
    limit = next(
        (v for n in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length")
         if isinstance(v := getattr(config, n, None), int) and v > 0),
        None,
    )  # fmt: skip
    rope: Any = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    scalings = [rope, *(v for v in rope.values() if isinstance(v, dict))] if isinstance(rope, dict) else []
    for scaling in scalings:
        kind = scaling.get("rope_type", scaling.get("type", "default")) or "default"
        if "dynamic" in kind or kind == "longrope":
            original = scaling.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            if original:
                limit = min(limit or original, int(original))
    return limit

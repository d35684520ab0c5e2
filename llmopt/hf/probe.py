"""A short forward while a pipeline is built, to learn what each layer stores and how it calls attention."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from transformers.cache_utils import get_layer_types_and_kwargs

from llmopt.errors import UnsupportedModelError
from llmopt.hf.attention import AttentionSwitch
from llmopt.hf.cache import EngineCache
from llmopt.hf.capabilities import input_device, text_config
from llmopt.hf.probe_step import ProbeStep
from llmopt.hf.rows import RowStates

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmopt.hf.capabilities import Capabilities
    from llmopt.kv_cache import LayerShape

logger = logging.getLogger("llmopt")

_MAX_POSITIONS = 1 << 20  # masks are compared up to here

# Tensors that `generate` gives every model.
_PREPARED = {"input_ids", "attention_mask", "position_ids", "cache_position"}


def random_ids(model: PreTrainedModel, vocab_size: int, count: int, seed: int) -> np.ndarray:
    """Random ids that stand for text, not for images and the like."""
    special = {v for k, v in vars(model.config).items() if k.endswith("token_id") and isinstance(v, int)}
    ids = np.random.default_rng(seed).integers(0, vocab_size, size=4 * count)
    kept = [int(i) for i in ids if int(i) not in special]
    return np.array(kept[:count], dtype=np.int64)


@torch.no_grad()
def probe_layers(
    model: PreTrainedModel,
    capabilities: Capabilities,
    *,
    weights_unread: bool = False,
    known: Mapping[int, LayerShape] | None = None,
) -> None:
    """Run three tokens and record what each layer stores, and whether it changes keys after the cache.

    :param weights_unread: run them on shapes alone, so that no weight is read. A model whose forward depends on values
        (a router that picks experts) runs with its weights all the same.
    :param known: what each layer of a packed layout stores, from somebody who knows the model; nothing is run then.
    :raises UnsupportedModelError: the model calls attention or the cache in a way that the engine does not know.
    """
    device = input_device(model)
    inputs: dict[str, Any] = {
        "input_ids": torch.from_numpy(random_ids(model, capabilities.vocab_size, 3, seed=0)).to(device)[None]
    }
    if capabilities.takes_position_ids:
        inputs["position_ids"] = torch.arange(3, device=device)[None]
    _check_prepared_inputs(model, EngineCache(text_config(model), _new_step(model, capabilities)), inputs)
    if known and capabilities.layout == "packed":
        capabilities.layer_shapes = dict(known)
        capabilities.kv_reach = _reach(model, capabilities)
        return
    found: tuple[ProbeStep, int] | None = None
    if weights_unread:
        try:
            found = _run(model, capabilities, inputs, on_shapes=True)
        except UnsupportedModelError as error:
            logger.debug("the probe runs with weights, because on shapes alone %s", error)
    step, state_bytes = found or _run(model, capabilities, inputs, on_shapes=False)
    capabilities.layer_shapes = step.shapes
    capabilities.gather = step.gather
    capabilities.state_bytes = state_bytes
    capabilities.kv_reach = _reach(model, capabilities)
    if capabilities.layout == "packed" and not step.shapes:
        raise UnsupportedModelError("its layers do not store keys and values in the cache they are given")
    if capabilities.layout == "rows" and not capabilities.state_bytes:
        raise UnsupportedModelError("its layers do not store their states in the cache they are given")
    if step.shapes and step.num_attention_calls == 0:
        raise UnsupportedModelError("its layers do not call the attention function that its config names")


def _windows(model: PreTrainedModel) -> dict[int, int]:
    """Layer index -> how many tokens transformers' cache keeps of it, for layers that keep a window."""
    _, details = get_layer_types_and_kwargs(text_config(model))
    return {layer: d["sliding_window"] for layer, d in enumerate(details) if d.get("sliding_window")}


def _reach(model: PreTrainedModel, capabilities: Capabilities) -> int | None:
    """What `Capabilities.kv_reach` says. Attention was compared with these windows by the forward on `ProbeStep`."""
    windows = [_windows(model).get(layer) for layer in capabilities.layer_shapes]
    if capabilities.gather or capabilities.layout != "packed" or not windows:
        return None
    found = [window for window in windows if window is not None]
    return max(found) if len(found) == len(windows) else None


def _new_step(model: PreTrainedModel, capabilities: Capabilities) -> ProbeStep:
    num_positions = min(capabilities.position_limit or _MAX_POSITIONS, _MAX_POSITIONS)
    return ProbeStep(_windows(model), num_positions)


def _run(
    model: PreTrainedModel, capabilities: Capabilities, inputs: dict[str, Any], *, on_shapes: bool
) -> tuple[ProbeStep, int]:
    """One forward: what the layers did, and the bytes of their states."""
    step = _new_step(model, capabilities)
    cache = EngineCache(text_config(model), step)
    states = RowStates(model, cache)
    switch = AttentionSwitch(model)
    try:
        with switch(step), states.forward([0], is_prompt=True):
            if on_shapes:
                _forward_on_shapes(model, inputs, cache)
            else:
                model(**inputs, cache=cache, use_cache=True, return_dict=True)
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"its forward fails with the engine's cache ({type(error).__name__}: {error})"
        ) from error
    finally:
        switch.close()
    if on_shapes:
        device = input_device(model)
        step.shapes = {layer: replace(shape, device=device) for layer, shape in step.shapes.items()}
    return step, states.num_bytes()


def _forward_on_shapes(model: PreTrainedModel, inputs: dict[str, Any], cache: EngineCache) -> None:
    """The forward with tensors that have shape and dtype and no memory. Module hooks of the model do not run."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
    given = {name: tensor.to("meta") for name, tensor in inputs.items()}
    hooks, model._forward_pre_hooks = model._forward_pre_hooks, OrderedDict()
    try:
        functional_call(model, shapes, kwargs={**given, "cache": cache, "use_cache": True, "return_dict": True})
    finally:
        model._forward_pre_hooks = hooks


def _check_prepared_inputs(model: Any, cache: EngineCache, inputs: dict[str, Any]) -> None:
    """Raise for a model whose `generate` gives its forward more or other inputs than the engine: no forward shows that.

    The inputs are a prompt; its last token stands for a decode.
    """
    name = f"prepare_inputs_for_generation of {type(model).__name__}"
    ids, positions = inputs["input_ids"], inputs.get("position_ids")
    mask = torch.ones_like(ids)
    for length in (ids.shape[1], 1):
        is_prompt = length > 1
        given = {"input_ids": ids[:, -length:], "attention_mask": mask}
        if positions is not None:
            given["position_ids"] = positions[:, -length:]
        try:
            prepared = model.prepare_inputs_for_generation(
                ids,
                next_sequence_length=None if is_prompt else length,
                **{k: v for k, v in given.items() if k != "input_ids"},
                cache=cache,
                use_cache=True,
                is_first_iteration=is_prompt,
            )
        except Exception as error:
            raise UnsupportedModelError(f"{name} fails ({type(error).__name__}: {error})") from error
        used = prepared.get("position_ids")
        if positions is not None and used is not None and not torch.equal(used, given["position_ids"]):
            raise UnsupportedModelError(f"{type(model).__name__} changes the positions that generate gives it")
        if not isinstance(prepared.get("input_ids"), Tensor) or not torch.equal(
            prepared["input_ids"], given["input_ids"]
        ):
            raise UnsupportedModelError(f"{name} changes the ids that generate gives it")
        used = prepared.get("attention_mask")
        if isinstance(used, Tensor) and used.dim() == 2 and not torch.equal(used.long(), mask):
            raise UnsupportedModelError(f"{name} changes the mask that generate gives it")
        added = [k for k, v in prepared.items() if isinstance(v, Tensor) and k not in _PREPARED]
        if added:
            raise UnsupportedModelError(f"{name} adds {', '.join(added)}, which the engine does not make")

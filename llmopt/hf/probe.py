"""Two short forwards while a pipeline is built: one to learn what layers store, one to see that the engine is right."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import get_layer_types_and_kwargs

from llmopt.errors import UnsupportedModelError
from llmopt.hf.attention import AttentionSwitch
from llmopt.hf.cache import EngineCache
from llmopt.hf.capabilities import input_device, text_config
from llmopt.hf.rows import RowStates
from llmopt.hf.step import ProbeStep
from llmopt.request import Request, RequestStatus, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmopt.hf.capabilities import Capabilities
    from llmopt.pipeline import InferencePipeline

_MAX_POSITIONS = 1 << 20  # masks are compared up to here
# Relative error of logits that the engine may show: rounding in another order, nothing more.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


def _ids(model: PreTrainedModel, vocab_size: int, count: int, seed: int) -> np.ndarray:
    """Random ids that stand for text, not for images and the like."""
    special = {v for k, v in vars(model.config).items() if k.endswith("token_id") and isinstance(v, int)}
    ids = np.random.default_rng(seed).integers(0, vocab_size, size=4 * count)
    kept = [int(i) for i in ids if int(i) not in special]
    return np.array(kept[:count], dtype=np.int64)


@torch.no_grad()
def probe_layers(model: PreTrainedModel, capabilities: Capabilities) -> None:
    """Run three tokens and record what each layer stores, and whether it changes keys after the cache.

    :raises UnsupportedModelError: the model calls attention or the cache in a way that the engine does not know.
    """
    num_positions = min(capabilities.position_limit or _MAX_POSITIONS, _MAX_POSITIONS)
    _, details = get_layer_types_and_kwargs(text_config(model))
    windows = {layer: d["sliding_window"] for layer, d in enumerate(details) if d.get("sliding_window")}
    step = ProbeStep(windows, num_positions)
    device = input_device(model)
    inputs: dict[str, Any] = {
        "input_ids": torch.from_numpy(_ids(model, capabilities.vocab_size, 3, 0)).to(device)[None]
    }
    if capabilities.takes_position_ids:
        inputs["position_ids"] = torch.arange(3, device=device)[None]
    switch = AttentionSwitch(model)
    cache = EngineCache(text_config(model), step)
    _check_positions(model, cache, inputs)
    states = RowStates(model, cache)
    try:
        with switch(step), states.forward([0], is_prompt=True):
            model(**inputs, cache=cache, use_cache=True, return_dict=True)
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"its forward fails with the engine's cache ({type(error).__name__}: {error})"
        ) from error
    finally:
        switch.close()
    capabilities.layer_shapes = step.shapes
    capabilities.gather = step.gather
    capabilities.state_bytes = states.num_bytes()
    if capabilities.layout == "packed" and not step.shapes:
        raise UnsupportedModelError("its layers do not store keys and values in the cache they are given")
    if capabilities.layout == "rows" and not capabilities.state_bytes:
        raise UnsupportedModelError("its layers do not store their states in the cache they are given")
    if step.shapes and step.num_attention_calls == 0:
        raise UnsupportedModelError("its layers do not call the attention function that its config names")


def _check_positions(model: Any, cache: EngineCache, inputs: dict[str, Any]) -> None:
    """Raise for a model whose `generate` gives its forward other positions than 0, 1, 2, ...: no forward shows that."""
    given = inputs.get("position_ids")
    prepared = model.prepare_inputs_for_generation(
        inputs["input_ids"],
        position_ids=given,
        attention_mask=None,
        cache=cache,
        use_cache=True,
        is_first_iteration=False,
    )
    used = prepared.get("position_ids")
    if given is not None and used is not None and not torch.equal(used, given):
        raise UnsupportedModelError(f"{type(model).__name__} changes the positions that generate gives it")


@torch.no_grad()
def self_test(pipeline: InferencePipeline) -> str | None:
    """Compare the engine's logits with the model's plain forward on two ragged prompts.

    Prefills one prompt, then decodes it while the other arrives. Returns the reason for not using the engine, or None.
    """
    model, capabilities = pipeline.model, pipeline.capabilities
    length = min(7, pipeline.max_model_len - 2)
    if length < 2:
        return None
    prompts = [_ids(model, capabilities.vocab_size, n, n) for n in (length, max(2, length - 3))]
    requests = [
        Request(f"self-test-{i}", p.tolist(), SamplingParams(), max_len=len(p), wants_text=False)
        for i, p in enumerate(prompts)
    ]
    first, second = requests
    first.num_tokens = length - 1  # the last token comes as a decode
    wanted = {r: _plain_logits(model, p) for r, p in zip(requests, prompts, strict=True)}
    got: dict[Request, Tensor] = {}
    training = model.training
    try:
        model.eval()
        for present in ([first], [first, second]):
            for request in present:
                if request.status is RequestStatus.WAITING:
                    pipeline.queue.add(request)
            while any(r.num_computed_tokens < r.num_tokens for r in present):  # a small budget takes several steps
                batch = pipeline.schedule(pipeline.queue)
                if batch is None and len(present) == 2 and first.num_computed_tokens == length:
                    pipeline.queue.remove(first)  # a pool for one request: the other takes its place
                    pipeline.allocate.free(first)
                    present = [second]
                    continue
                if batch is None:
                    return "the scheduler does not start the self-test's requests"
                logits = pipeline.execute(batch, None)
                for row, request in enumerate(batch.logits_requests):
                    got[request] = logits[row].clone()
                for request, count in zip(batch.requests, batch.num_scheduled.tolist(), strict=True):
                    request.num_computed_tokens += count
            first.num_tokens = length
    except Exception as error:
        return f"its self-test fails ({type(error).__name__}: {error})"
    finally:
        model.train(training)
        for request in requests:
            pipeline.queue.remove(request)
            pipeline.allocate.free(request)
            request.finish("abort")
    tolerance = _TOLERANCE.get(model.dtype, 0.1)
    for request in requests:
        if request not in got:
            return "the scheduler does not finish the self-test's prompts"
        expected = wanted[request]
        distance = float((got[request] - expected).norm() / expected.norm().clamp_min(1e-6))
        if not distance <= tolerance:
            return f"its logits differ from the plain forward's by {distance:.2g} of their size in the self-test"
    return None


def _plain_logits(model: PreTrainedModel, ids: np.ndarray) -> Tensor:
    """Logits after the last id, from the model alone: ``[vocab]`` float32."""
    device = input_device(model)
    training = model.training
    model.eval()
    try:
        inputs = {"input_ids": torch.from_numpy(ids).to(device)[None]}
        parameters = inspect.signature(model.forward).parameters
        if "attention_mask" in parameters:
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        if "position_ids" in parameters:  # `generate` gives them; by itself a model may count otherwise
            inputs["position_ids"] = torch.arange(len(ids), device=device)[None]
        output = model(**inputs, use_cache=False, return_dict=True)
    finally:
        model.train(training)
    logits: Tensor = output.logits[0, -1].float()
    return logits

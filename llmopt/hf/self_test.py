"""Two short prompts while a pipeline is built: does the engine compute what the model computes by itself?"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from llmopt.batch import BestTokens
from llmopt.errors import PluginUnavailableError
from llmopt.hf.capabilities import input_device
from llmopt.hf.executor import HfExecute
from llmopt.hf.probe import random_ids
from llmopt.plugin_info import info_of
from llmopt.request import Request, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmopt.pipeline import InferencePipeline
    from llmopt.stages import Execute

# Relative error of logits that the engine may show: rounding in another order, nothing more.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
_QUANTIZED_TOLERANCE = 0.5  # with keys and values in 8 bits, whose loss shows most on random ids


@torch.no_grad()
def self_test(pipeline: InferencePipeline, *, weights_unread: bool = False) -> str | None:
    """Compare logits with the model's plain forward: first the baseline executor, then the plugins' in its place.

    :param weights_unread: leave out what would read the model's own weights. The plugins' executor runs, and its
        logits only have to be finite.
    :returns: the reason for not using the engine with this model, or None.
    :raises PluginUnavailableError: a plugin fails, or promises exact output and gives other logits.
    """
    model, capabilities = pipeline.model, pipeline.capabilities
    prompts = _prompts(pipeline)
    if not prompts:
        return None
    if weights_unread:
        _run_plugins(pipeline, prompts)
        pipeline.notes.append("the self-test compared nothing with the model's own forward, which would read weights")
        return None
    training = model.training
    model.eval()
    try:
        expected = [_plain_logits(model, p) for p in prompts]
        plain = pipeline.baseline
        owners = {o for s in ("execute", "attend") for o in pipeline.registry.chains[s].owners} - {"baseline"}
        execute: Execute = plain.execute
        if owners:  # the baseline's own executor calls the plugins' attention
            execute = HfExecute(model, capabilities, pipeline.kv_cache, plain.attend)
        try:
            distance = _distance(expected, _engine_logits(pipeline, execute, prompts))
        except Exception as error:
            return f"its self-test fails ({type(error).__name__}: {error})"
        tolerance = _TOLERANCE.get(model.dtype, 0.1)
        if any(shape.is_quantized for shape in capabilities.layer_shapes.values()):
            tolerance = max(tolerance, _QUANTIZED_TOLERANCE)
        if not distance <= tolerance:
            return f"its logits differ from the plain forward's by {distance:.2g} of their size in the self-test"
        if owners:
            _test_plugins(pipeline, owners, prompts, expected, tolerance)
        return None
    finally:
        model.train(training)


def _run_plugins(pipeline: InferencePipeline, prompts: list[np.ndarray]) -> None:
    chain = pipeline.registry.chains["execute"]
    found = _plugin_logits(pipeline, set(chain.plugins), prompts)
    if not all(bool(logits.isfinite().all()) for logits in found):
        names = " and ".join(map(repr, sorted(chain.plugins)))
        raise PluginUnavailableError(
            f"plugin {names} gives logits that are not finite in the self-test. Remove it from plugins=[...]."
        )


def _plugin_logits(pipeline: InferencePipeline, owners: set[str], prompts: list[np.ndarray]) -> list[Tensor]:
    try:
        return _engine_logits(pipeline, pipeline.execute, prompts)
    except Exception as error:
        _, blamed = pipeline.registry.blame(error)
        names = " and ".join(map(repr, sorted(owners))) if blamed == "baseline" else repr(blamed)
        raise PluginUnavailableError(
            f"plugin {names} fails the self-test with this model: {type(error).__name__}: {error}. "
            "Remove it from plugins=[...]."
        ) from error


def _test_plugins(
    pipeline: InferencePipeline, owners: set[str], prompts: list[np.ndarray], expected: list[Tensor], tolerance: float
) -> None:
    names = " and ".join(map(repr, sorted(owners)))
    distance = _distance(expected, _plugin_logits(pipeline, owners, prompts))
    infos = [info_of(plugin) for plugin in pipeline.registry.plugins]
    # a lossy plugin may stand in no stage itself and configure the one that it requires
    is_lossy = any(i.promise == "lossy" and (i.name in owners or owners & set(i.requires)) for i in infos)
    if not is_lossy and not distance <= tolerance:
        raise PluginUnavailableError(
            f"plugin {names} promises exact output, and logits differ from the plain forward's by {distance:.2g} of "
            "their size in the self-test. Remove it from plugins=[...]."
        )


def _prompts(pipeline: InferencePipeline) -> list[np.ndarray]:
    """Two ragged prompts, one where the pool or the slots hold only one request, none where nothing fits."""
    pool, vocab_size = pipeline.block_pool, pipeline.capabilities.vocab_size
    length = min(7, pipeline.max_model_len - 2)
    if length < 2:
        return []
    prompts = [random_ids(pipeline.model, vocab_size, n, seed=n) for n in (length, max(2, length - 3))]
    fit_together = sum(pool.num_blocks_for(len(p)) for p in prompts) <= pool.num_blocks
    return prompts if fit_together and len(pipeline.queue.free_slots) >= 2 else prompts[:1]


def _engine_logits(pipeline: InferencePipeline, execute: Execute, prompts: list[np.ndarray]) -> list[Tensor]:
    """Logits after the last id of each prompt.

    The first prompt is computed but for its last id, which comes as a decode while the other prompt arrives.
    """
    pool = pipeline.block_pool
    requests = [
        Request(f"self-test-{i}", p.tolist(), SamplingParams(), max_len=len(p), wants_text=False)
        for i, p in enumerate(prompts)
    ]
    steps = [{requests[0]: len(prompts[0]) - 1}, {requests[0]: 1}]
    if len(requests) == 2:
        steps[1] = {requests[0]: 1, requests[1]: len(prompts[1])}
    found: dict[Request, Tensor] = {}
    try:
        for slot, request in enumerate(requests):
            request.slot = pipeline.queue.free_slots[-1 - slot]
            request.block_table.extend(pool.allocate(pool.num_blocks_for(request.num_tokens)))
        for step in steps:
            batch = pipeline.batch_builder.build(list(step), list(step.values()))
            batch.wants_best = False
            logits = execute(batch, None)
            if isinstance(logits, BestTokens):
                raise TypeError("execute returned BestTokens for a batch that wants logits")
            for row, request in enumerate(batch.logits_requests):
                found[request] = logits[row].clone()
            for request, count in step.items():
                request.num_computed_tokens += count
    finally:
        for request in requests:
            pool.free(request.block_table)
    return [found[r] for r in requests]


def _distance(expected: list[Tensor], found: list[Tensor]) -> float:
    """The largest difference of a row, as a share of its size."""
    pairs = zip(expected, found, strict=True)
    return max(float((b.to(a) - a).norm() / a.norm().clamp_min(1e-6)) for a, b in pairs)


def _plain_logits(model: PreTrainedModel, ids: np.ndarray) -> Tensor:
    """Logits after the last id, from the model alone: ``[vocab]`` float32."""
    device = input_device(model)
    inputs = {"input_ids": torch.from_numpy(ids).to(device)[None]}
    parameters = inspect.signature(model.forward).parameters
    if "attention_mask" in parameters:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if "position_ids" in parameters:  # `generate` gives them; by itself a model may count otherwise
        inputs["position_ids"] = torch.arange(len(ids), device=device)[None]
    logits: Tensor = model(**inputs, use_cache=False, return_dict=True).logits[0, -1].float()
    return logits

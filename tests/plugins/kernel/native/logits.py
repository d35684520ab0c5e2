"""Logits at every position, from a pipeline and from a model, and how far apart they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from llmopt.pipeline import InferencePipeline
from llmopt.request import Request, SamplingParams

_GROUP = 32  # values of an input that share a scale


def pipeline_logits(pipe: InferencePipeline, ids: list[int], chunk: int) -> Tensor:
    """``[len(ids), vocab]`` by steps of so many tokens."""
    request = Request("logits", ids, SamplingParams(), max_len=len(ids), wants_text=False)
    request.slot = pipe.queue.free_slots[-1]
    request.block_table.extend(pipe.block_pool.allocate(pipe.block_pool.num_blocks_for(len(ids))))
    found = []
    try:
        for begin in range(0, len(ids), chunk):
            count = min(chunk, len(ids) - begin)
            batch = pipe.batch_builder.build([request], [count])
            batch.wants_best, batch.logits_indices = False, np.arange(count)
            logits: Any = pipe.execute(batch, None)
            found.append(logits[:count].clone())
            request.num_computed_tokens += count
    finally:
        pipe.block_pool.free(request.block_table)
    return torch.cat(found)


@torch.no_grad()
def model_logits(model: Any, ids: list[int], *, int8_inputs: bool = False) -> Tensor:
    """``[len(ids), vocab]`` in one forward.

    :param int8_inputs: round the inputs of every matrix to 8 bits, with one scale per 32 values.
    """
    hooks = []
    if int8_inputs:
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        hooks = [module.register_forward_pre_hook(lambda _, args: (_rounded(args[0]),)) for module in linears]
    try:
        logits: Tensor = model(torch.tensor([ids])).logits[0].float()
    finally:
        for hook in hooks:
            hook.remove()
    return logits


def _rounded(x: Tensor) -> Tensor:
    groups = x.reshape(*x.shape[:-1], -1, _GROUP)
    scale = (groups.abs().amax(-1, keepdim=True) / 127).clamp_min(1e-30)
    return ((groups / scale).round() * scale).reshape(x.shape)


def mean_kl(wanted: Tensor, found: Tensor) -> float:
    """Mean divergence of the distributions of the next token, in nats."""
    p, q = torch.log_softmax(wanted, -1), torch.log_softmax(found, -1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def relative_error(wanted: Tensor, found: Tensor) -> float:
    """Mean over positions of the size of the difference, as a share of the logits' size."""
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).mean())

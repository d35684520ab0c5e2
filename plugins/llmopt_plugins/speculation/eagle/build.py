"""Putting the drafter together: the head beside the target, its blocks, the controller, and the choice of taps."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from llmopt import native
from llmopt.block_pool import BlockPool
from llmopt.kv_cache import KVCache, LayerShape
from llmopt.threads import num_native_threads
from llmopt_plugins.speculation.eagle.checkpoint import HeadFiles, make_head, target_of
from llmopt_plugins.speculation.eagle.drafter import EagleDrafter
from llmopt_plugins.speculation.eagle.level import RunHead
from llmopt_plugins.speculation.eagle.self_check import agreement, teach
from llmopt_plugins.speculation.goodput import Goodput
from llmopt_plugins.speculation.propose import DraftPropose

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from llmopt.build_context import BuildContext
    from llmopt.config import PipelineConfig
    from llmopt.pipeline import InferencePipeline
    from llmopt.stages import Propose
    from llmopt_plugins.speculation.eagle.model import Eagle3Head
    from llmopt_plugins.speculation.eagle.model1 import Eagle1Head

logger = logging.getLogger("llmopt")

_MAX_TOKENS = 131_072  # that the head's cache holds; requests past them are not drafted for
_PRIOR = 0.45  # chance of a draft, before any was seen


@dataclass(slots=True)
class Parts:
    """What the stages of one pipeline share."""

    drafter: EagleDrafter
    goodput: Goodput
    readings: list[list[int]]  # places among the hidden states of a batch, for each way to read the config
    about: str  # one line for `describe`
    agreement: float | None = None  # of the self-check


class EaglePropose(DraftPropose):
    """`DraftPropose`, which also says how the head is run, and closes it."""

    def __init__(self, inner: Propose, parts: Parts, max_num_draft: int, vocab_size: int) -> None:
        super().__init__(inner, parts.drafter, parts.goodput, max_num_draft, vocab_size)
        self.parts = parts

    def describe(self) -> str:
        checked = "" if self.parts.agreement is None else f"; names {self.parts.agreement:.0%} of the model's tokens"
        return self.parts.about + checked

    def stats(self) -> dict[str, Any]:
        return {**super().stats(), "agreement": self.parts.agreement}

    def close(self) -> None:
        self.parts.drafter.close()


def bytes_to_hold(files: HeadFiles, model: PreTrainedModel) -> int:
    """Bytes of the head, packed as well, and of its cache, at most."""
    weights = sum(weight.numel() for weight in files.weights.values()) * 2 * max(2, model.dtype.itemsize)
    facts = files.facts
    heads = int(facts.get("num_key_value_heads") or facts.get("num_attention_heads") or 1)
    dim = int(
        facts.get("head_dim") or int(facts.get("hidden_size") or 64) // int(facts.get("num_attention_heads") or 1)
    )
    return int(weights + _MAX_TOKENS * 2 * heads * dim * model.dtype.itemsize)


def make_parts(
    files: HeadFiles,
    context: BuildContext,
    config: PipelineConfig,
    *,
    num_draft: int,
    depth: int,
    width: int,
    bits: int | None,
    fixed: int | None,
) -> Parts:
    """Everything that drafts.

    :raises HeadError: the head does not fit the model.
    """
    model = context.model
    assert context.block_pool is not None
    target = target_of(model, context.tokenizer)
    embedding: nn.Module = model.get_input_embeddings()
    head = make_head(files, target, embedding, model.get_output_embeddings())
    size = context.block_pool.block_size
    most = min(context.block_pool.num_blocks, -(-_MAX_TOKENS // size))
    pool = BlockPool(max(most, -(-(context.max_model_len + width * depth) // size)), size)
    run, about = _run_head(head, context, config, pool, bits, context.max_model_len + depth)
    readings = [[context.hidden_layers.index(layer) for layer in taps] for taps in files.readings]
    drafter = EagleDrafter(run, readings[0], pool, width=width, depth=depth)
    context.cost_model.wanted()
    goodput = Goodput(context.cost_model, drafter.draft_s, num_draft, priors=(_PRIOR,), fixed=fixed)
    drafter.price = goodput.price
    vocab = f"{head.config.draft_vocab_size} of {target.vocab_size} tokens"
    return Parts(drafter, goodput, readings, f"EAGLE-{files.version} head, {vocab}, {about}")


def _run_head(
    head: Eagle3Head | Eagle1Head,
    context: BuildContext,
    config: PipelineConfig,
    pool: BlockPool,
    bits: int | None,
    num_positions: int,
) -> tuple[RunHead, str]:
    """The head in C++ where the target runs there and the head can, else in torch."""
    facts = head.config
    device = context.model.device
    shape = LayerShape(
        facts.num_key_value_heads, facts.head_dim, facts.num_key_value_heads, facts.head_dim,
        context.model.dtype, device,
    )  # fmt: skip
    kv_cache = KVCache({0: shape}, pool.num_blocks, pool.block_size)
    packed = _packed_target(context)
    if packed is not None and native.core() is not None and shape.dtype in (torch.float32, torch.bfloat16):
        from llmopt_plugins.speculation.eagle.native_head import NativeHead, why_not_native

        reason = why_not_native(facts)
        if reason is None:
            assert context.machine is not None
            kernel = replace(config.kernel, weight_bits=bits, head_bits=None, weight_group_size=0)
            run = NativeHead(
                head, packed, getattr(context.model.get_output_embeddings(), "weight", None), kv_cache, kernel,
                num_native_threads(None, context.machine.num_threads), num_positions,
            )  # fmt: skip
            return run, f"{run.num_bytes / 1e6:.1f} MB packed{' in 8 bits' if bits else ''}"
        logger.info("eagle: the head runs in torch, because %s.", reason)
    from llmopt_plugins.speculation.eagle.torch_head import TorchHead

    return TorchHead(head.to(device), context.model.get_input_embeddings(), kv_cache), "in torch"


def _packed_target(context: BuildContext) -> Any:
    """The packed weights of a target that runs natively; None elsewhere."""
    inner = context.stages.execute
    while inner is not None:
        packed = getattr(inner, "packed", None)
        if packed is not None:
            return packed
        inner = vars(inner).get("inner") if hasattr(inner, "__dict__") else None
    return None


def check_taps(pipeline: InferencePipeline, parts: Parts, files: HeadFiles) -> float | None:
    """Read the taps in the way in which the head agrees best with its target.

    :returns: the share of the target's tokens that it names; None where there is no room for the check.
    """
    teaching = teach(pipeline)
    if teaching is None:
        return None
    drafter = parts.drafter
    found = [agreement(teaching, drafter.head, taps, drafter.pool) for taps in parts.readings]
    best = max(range(len(found)), key=found.__getitem__)
    drafter.read(parts.readings[best])
    parts.agreement = found[best]
    if best > 0 and found[best] > found[0]:
        pipeline.notes.append(
            f"the layers in the head's config are read as {files.readings[best]}: so it names {found[best]:.0%} of the "
            f"model's tokens, with {files.readings[0]} {found[0]:.0%}"
        )
    return parts.agreement

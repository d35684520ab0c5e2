"""Does a head guess what its target says? A short greedy text of the target, shown to the head pair by pair.

A head that reads the wrong hidden states still drafts, every draft is verified, and nothing looks wrong but the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from llmopt.batch import BestTokens
from llmopt.request import Request, SamplingParams
from llmopt_plugins.speculation.eagle.level import Level, RunHead

if TYPE_CHECKING:
    from llmopt.block_pool import BlockPool
    from llmopt.pipeline import InferencePipeline

NUM_TOKENS = 64
_TEXT = "Explain in a few sentences how rain forms, and give an example of a country where it rains a lot."


@dataclass(slots=True)
class Teaching:
    """A sequence of the target and its hidden states."""

    token_ids: list[int]
    num_prompt_tokens: int
    hidden: Tensor  # [len(token_ids) - 1, layers, hidden_size]


@torch.no_grad()
def teach(pipeline: InferencePipeline, num_tokens: int = NUM_TOKENS) -> Teaching | None:
    """Let the target go on greedily from a prompt; None where the pool is too small for that."""
    prompt = check_prompt(pipeline)
    count = min(num_tokens, pipeline.max_model_len - len(prompt) - 1)
    pool, queue, builder = pipeline.block_pool, pipeline.queue, pipeline.batch_builder
    if count < 8 or pool.num_blocks_for(len(prompt) + count) > pool.num_free or not queue.free_slots:
        return None
    request = Request("self-check", list(prompt), SamplingParams(), max_len=len(prompt) + count + 1, wants_text=False)
    request.slot = queue.free_slots[-1]
    request.block_table.extend(pool.allocate(pool.num_blocks_for(len(prompt) + count)))
    hidden: list[Tensor] = []
    try:
        for _ in range(count):
            batch = builder.build([request], [request.num_tokens - request.num_computed_tokens])
            batch.wants_hidden = True
            logits = pipeline.execute(batch, None)
            assert batch.hidden is not None
            hidden.append(batch.hidden.float().cpu().clone())
            token = logits.token_ids[0] if isinstance(logits, BestTokens) else int(logits[0].argmax())
            request.num_computed_tokens = request.num_tokens
            request.append(token)
    finally:
        pool.free(request.block_table)
    return Teaching(request.token_ids[: request.num_tokens].tolist(), len(prompt), torch.cat(hidden))


def agreement(teaching: Teaching, head: RunHead, taps: Sequence[int], pool: BlockPool) -> float:
    """The share of the target's own tokens that the head's first guess names, shown all true pairs before.

    :param taps: places among the teaching's hidden states.
    :param pool: blocks of the head's cache.
    """
    ids = np.array(teaching.token_ids, dtype=np.int64)
    num_pairs = len(ids) - 2  # those whose guess can be judged
    first = teaching.num_prompt_tokens - 2  # guesses the first token that the target chose
    blocks = pool.allocate(pool.num_blocks_for(num_pairs))
    try:
        places = np.arange(num_pairs, dtype=np.int64)
        numbers, offsets = np.divmod(places, pool.block_size)
        level = Level(
            block_tables=np.array([blocks], dtype=np.int32),
            seq_lens=np.array([num_pairs], dtype=np.int32),
            cu_seqlens_q=np.array([0, num_pairs], dtype=np.int32),
            slot_mapping=np.array(blocks, dtype=np.int64)[numbers] * pool.block_size + offsets,
            token_ids=ids[1:-1].copy(),
            positions=places,
            logits_indices=places[max(0, first) :].copy(),
        )
        guesses = head(level, teaching.hidden[:num_pairs, list(taps)], 1, are_features=True)
    finally:
        pool.free(blocks)
    assert guesses is not None
    return float((guesses.token_ids[:, 0] == ids[max(0, first) + 2 :]).mean())


def check_prompt(pipeline: InferencePipeline) -> list[int]:
    """What the target is asked to go on from."""
    tokenizer = pipeline.tokenizer
    if tokenizer is None:
        return [int(i) for i in np.random.default_rng(0).integers(3, max(4, pipeline.capabilities.vocab_size), 8)]
    if getattr(tokenizer, "chat_template", None):
        return pipeline.tokenize([{"role": "user", "content": _TEXT}])
    return pipeline.tokenize(_TEXT)

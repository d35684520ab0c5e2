"""What weights of fewer bits cost: distance from the float32 model over a text, position by position.

Every engine computes the logits of all positions of the same ids, window by window, with the text itself as input
(teacher forcing). Reported are the mean Kullback-Leibler divergence from the float32 model's distribution, and how much
the perplexity of the text moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from llmopt.batch import BestTokens
from llmopt.errors import RequestError
from llmopt.request import Request, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from llmopt.bench.contenders import Contender
    from llmopt.pipeline import InferencePipeline

WINDOW = 512  # ids per window; each begins with nothing before it
_ROWS = 128  # positions that are compared at once: the vocabulary is large


@dataclass(slots=True)
class Quality:
    """Sums over positions, and the figures that follow from them."""

    num_positions: int = 0
    num_followed: int = 0  # positions with a next token, which perplexity is about
    kl_sum: float = 0.0
    loss_sum: float = 0.0  # negative log-likelihood of the next tokens
    reference_loss_sum: float = 0.0
    num_same_best: int = 0

    def add(self, reference: Tensor, logits: Tensor, ids: Sequence[int]) -> None:
        """Count one window.

        :param reference: ``[T, vocab]`` float32, the float32 model's.
        :param logits: the same shape.
        :param ids: the T ids of the window.
        """
        if reference.shape != logits.shape or len(ids) != logits.shape[0]:
            raise ValueError(f"{tuple(reference.shape)} and {tuple(logits.shape)} logits for {len(ids)} ids")
        following = torch.tensor([*ids[1:], -1])
        for start in range(0, len(ids), _ROWS):
            rows = slice(start, start + _ROWS)
            wanted = torch.log_softmax(reference[rows].float(), dim=-1)
            found = torch.log_softmax(logits[rows].float(), dim=-1)
            self.kl_sum += float((wanted.exp() * (wanted - found)).sum())
            self.num_same_best += int((wanted.argmax(-1) == found.argmax(-1)).sum())
            self.num_positions += wanted.shape[0]
            here = following[rows]
            known = here >= 0
            index = here.clamp_min(0)[:, None]
            self.reference_loss_sum -= float(wanted.gather(1, index)[known].sum())
            self.loss_sum -= float(found.gather(1, index)[known].sum())
            self.num_followed += int(known.sum())

    @property
    def mean_kl(self) -> float:
        """Mean divergence from the float32 model, in nats per position."""
        return max(0.0, self.kl_sum / max(1, self.num_positions))

    @property
    def perplexity(self) -> float:
        """Of the text."""
        return math.exp(self.loss_sum / max(1, self.num_followed))

    @property
    def reference_perplexity(self) -> float:
        """Of the text, with the float32 model."""
        return math.exp(self.reference_loss_sum / max(1, self.num_followed))

    @property
    def perplexity_shift(self) -> float:
        """Relative change of the perplexity; 0.01 is one percent worse."""
        return self.perplexity / self.reference_perplexity - 1

    @property
    def same_best(self) -> float:
        """Share of the positions whose best token is the float32 model's."""
        return self.num_same_best / max(1, self.num_positions)


def text_ids(tokenizer: PreTrainedTokenizerBase, max_tokens: int | None = None) -> list[int]:
    """The ids of the text that ships with the package, without special tokens around it."""
    text = files("llmopt.bench").joinpath("texts", "quality.txt").read_text(encoding="utf-8")
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids[:max_tokens]


def windows(ids: Sequence[int], size: int = WINDOW) -> Iterator[list[int]]:
    """Pieces of ``size`` ids; a last one that is too short to say anything is left out."""
    for start in range(0, len(ids), size):
        piece = list(ids[start : start + size])
        if len(piece) >= 2:
            yield piece


@torch.no_grad()
def plain_logits(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """All logits of the model's own forward: ``[T, vocab]`` float32 on the CPU."""
    logits: Tensor = model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False).logits[0]
    return logits.float().cpu()


def pipeline_logits(pipe: InferencePipeline, ids: Sequence[int], chunk: int = 256) -> Tensor:
    """All logits of a pipeline's own executor, prefill in chunks: ``[T, vocab]`` float32 on the CPU.

    Nothing else may be running in the pipeline.

    :raises RequestError: the pool has no room for so many ids, or requests are running.
    """
    if pipe.queue.running or not pipe.queue.free_slots:
        raise RequestError("the pipeline is busy; logits are taken from one that has nothing else to do.")
    pool = pipe.block_pool
    needed = pool.num_blocks_for(len(ids))
    if needed > pool.num_free:
        raise RequestError(f"{len(ids)} ids need {needed} KV blocks, the pool has {pool.num_free} free ones.")
    request = Request("quality", list(ids), SamplingParams(), max_len=len(ids), wants_text=False)
    request.slot = pipe.queue.free_slots[-1]
    request.block_table.extend(pool.allocate(needed))
    if pipe.capabilities.has_states:
        chunk = len(ids)  # recurrent states take a prompt whole
    found: list[Tensor] = []
    try:
        while request.num_computed_tokens < len(ids):
            count = min(chunk, len(ids) - request.num_computed_tokens)
            built = pipe.batch_builder.build([request], [count])
            batch = replace(
                built,
                logits_indices=np.arange(count, dtype=np.int64),
                logits_requests=[request] * count,
                wants_best=False,
            )
            logits = pipe.execute(batch, None)
            if isinstance(logits, BestTokens):
                raise TypeError("execute returned BestTokens for a batch that wants logits")
            found.append(logits.float().cpu().clone())
            request.num_computed_tokens += count
    finally:
        pool.free(request.block_table)
    return torch.cat(found)


def logits_of(contender: Contender, model: PreTrainedModel) -> Callable[[Sequence[int]], Tensor]:
    """How a contender computes all logits of a window: its executor, or the model itself without the engine."""
    from llmopt.bench.contenders import Pipeline

    if isinstance(contender, Pipeline) and contender.pipe.why_not is None:
        pipe = contender.pipe
        return lambda ids: pipeline_logits(pipe, ids)
    return lambda ids: plain_logits(model, ids)


def measure_quality(
    reference: PreTrainedModel,
    model: PreTrainedModel,
    contenders: Sequence[Contender],
    ids: Sequence[int],
    window: int = WINDOW,
    on_progress: Callable[[str], None] = lambda name: None,
) -> list[Quality]:
    """Compare every contender with the float32 model; ``on_progress`` is called once per window."""
    results = [Quality() for _ in contenders]
    ways = [logits_of(contender, model) for contender in contenders]
    for number, piece in enumerate(windows(ids, window)):
        on_progress(f"window {number + 1}")
        expected = plain_logits(reference, piece)
        for result, way in zip(results, ways, strict=True):
            result.add(expected, way(piece), piece)
    return results

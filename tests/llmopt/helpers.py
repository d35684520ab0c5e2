"""What the tests of the engine share: pipelines around tiny models, plugins made from a function, checks at rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import llmopt
from llmopt import PluginInfo, hookimpl
from llmopt.batch import Batch, DraftTokens
from llmopt.pipeline import InferencePipeline
from llmopt.request import Request, SamplingParams
from llmopt.testing import tiny_model, tiny_tokenizer

Drafter = Callable[[Request], list[int]]


def build_tiny(
    kind: str = "llama", plugins: Sequence[Any] = (), changes: dict[str, Any] | None = None, **options: Any
) -> InferencePipeline:
    """A pipeline around a tiny model with the byte tokenizer."""
    options.setdefault("tokenizer", tiny_tokenizer())
    return llmopt.build(tiny_model(kind, **(changes or {})), plugins, **options)


def pool_bytes(pipe_or_blocks: int, block_size: int, bytes_per_token: int = 512) -> int:
    """Bytes of a pool of so many blocks; a token of the tiny Llama takes 2 * 2 layers * 2 heads * 16 * 4 bytes."""
    return pipe_or_blocks * block_size * bytes_per_token


def wrap(stage: str, change: Callable[[Any], Any], name: str = "inline") -> Any:
    """A plugin that wraps one stage with ``change(inner)``."""
    scope: dict[str, Any] = {"change": change}
    exec(f"def llmopt_wrap_{stage}(self, {stage}):\n    return change({stage})", scope)
    hook = hookimpl(scope[f"llmopt_wrap_{stage}"])
    info = PluginInfo(name=name, layer="scheduling", promise="exact")
    return type("Inline", (), {"info": info, f"llmopt_wrap_{stage}": hook})()


class Drafts:
    """A drafter made from a function of the request; cut to what a drafter may propose."""

    info = PluginInfo(name="drafts", layer="speculation", promise="exact")

    def __init__(self, drafter: Drafter, num_draft: int) -> None:
        self.drafter, self.num_draft = drafter, num_draft
        self.num_proposed = 0

    @hookimpl
    def llmopt_configure(self, config: Any) -> Any:
        return config.with_options(max_num_draft=self.num_draft)

    @hookimpl
    def llmopt_replace_propose(self) -> Any:
        return self.propose

    def propose(self, batch: Batch) -> DraftTokens | None:
        rows: list[list[int]] = []
        for request, num_new in zip(batch.requests, batch.num_scheduled.tolist(), strict=True):
            is_last = request.num_computed_tokens + num_new == request.num_tokens
            room = request.max_len - request.num_tokens - 1
            can_draft = is_last and request.lockstep is None and room > 0
            rows.append(self.drafter(request)[: min(self.num_draft, room)] if can_draft else [])
        width = max(map(len, rows))
        self.num_proposed += sum(map(len, rows))
        if width == 0:
            return None
        ids = np.full((len(rows), width), -1, dtype=np.int64)
        for row, drafts in enumerate(rows):
            ids[row, : len(drafts)] = drafts
        return DraftTokens(ids, np.array([len(r) for r in rows], dtype=np.int32))


_OF_REQUEST = (
    "seed", "parent", "lockstep", "logits_processors", "eos", "priority", "tenant", "cache_salt", "deadline_s",
    "arrival_s",
)  # fmt: skip


def request(prompt: Sequence[int], request_id: str = "r", **options: Any) -> Request:
    """A request as the faces make it; ``max_new_tokens`` is 8 unless given."""
    extra = {n: options.pop(n) for n in _OF_REQUEST if n in options}
    params = SamplingParams(**{"max_new_tokens": 8, **options})
    assert params.max_new_tokens is not None
    eos = frozenset(extra.pop("eos", ())) | frozenset(params.stop_token_ids)
    max_len = len(prompt) + params.max_new_tokens
    return Request(request_id, list(prompt), params, max_len, eos_token_ids=eos, wants_text=False, **extra)


def alone(pipe: InferencePipeline, prompt: Any, **options: Any) -> list[int]:
    """Output ids of one request that runs alone."""
    (output,) = pipe.batch([prompt], progress=False, **options)
    if output.error is not None:
        raise output.error
    return output.token_ids


def assert_idle(pipe: InferencePipeline) -> None:
    """Nothing is left: no request, no block, no slot, no listener."""
    pipe.block_pool.check()
    assert len(pipe.queue) == 0
    assert not pipe.queue.running
    assert not pipe.queue.waiting
    assert pipe.block_pool.num_used == 0
    assert len(set(pipe.queue.free_slots)) == pipe.config.scheduling.max_num_requests
    assert not pipe._listeners

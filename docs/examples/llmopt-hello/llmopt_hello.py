"""How full are the steps? Counts requests and tokens of every batch; `pipe.stats()` shows the means.

Stage: schedule (wraps).   Promise: exact, it only looks.
Helps: to see whether batches are as large as hoped.   Hurts: nothing that can be measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmopt import PluginInfo, hookimpl

if TYPE_CHECKING:
    from llmopt.batch import Batch
    from llmopt.queue import RequestQueue
    from llmopt.stages import Schedule


class Occupancy:
    """A scheduler that counts what another one schedules.

    :param inner: the scheduler as the plugins listed earlier left it.
    :param min_tokens: steps with fewer tokens are not counted.
    """

    def __init__(self, inner: Schedule, min_tokens: int) -> None:
        self.inner = inner
        self.min_tokens = min_tokens
        self.num_steps = self.num_requests = self.num_tokens = 0

    def __call__(self, queue: RequestQueue) -> Batch | None:
        batch = self.inner(queue)
        if batch is not None and batch.num_tokens >= self.min_tokens:
            self.num_steps += 1
            self.num_requests += batch.num_requests
            self.num_tokens += batch.num_tokens
        return batch

    def stats(self) -> dict[str, float]:
        steps = max(1, self.num_steps)
        return {"mean_requests": self.num_requests / steps, "mean_tokens": self.num_tokens / steps}


class Hello:
    """Count how full the steps are."""

    info = PluginInfo(name="hello", layer="scheduling", promise="exact", summary="counts how full the steps are")

    def __init__(self, min_tokens: int = 1) -> None:
        """:param min_tokens: steps with fewer tokens are not counted."""
        if min_tokens < 1:
            raise ValueError(f"min_tokens is a number of tokens, at least 1, found {min_tokens!r}")
        self.min_tokens = min_tokens

    @hookimpl
    def llmopt_wrap_schedule(self, schedule: Schedule) -> Schedule:
        return Occupancy(schedule, self.min_tokens)

"""The stages of the decode process: prompts go to workers, and their KV comes back as if it had been found."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from llmopt.block_pool import GIVEN_BACK
from llmopt.errors import PipelineClosedError
from llmopt_plugins.scheduling.pd_separation.keeper import Job, Keeper
from llmopt_plugins.scheduling.pd_separation.weight_mark import WeightMark
from llmopt_plugins.wrapping import Wrapping

if TYPE_CHECKING:
    import numpy as np

    from llmopt.block_pool import BlockPool
    from llmopt.build_context import BuildContext
    from llmopt.pipeline import InferencePipeline
    from llmopt.request import Request
    from llmopt.stages import Allocate, Lookup

_MAX_JOBS = 2  # per worker; the next ones wait without blocks


class HandOver:
    """Who computes which prompt. All methods but `on_over` are called under the pipeline's lock.

    :param min_tokens: shorter prompts are computed by the decode process.
    """

    def __init__(self, pool: BlockPool, min_tokens: int) -> None:
        self.pool = pool
        self.min_tokens = min_tokens
        self.keepers: list[Keeper] = []
        self.closers: list[Callable[[], None]] = []  # called before the keepers are closed
        self.pipeline: InferencePipeline | None = None
        self.weights: WeightMark | None = None  # of the model as the workers have it
        self.jobs: dict[Request, tuple[Keeper, Job]] = {}
        self.tried: dict[Request, int] = {}  # request -> its pre-emptions when a worker had its turn
        self.waiting: set[Request] = set()  # long prompts for which no worker had time
        # request -> how many tokens it had, and the logits of the last one, [vocab] float32: what a worker has computed
        self.answers: dict[Request, tuple[int, np.ndarray]] = {}
        self.counts = {"num_handed_over": 0, "num_prefill_tokens": 0, "num_first_tokens": 0, "num_recomputed": 0}
        self._orphans: list[Job] = []  # blocks of requests that went away while a worker wrote to them
        self._pid = os.getpid()  # whose workers they are
        self._lock = threading.Lock()  # of what `on_over` shares with the others

    def start(self, pipeline: InferencePipeline) -> None:
        """Begin to hand over, to keepers that were started."""
        self.pipeline = pipeline
        self.weights = WeightMark(pipeline.model)

    def is_for_workers(self, request: Request) -> bool:
        """Whether a worker may compute this request's prompt, if it is long enough."""
        return (
            self.pipeline is not None
            and request.num_tokens - 1 >= self.min_tokens
            and request.adapter is None
            and request.media is None
            and request.lockstep is None
            and request.companions is None
            and not request.block_table  # a stage further out has brought its KV already
            and self.tried.get(request) != request.num_preemptions
            and any(keeper.is_ready for keeper in self.keepers)
        )

    def free_keeper(self) -> Keeper | None:
        """The worker that has least to do, if it may have more."""
        ready = [(keeper.num_jobs, number) for number, keeper in enumerate(self.keepers) if keeper.is_ready]
        count, number = min(ready, default=(_MAX_JOBS, 0))
        return self.keepers[number] if count < _MAX_JOBS else None

    def give(self, request: Request, keeper: Keeper, found: int) -> bool:
        """Let a worker compute a request's tokens from ``found`` on, in the blocks that it holds.

        False when it cannot: it has just gone, or has other weights than this process has by now.
        """
        if self.pipeline is None or self.weights is None or not self.weights.is_same():
            return False
        end = request.num_tokens
        job = Job(request.request_id, request.token_ids[:end].copy(), request.block_table, found, end)
        if not keeper.add(job):
            return False
        request.block_table = []  # whoever frees the request's blocks meanwhile does not free these
        self.jobs[request] = keeper, job
        self.tried[request] = request.num_preemptions
        self.counts["num_handed_over"] += 1
        return True

    def take(self, request: Request) -> int | None:
        """The tokens of a handed over request that need no step; None when the worker is not done.

        The last one is always left to a step, which finds its logits in `answers`.
        """
        _, job = self.jobs[request]
        if not job.is_over:
            return None
        del self.jobs[request]
        request.block_table = job.blocks
        self.counts["num_prefill_tokens"] += job.num_done - job.start
        self.counts["num_recomputed"] += job.error is not None
        if job.logits is not None and job.num_done == request.num_tokens:
            self.answers[request] = job.num_done, job.logits
        return min(job.num_done, request.num_tokens - 1)

    def forget(self, request: Request) -> None:
        """The request needs its prompt no more. Blocks to which a worker may still write are freed when it is done."""
        if request.is_finished:
            self.tried.pop(request, None)
            self.waiting.discard(request)
        self.answers.pop(request, None)
        entry = self.jobs.pop(request, None)
        if entry is None:
            return
        keeper, job = entry
        with self._lock:
            self._orphans.append(job)
        keeper.cancel(job)
        self.reap()

    def reap(self) -> None:
        """Free the blocks of orphans to which nobody writes any more."""
        if not self._orphans:
            return
        with self._lock:
            over = [job for job in self._orphans if job.is_over]
            self._orphans = [job for job in self._orphans if not job.is_over]
        for job in over:
            self.pool.free([block for block in job.blocks if block != GIVEN_BACK])

    def on_over(self, jobs: Sequence[Job]) -> None:
        """Called by a keeper: free orphans' blocks, and wake up whoever steps."""
        pipeline = self.pipeline
        if pipeline is not None:
            with contextlib.suppress(PipelineClosedError):
                pipeline.between_steps(self.reap)

    def stats(self) -> dict[str, Any]:
        starts = sum(keeper.num_starts for keeper in self.keepers)
        return {
            **self.counts,
            "num_workers_ready": sum(keeper.is_ready for keeper in self.keepers),
            "num_restarts": max(0, starts - len(self.keepers)),
            "pids": [keeper.pid for keeper in self.keepers],
            "worker_s": sum(keeper.busy_s for keeper in self.keepers),
        }

    def close(self) -> None:
        """End the workers. In a forked child nothing happens: they belong to its parent, which goes on using them."""
        self.pipeline = None
        if os.getpid() != self._pid:
            return
        for close in self.closers:
            close()
        for keeper in self.keepers:
            keeper.close()
        for _, job in self.jobs.values():
            self._orphans.append(job)
        self.jobs.clear()
        self.answers.clear()
        self.reap()


class HandOverLookup(Wrapping):
    """Find what is in the pool; have the rest of a long prompt computed by a worker, and wait for it.

    :param context: its outermost ``allocate`` takes the blocks.
    :param about: one line for `describe`.
    """

    inner: Lookup

    def __init__(
        self,
        inner: Lookup,
        hand_over: HandOver,
        context: BuildContext,
        about: str,
        on_close: Callable[[], None],
    ) -> None:
        super().__init__(inner)
        self.hand_over = hand_over
        self.context = context
        self._about, self._on_close = about, on_close

    def __call__(self, request: Request) -> int | None:
        over = self.hand_over
        if request in over.jobs:
            return over.take(request)
        if not over.is_for_workers(request):
            over.waiting.discard(request)
            return self.inner(request)
        keeper = over.free_keeper()
        if keeper is None and request in over.waiting:
            return None
        found = self.inner(request)
        if found is None or request.num_tokens - 1 - found < over.min_tokens:
            over.waiting.discard(request)
            return found
        if found and keeper is not None and keeper.has_own_pool:
            over.waiting.discard(request)
            return found  # the rest stands on KV that the worker does not have
        allocate = self.context.stages.allocate
        if keeper is not None:
            request.num_computed_tokens = found
            has_blocks = allocate(request, request.num_tokens - found)
            request.num_computed_tokens = 0
            if has_blocks and over.give(request, keeper, found):
                over.waiting.discard(request)
                return None
            return found  # it lacks blocks, with which the scheduler deals; or the worker cannot
        allocate.free(request)  # it waits without blocks, so that it holds nobody up
        over.waiting.add(request)
        return None

    def stats(self) -> dict[str, Any]:
        return self.hand_over.stats()

    def describe(self) -> str:
        keepers = self.hand_over.keepers
        ready = sum(keeper.is_ready for keeper in keepers)
        reasons = {keeper.why_not for keeper in keepers if keeper.why_not is not None}
        told = f"{self._about}; {ready} of {len(keepers)} workers ready"
        return told + (f" ({'; '.join(sorted(reasons))})" if reasons else "")

    def close(self) -> None:
        self.hand_over.close()
        self._on_close()


class HandOverAllocate(Wrapping):
    """Allocate as before; a request that goes away takes its prompt back from the worker."""

    inner: Allocate

    def __init__(self, inner: Allocate, hand_over: HandOver) -> None:
        super().__init__(inner)
        self.hand_over = hand_over

    def __call__(self, request: Request, num_tokens: int) -> bool:
        return self.inner(request, num_tokens)

    def free(self, request: Request) -> None:
        self.inner.free(request)
        self.hand_over.forget(request)

    def num_blocks_ever(self, request: Request) -> int:
        return self.inner.num_blocks_ever(request)

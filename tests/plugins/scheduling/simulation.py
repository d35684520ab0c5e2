"""A scheduler with a pool, a clock that only steps move, and no model: every request that is due gets token 1."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from llmopt.baseline.scheduling import BaselineBudget, BaselineOrder, BaselineSchedule
from llmopt.batch_builder import BatchBuilder
from llmopt.block_pool import BlockPool
from llmopt.queue import RequestQueue
from llmopt.request import Request
from llmopt_plugins.memory.paged_kv import PagedAllocate
from tests.llmopt.helpers import request

BLOCK = 16


class LinearCost:
    """A cost model that needs no measurement: 10 ms for the weights, a tenth of a millisecond per token."""

    measured = True
    base_s, token_s, pair_s = 0.010, 0.0001, 0.0

    def wanted(self) -> LinearCost:
        return self

    def step_s(
        self, num_tokens: int, num_rows: int = 1, num_context_tokens: int = 0, num_prefill_pairs: int = 0
    ) -> float:
        return self.base_s + self.token_s * num_tokens if num_tokens else 0.0

    def largest_prefill(
        self, budget_s: float, num_decode_rows: int = 0, num_context_tokens: int = 0, **options: Any
    ) -> int:
        return max(0, round((budget_s - self.base_s) / self.token_s) - num_decode_rows)


class Simulation:
    """Runs arrivals through a scheduler with wrapped stages, in virtual time."""

    def __init__(
        self,
        *,
        budgets: Sequence[Callable[[Any, Simulation], Any]] = (),
        orders: Sequence[Callable[[Any, Simulation], Any]] = (),
        num_blocks: int = 4096,
        max_num_requests: int = 64,
        max_tokens_per_step: int = 4096,
        allocate: Any = None,
    ) -> None:
        self.now = 0.0
        self.cost: Any = LinearCost()
        self.pool = BlockPool(num_blocks, BLOCK)
        self.allocate: Any = allocate or PagedAllocate(self.pool, 0)
        order: Any = BaselineOrder()
        for make in orders:
            order = make(order, self)
        budget: Any = BaselineBudget(max_tokens_per_step)
        for make in budgets:
            budget = make(budget, self)
        self.order, self.budget = order, budget
        self.schedule = BaselineSchedule(
            order, budget, self.allocate, lambda r: 0, BatchBuilder(BLOCK), max_num_requests, True, 0
        )
        self.queue = RequestQueue(max_num_requests)
        self.times: dict[str, list[float]] = {}  # of each request's tokens
        self.steps: list[dict[str, int]] = []
        self.started: list[str] = []
        self.arrivals: list[Request] = []

    def clock(self) -> float:
        return self.now

    def at(self, time_s: float, name: str, prompt_len: int, new: int = 8, **options: Any) -> Request:
        """Let a request arrive at some time."""
        made = request([5] * prompt_len, name, max_new_tokens=new, arrival_s=time_s, **options)
        self.arrivals.append(made)
        self.arrivals.sort(key=lambda r: r.arrival_s)
        return made

    def step(self) -> bool:
        """Take in who has come, and run one step or wait; False when nothing is left."""
        while self.arrivals and self.arrivals[0].arrival_s <= self.now:
            self.queue.add(self.arrivals.pop(0))
        batch = self.schedule(self.queue) if len(self.queue) else None
        self.pool.check()
        self.queue.refused.clear()
        if batch is None:
            moments = [self.arrivals[0].arrival_s] if self.arrivals else []
            if len(self.queue):
                assert moments or self.queue.wake_s is not None, "nothing runs, and nobody will wake up"
                moments += [self.queue.wake_s] if self.queue.wake_s is not None else []
            if moments:
                assert min(moments) >= self.now
                self.now = max(min(moments), self.now + 1e-6)
            return bool(moments)
        self.now += self.cost.step_s(batch.num_tokens, batch.num_requests)
        counts = batch.num_scheduled.tolist()
        for made, count in zip(batch.requests, counts, strict=True):
            if made.num_computed_tokens == 0 and made.num_preemptions == 0:
                self.started.append(made.request_id)
            made.num_computed_tokens += count
        for made in batch.logits_requests:
            made.append(1)
            self.times.setdefault(made.request_id, []).append(self.now)
            if made.num_tokens == made.max_len:
                made.finish("length")
                self.queue.remove(made)
                self.allocate.free(made)
        self.steps.append(dict(zip(batch.request_ids, counts, strict=True)))
        return True

    def run(self, limit: int = 100_000) -> None:
        """Step until all requests have ended."""
        for _ in range(limit):
            if not self.step():
                assert not len(self.queue)
                assert self.pool.num_used == 0
                return
        raise AssertionError(f"not finished after {limit} steps")

    def gaps(self, name: str) -> list[float]:
        """Seconds between two tokens of a request."""
        times = self.times[name]
        return [after - before for before, after in itertools.pairwise(times)]

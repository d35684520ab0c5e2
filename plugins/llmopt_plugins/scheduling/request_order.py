"""Who is considered first: by arrival, priority or cached prefix; fairly between tenants; late requests refused.

Stage: order (wraps).   Promise: exact, only the step in which a request starts changes.
Helps: urgent requests beside patient ones; prefix caches under load; a service whose tenants must not starve each
other; clients that give up after a while anyway.   Hurts: whoever is overtaken.
Source: Y. Sheng et al., "Fairness in Serving Large Language Models", 2024 (virtual token counters); L. Zheng et al.,
"SGLang: Efficient Execution of Structured Language Model Programs", 2024 (longest cached prefix first).
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmopt import PluginInfo, hookimpl
from llmopt.errors import DeadlineError
from llmopt_plugins.option_checks import check_choice, check_flag, check_number, check_use
from llmopt_plugins.scheduling.tenant_shares import TenantShares

if TYPE_CHECKING:
    from llmopt.build_context import BuildContext
    from llmopt.config import PipelineConfig
    from llmopt.cost_model import CostModel
    from llmopt.queue import RequestQueue
    from llmopt.request import Request
    from llmopt.stages import Order

_POLICIES = ("fcfs", "priority", "cached_prefix")
_AGEING_S = 10.0
_MAX_ASKED = 64  # waiting requests whose cached prefix is looked up at a time
_STALE_CALLS = 16  # calls after which an order that depends on what was served or cached is made again


@dataclass(slots=True)
class _WorkAhead:
    """What stands before a place in the line."""

    least_outputs: list[int]  # of running requests: tokens that each has to give at least
    num_free: int  # slots that nobody runs in
    num_prompt_tokens: int  # that running requests and those ahead in the line lack
    num_waiting: int = 0  # ahead in the line

    @classmethod
    def of_running(cls, queue: RequestQueue) -> _WorkAhead:
        behind = [r.num_tokens - r.num_computed_tokens for r in queue.running]
        least = [_least_output(r) for r in queue.running]
        return cls(least, len(queue.free_slots), sum(n for n in behind if n > 1))

    def add(self, request: Request) -> None:
        """One more that waits ahead."""
        self.num_waiting += 1
        self.num_prompt_tokens += request.num_tokens

    def until_slot(self) -> tuple[int, int]:
        """Steps until the next request can have a slot, at least, and the rows that each of them has."""
        needed = self.num_waiting + 1 - self.num_free
        if needed <= 0 or not self.least_outputs:
            return 0, 0
        place = min(needed, len(self.least_outputs))
        return sorted(self.least_outputs)[place - 1], len(self.least_outputs) - place + 1


def _least_output(request: Request) -> int:
    """Tokens that a request has to give at least before it ends."""
    least = request.sampling.min_new_tokens
    if not request.eos_token_ids and not request.sampling.stop:
        least = request.max_len - request.num_prompt_tokens
    return max(0, least - request.num_output_tokens)


class PolicyOrder:
    """Sort the waiting requests; with priorities also the running ones, so that the least urgent is pre-empted first.

    A request is worth its arrival, moved by ``ageing_s`` for each level of priority, or forward by as much for a
    prompt that is cached as a whole. These values never change while requests wait, and later requests are worth
    less and less: so a request is overtaken for a bounded time, and nobody starves.

    :param num_cached: tokens of a request that a cache holds; None: nobody knows.
    :param cost: with it, a waiting request that can no longer meet its deadline is refused.
    :param clock: seconds, on the scale of `Request.arrival_s`.
    :param is_in_order: whether prompts are computed in the order of the line; else later ones may pass, and deadlines
        do not count the prompts before a request.
    """

    def __init__(
        self,
        inner: Order,
        policy: str,
        ageing_s: float,
        shares: TenantShares | None = None,
        num_cached: Callable[[Request], int] | None = None,
        cost: CostModel | None = None,
        clock: Callable[[], float] = time.perf_counter,
        is_in_order: Callable[[], bool] = lambda: True,
    ) -> None:
        self.inner = inner
        self.policy = policy
        self.ageing_s = ageing_s
        self.shares = shares
        self.num_cached = num_cached
        self.cost = cost
        self.clock = clock
        self.is_in_order = is_in_order
        self.num_refused = 0
        self._seen: tuple[int, int, int] | None = None
        self._num_calls = 0  # since the order was made
        self._cached: dict[Request, int] = {}
        self._latest_s: list[tuple[float, int, Request]] = []  # last moments to start, the next one at the end

    def __call__(self, queue: RequestQueue) -> None:
        self.inner(queue)
        self._num_calls += 1
        seen = (queue.num_added, len(queue.waiting), len(queue.running))
        can_stale = self.shares is not None or self.policy == "cached_prefix"
        if seen != self._seen or (can_stale and self._num_calls >= _STALE_CALLS and queue.waiting):
            self._arrange(queue)
        if self._latest_s and self._latest_s[-1][0] < self.clock():
            self._refuse_late(queue)
        self._seen = (queue.num_added, len(queue.waiting), len(queue.running))

    def _arrange(self, queue: RequestQueue) -> None:
        self._num_calls = 0
        if self.shares is not None:
            self.shares.update(queue)
        if self.cost is not None:
            self._find_deadlines(queue)
        if self.policy == "priority" and len(queue.running) > 1:
            queue.running.sort(key=self._urgency)
        if len(queue.waiting) < 2:
            return
        line = list(queue.waiting)
        if self.policy == "priority":
            line.sort(key=self._urgency)
        elif self.policy == "cached_prefix" and self.num_cached is not None:
            self._ask_cache(line)
            line.sort(key=self._worth)
        if self.shares is not None:
            line = self.shares.merged(line)
        queue.waiting.clear()
        queue.waiting.extend(line)

    def _urgency(self, request: Request) -> float:
        return request.arrival_s + request.priority * self.ageing_s

    def _worth(self, request: Request) -> float:
        return request.arrival_s - self._cached.get(request, 0) / request.num_tokens * self.ageing_s

    def _ask_cache(self, line: list[Request]) -> None:
        assert self.num_cached is not None
        known = self._cached
        self._cached = {request: known[request] for request in line if request in known}
        for request in line[:_MAX_ASKED]:
            if request.media is None:  # ids beside media only hold places
                self._cached[request] = self.num_cached(request)

    def _find_deadlines(self, queue: RequestQueue) -> None:
        moments = []
        ahead = _WorkAhead.of_running(queue)
        for place, request in enumerate(queue.waiting):
            if request.deadline_s is not None and request.lockstep is None:
                moments.append((self._latest_start_s(request, ahead), place, request))
            ahead.add(request)
        self._latest_s = sorted(moments, key=lambda moment: moment[0], reverse=True)

    def _latest_start_s(self, request: Request, ahead: _WorkAhead) -> float:
        assert request.deadline_s is not None
        return request.arrival_s + request.deadline_s - self._shortest_s(request, ahead)

    def _shortest_s(self, request: Request, ahead: _WorkAhead) -> float:
        """Seconds that the request takes at least: what must be done before it, and the shortest output it may have."""
        cost = self.cost
        if cost is None or cost.measured is None:  # while the pipeline is built
            return 0.0
        cached = 0 if self.num_cached is None or request.media is not None else self.num_cached(request)
        prompt = max(1, request.num_tokens - cached)
        wait_steps, wait_rows = ahead.until_slot()
        wait_s = wait_steps * cost.step_s(wait_rows, wait_rows) if wait_steps else 0.0
        start_s = wait_s + self._prefill_s(prompt)
        if self.num_cached is None and self.is_in_order():  # else nobody knows what is cached of those
            start_s = max(start_s, self._prefill_s(ahead.num_prompt_tokens + prompt))
        left = max(1, _least_output(request))
        rows = 1 + sum(least >= wait_steps + left for least in ahead.least_outputs)  # who runs beside it all the time
        return start_s + (left - 1) * cost.step_s(rows, rows, request.num_tokens)

    def _prefill_s(self, num_tokens: int) -> float:
        assert self.cost is not None
        most = getattr(self.cost, "max_tokens", 0) or num_tokens
        full, rest = divmod(num_tokens, most)
        return full * self.cost.step_s(most) + self.cost.step_s(rest)

    def _refuse_late(self, queue: RequestQueue) -> None:
        now = self.clock()
        late: list[Request] = []
        while self._latest_s and self._latest_s[-1][0] < now:
            late.append(self._latest_s.pop()[2])
        ahead = _WorkAhead.of_running(queue)
        for place, request in enumerate(list(queue.waiting)):  # who is not there runs, or has gone
            if request in late:
                latest_s = self._latest_start_s(request, ahead)  # work was done since it was asked
                if latest_s < now:
                    self._refuse(request, queue, now, latest_s)
                    continue
                insort(self._latest_s, (latest_s, place, request), key=lambda moment: -moment[0])
            ahead.add(request)

    def _refuse(self, request: Request, queue: RequestQueue, now: float, latest_s: float) -> None:
        assert request.deadline_s is not None
        needed_s = request.arrival_s + request.deadline_s - latest_s
        queue.refuse(request, DeadlineError(
            f"request {request.request_id!r} can no longer end within its deadline of {request.deadline_s:g} s: it "
            f"has waited for {now - request.arrival_s:.3g} s and takes at least {needed_s:.3g} s, with the work before "
            "it. Give it more time, a higher priority or fewer tokens, or send less at once."
        ))  # fmt: skip
        self.num_refused += 1

    def stats(self) -> dict[str, object]:
        found: dict[str, object] = {"num_refused": self.num_refused}
        if self.shares is not None:
            found["served"] = {str(tenant): round(value) for tenant, value in self.shares.served.items()}
        return found

    def describe(self) -> str:
        parts = [self.policy]
        if self.policy == "cached_prefix" and self.num_cached is None:
            parts[0] += " (no cache is listed: order of arrival)"
        parts += ["fair between tenants"] * (self.shares is not None) + ["late requests refused"] * bool(self.cost)
        return ", ".join(parts)


class RequestOrder:
    """Order requests by more than their arrival."""

    info = PluginInfo(
        name="request_order",
        layer="scheduling",
        promise="exact",
        summary="priority with ageing or cached prefixes first, fair tenants, deadlines",
    )

    def __init__(
        self, policy: str = "priority", ageing_s: float = _AGEING_S, fair: bool = False, deadlines: str | None = None
    ) -> None:
        """:param policy: "fcfs", "priority" (smaller first), or "cached_prefix" (longest cached share first).
        :param ageing_s: seconds of waiting that are worth one level of priority, or a prompt cached as a whole.
        :param fair: tenants are served equally many tokens while both have requests waiting.
        :param deadlines: "refuse": a waiting request that can no longer end in time gets a `DeadlineError`.
        """
        check_choice("policy", policy, _POLICIES)
        check_number("ageing_s", ageing_s, "a number of seconds above 0", lambda x: 0 < x < math.inf)
        check_flag("fair", fair)
        check_choice("deadlines", deadlines, ("refuse", None))
        if policy == "fcfs":
            check_use("policy=priority or policy=cached_prefix", {"ageing_s": (ageing_s, _AGEING_S)})
        self.policy = policy
        self.ageing_s = float(ageing_s)
        self.fair = fair
        self.deadlines = deadlines

    @hookimpl
    def llmopt_wrap_order(self, order: Order, config: PipelineConfig, context: BuildContext) -> Order:
        return PolicyOrder(
            order,
            self.policy,
            self.ageing_s,
            shares=TenantShares() if self.fair else None,
            num_cached=getattr(context.stages.lookup, "num_cached", None),
            cost=context.cost_model.wanted() if self.deadlines == "refuse" else None,
            is_in_order=lambda: context.stages.budget is context.baseline.budget,
        )

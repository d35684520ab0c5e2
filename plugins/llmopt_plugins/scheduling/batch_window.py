"""New requests start together: a short wait for company, while decodes go on and their gaps are filled.

Stage: budget (wraps).   Promise: exact, only the step in which a request starts changes.
Helps: bursts of short requests, whose prompts then share a forward and disturb running streams once instead of many
times, and no longer than fills the processor.   Hurts: the first of a group waits, `max_wait_ms` at most; a long
prompt beside decodes takes several steps.
Source: own work; the wait follows the delayed batching of D. Crankshaw et al., "Clipper", 2017.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from llmopt import PluginInfo, hookimpl
from llmopt.cost_model import num_pairs
from llmopt_plugins.option_checks import check_int, check_number

if TYPE_CHECKING:
    from llmopt.batch import StepBudget
    from llmopt.build_context import BuildContext
    from llmopt.config import PipelineConfig
    from llmopt.cost_model import CostModel
    from llmopt.queue import QueueLoad, RequestQueue
    from llmopt.stages import Budget

_NUM_GAPS = 8  # arrivals that the expectation rests on
_FREE_SHARE = 0.1  # a step of decodes may become longer by this share for the sake of backfill
_NEARLY_BEST = 1.25  # prompts fill the processor when a token costs no more than so many times the least it can cost
_MOST_TOKENS = 1024  # prompt tokens at which it is full in any case


def typical_gap_s(arrivals_s: Sequence[float]) -> float:
    """Seconds between arrivals: the median of the last few, which one pause or one burst does not upset.

    :returns: infinity when there are too few to say.
    """
    times = list(arrivals_s)[-_NUM_GAPS - 1 :]
    if len(times) <= _NUM_GAPS:
        return math.inf
    return statistics.median(max(0.0, after - before) for before, after in itertools.pairwise(times))


class WindowBudget:
    """Let nobody start until enough requests have come, or until the oldest has waited long enough.

    Prompts that are not computed yet count, waiting or begun. The window opens at once when, as requests have come
    lately, company will not come in time: a lone request on an idle service does not wait at all.

    A group is full when its prompts fill the processor: more of them would not make a token cheaper, only the step
    longer. A full group does not wait, and beside decodes a step takes no more than that; half of it belongs to the
    first in line, the rest to the shortest first, and what is left over goes into the next step.

    :param backfill: prompt tokens that a step may take in the meantime beside decodes; None: as many as lengthen
        the step by a tenth, from the cost model.
    :param group_tokens: prompt tokens of a full group; None: from the cost model.
    :param clock: seconds, on the scale of `Request.arrival_s`.
    """

    def __init__(
        self,
        inner: Budget,
        min_batch: int,
        max_wait_s: float,
        backfill: int | None = 0,
        cost: CostModel | None = None,
        clock: Callable[[], float] = time.perf_counter,
        group_tokens: int | None = None,
    ) -> None:
        self.inner = inner
        self.min_batch = min_batch
        self.max_wait_s = max_wait_s
        self.backfill = backfill
        self.cost = cost
        self.clock = clock
        self.group_tokens = group_tokens
        self.gap_s = math.inf
        self.num_held = 0
        self._opened_s = -math.inf
        self._is_filling = False  # prompts of a closed window run as backfill

    def __call__(self, queue: RequestQueue) -> StepBudget:
        budget = self.inner(queue)
        if queue.is_alone:
            return budget
        load = queue.load()
        if not (queue.waiting or load.prompts):
            return budget
        full = self._full_tokens()
        if load.num_decodes and full < budget.num_prefill_tokens:
            budget.num_prefill_tokens = full
            first = -(-full // 2)
            budget.num_first_tokens = min(first, budget.num_first_tokens or first)
        if not (queue.waiting or self._is_filling):
            return budget
        now = self.clock()
        self.gap_s = typical_gap_s(queue.arrivals_s)
        prompts = (*queue.waiting, *load.prompts)
        oldest = min((r.arrival_s for r in prompts), default=0.0)
        opens = oldest + self.max_wait_s
        missing = self.min_batch - len(prompts)
        # those that came before the last opening are under way, and the others may as well join them
        if (
            oldest <= self._opened_s
            or missing <= 0
            or now >= opens
            or missing * self.gap_s > opens - now
            or load.num_prompt_tokens + sum(r.num_tokens for r in queue.waiting) >= full
        ):
            self._opened_s, self._is_filling = now, False
            return budget
        self.num_held += 1
        budget.wake_at(opens)
        fill = self._backfill(load) if load.num_decodes else 0
        if fill:
            budget.num_prefill_tokens = min(budget.num_prefill_tokens, fill)
            self._is_filling = True
        else:
            budget.may_start = False
        return budget

    def _full_tokens(self) -> int:
        """Prompt tokens beyond which a token does not become much cheaper by company."""
        if self.group_tokens is not None:
            return self.group_tokens
        cost = self.cost
        if cost is None or cost.measured is None:  # the latter: while the pipeline is built
            return _MOST_TOKENS
        sizes = [1 << power for power in range(_MOST_TOKENS.bit_length())]
        per_token = [cost.step_s(size, 1, 0, num_pairs(size, 0)) / size for size in sizes]
        limit = _NEARLY_BEST * min(per_token)
        return next(size for size, seconds in zip(sizes, per_token, strict=True) if seconds <= limit)

    def _backfill(self, load: QueueLoad) -> int:
        if self.backfill is not None:
            return self.backfill
        cost = self.cost
        if cost is None or cost.measured is None:
            return 0
        decodes, context = load.num_decodes, load.num_context_tokens
        computed = load.prompts[0].num_computed_tokens if load.prompts else 0
        free_s = (1.0 + _FREE_SHARE) * cost.step_s(decodes, decodes, context)
        return cost.largest_prefill(free_s, decodes, context, num_computed_tokens=computed)

    def stats(self) -> dict[str, float]:
        return {"num_held": self.num_held, "typical_gap_s": self.gap_s}

    def describe(self) -> str:
        return f"starts {self.min_batch} at once, or after {1e3 * self.max_wait_s:g} ms"


class BatchWindow:
    """Start requests in groups."""

    info = PluginInfo(
        name="batch_window",
        layer="scheduling",
        promise="exact",
        summary="requests that arrive close together start together; waits only while company is likely",
    )

    def __init__(
        self,
        min_batch: int = 4,
        max_wait_ms: float = 20.0,
        backfill: int | str = "auto",
        group_tokens: int | str = "auto",
    ) -> None:
        """:param min_batch: prompts that open the window.
        :param max_wait_ms: milliseconds after which it opens anyway, from the arrival of the oldest.
        :param backfill: prompt tokens per step that may run beside decodes before it opens; "auto": as many as
            lengthen the step by a tenth.
        :param group_tokens: prompt tokens of a full group, which does not wait, and which a step beside decodes does
            not exceed; "auto": as many as fill the processor by the cost model.
        """
        check_int("min_batch", min_batch, 1, of="requests")
        check_number("max_wait_ms", max_wait_ms, "a number of milliseconds, at least 0", lambda x: 0 <= x < math.inf)
        if backfill != "auto":
            check_int("backfill", backfill, 0, other=', or "auto"', of="tokens")
        if group_tokens != "auto":
            check_int("group_tokens", group_tokens, 1, other=', or "auto"', of="tokens")
        self.group_tokens = None if isinstance(group_tokens, str) else group_tokens
        self.min_batch = min_batch
        self.max_wait_s = 1e-3 * max_wait_ms
        self.backfill = None if isinstance(backfill, str) else backfill

    @hookimpl
    def llmopt_wrap_budget(self, budget: Budget, config: PipelineConfig, context: BuildContext) -> Budget:
        wants_cost = self.backfill is None or self.group_tokens is None
        cost = context.cost_model.wanted() if wants_cost else None
        return WindowBudget(
            budget, self.min_batch, self.max_wait_s, self.backfill, cost, group_tokens=self.group_tokens
        )

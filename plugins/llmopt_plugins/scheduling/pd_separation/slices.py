"""Prefill and decode in one engine: two lines that take turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmopt.batch import StepBudget
    from llmopt.cost_model import CostModel
    from llmopt.queue import QueueLoad, RequestQueue
    from llmopt.stages import Budget

_PLAIN_SLICE = 512  # prompt tokens of a slice as long as nothing is measured
_LONE_STEPS = 5.0  # a step with a slice takes as long as so many steps of one decode, when nothing else is said
_LEAST_LONE_STEPS = 1.0  # and the slice at least this many of it, however many decodes there are


class SlicedBudget:
    """Turns of two lines: decodes, small and urgent, in every step; prompts, large and patient, in slices of their own.

    A slice is one step that carries up to ``slice_s`` of prompt work beside the decodes, or as much as lets the whole
    step take five times as long as the step of a lone decode: the more decodes there are, the smaller are the slices,
    and gaps stay the same. Then prompts pause for as long as gives decodes their share of the time. The pause shrinks
    as the oldest prompt ages, and is gone when it has waited for ``patience_s``: prompts are patient, and not for ever.
    When one line is empty the other has all.

    :param slice_s: None: the whole step is what is bounded, see above.
    :param decode_share: of the time that both lines want, 0 to below 1.
    :param clock: seconds, on the scale of `Request.arrival_s`.
    """

    def __init__(
        self,
        inner: Budget,
        cost: CostModel | None,
        slice_s: float | None,
        decode_share: float,
        patience_s: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.inner = inner
        self.cost = cost
        self.slice_s = slice_s
        self.decode_share = decode_share
        self.patience_s = patience_s
        self.clock = clock
        self.num_slices = 0
        self._began_s: float | None = None  # the slice that ran in the last step
        self._ended_s = 0.0
        self._pause_s = 0.0  # after the last slice, before patience is taken into account

    def __call__(self, queue: RequestQueue) -> StepBudget:
        budget = self.inner(queue)
        now = self.clock()
        if self._began_s is not None:  # this call is the end of that step
            self._pause_s = (now - self._began_s) * self.decode_share / (1.0 - self.decode_share)
            self._began_s, self._ended_s = None, now
        load = queue.load()
        if queue.is_alone or not (load.prompts or queue.waiting):
            return budget
        if not load.num_decodes:
            self._share(budget, _PLAIN_SLICE * 2)
            return budget
        oldest = min(r.arrival_s for r in (*load.prompts, *list(queue.waiting)[:1]))
        impatience = min(1.0, max(0.0, now - oldest) / self.patience_s)
        if now < self._ended_s + self._pause_s * (1.0 - impatience):
            budget.num_prefill_tokens = 0
            budget.may_start = False
            return budget
        self._share(budget, self._slice_tokens(load))
        self.num_slices += 1
        self._began_s = now
        return budget

    def _share(self, budget: StepBudget, num_tokens: int) -> None:
        """Narrow the prompt tokens; half of them belong to the first in line, the rest to the shortest first."""
        budget.num_prefill_tokens = min(budget.num_prefill_tokens, num_tokens)
        first = -(-budget.num_prefill_tokens // 2)
        budget.num_first_tokens = min(first, budget.num_first_tokens or first)

    def _slice_tokens(self, load: QueueLoad) -> int:
        cost = self.cost
        if cost is None or cost.measured is None:  # while the pipeline is built
            return _PLAIN_SLICE
        computed = load.prompts[0].num_computed_tokens if load.prompts else 0
        decodes, context = load.num_decodes, load.num_context_tokens
        decode_s = cost.step_s(decodes, decodes, context)
        if self.slice_s is not None:
            budget_s = decode_s + self.slice_s
        else:
            lone_s = cost.step_s(1)
            budget_s = max(_LONE_STEPS * lone_s, decode_s + _LEAST_LONE_STEPS * lone_s)
        return max(16, cost.largest_prefill(budget_s, decodes, context, num_computed_tokens=computed))

    def stats(self) -> dict[str, int]:
        return {"num_slices": self.num_slices}

    def describe(self) -> str:
        size = f"of {1e3 * self.slice_s:g} ms" if self.slice_s is not None else f"up to {_LONE_STEPS:g} lone decodes"
        return f"prompts in slices {size}, decodes have {100 * self.decode_share:g} % of the time"

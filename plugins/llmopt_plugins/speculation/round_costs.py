"""What a step with drafts costs: its forward by the cost model, and drafting, both corrected by what they took."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmopt_plugins.speculation.step_ratios import StepRatios

if TYPE_CHECKING:
    from llmopt.cost_model import CostModel, StepShape

_REFRESH = 16  # rounds for which predicted times are good; fewer at first
_MOST = 64  # drafts of a step, in all rows, whose cost is computed: beyond them a forward is bound by arithmetic
_RATE = 0.1
_FIRST_TIMES = 3  # of drafting: the least counts, because the first one finds nothing ready
_LARGEST_SURPRISE = 2.0  # a draft that took longer than this factor says counts as one that took so long


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Predicted seconds of a step with 0, 1, ... draft tokens."""

    forwards: list[float]  # with all that the host does, without drafting
    drafts: list[float]  # of drafting, by the number of tokens that are asked for
    draft_row_s: float  # what one more draft costs to verify, while they are few

    @property
    def plain(self) -> float:
        """Without drafts."""
        return self.forwards[0]

    @property
    def most(self) -> int:
        """Draft tokens up to which costs are known."""
        return len(self.forwards) - 1

    def of(self, num_asked: int, num_made: float) -> float:
        """Of a step in which a drafter is asked for some tokens and makes fewer."""
        low = int(num_made)
        rest = num_made - low
        forwards = self.forwards
        seconds = forwards[low] + (rest * (forwards[low + 1] - forwards[low]) if rest > 0.0 else 0.0)
        return seconds + self.drafts[num_asked]


class RoundCosts:
    """Predicts the time of steps with drafts, and learns from what they took.

    :param cost: seconds of a step.
    :param draft_s: (rows, tokens per row) -> seconds of drafting, as the drafter estimates it.
    :param max_num_draft: drafts that a row may have.
    """

    def __init__(self, cost: CostModel, draft_s: Callable[[int, int], float], max_num_draft: int) -> None:
        self.cost, self.estimate_s = cost, draft_s
        self.max_num_draft = max_num_draft
        self.ratios = StepRatios()
        self._times: dict[tuple[int, int, int], StepTimes] = {}  # by tokens, rows and context
        self._age = 0  # rounds since they were computed
        self._draft_ratio = 1.0  # measured over estimated time of drafting
        self._num_timed = 0  # times that it was measured
        self._was_asked = False  # the drafter, in the step before

    @property
    def is_known(self) -> bool:
        """False while the pipeline is built."""
        return self.cost.measured is not None

    def times(self, shape: StepShape, num_rows: int) -> StepTimes:
        """Of a step with drafts for so many rows."""
        context = shape.num_context_tokens + shape.num_prefill_pairs
        key = (shape.num_tokens, shape.num_rows, num_rows << 8 | int(8.0 * math.log2(context + 64.0)))
        times = self._times.get(key)
        if times is None:
            most = min(num_rows * self.max_num_draft, max(_MOST, self.max_num_draft))
            plain, drafted = self.ratios.of(shape.num_rows)
            least = plain * self._forward_s(shape, 0)
            forwards = [least, *(max(least, drafted * self._forward_s(shape, n)) for n in range(1, most + 1))]
            drafts = [0.0, *(self._draft_s(min(n, num_rows), -(-n // num_rows)) for n in range(1, most + 1))]
            some = min(4 * num_rows, most)
            times = self._times[key] = StepTimes(forwards, drafts, (forwards[some] - least) / max(1, some))
        return times

    def plain_s(self, shape: StepShape) -> float:
        """Of a step without drafts."""
        return self.ratios.of(shape.num_rows)[0] * self._forward_s(shape, 0)

    def _forward_s(self, shape: StepShape, num_draft: int) -> float:
        per_draft = shape.num_context_tokens // max(1, shape.num_rows)
        pairs = shape.num_prefill_pairs + num_draft * per_draft
        return self.cost.step_s(shape.num_tokens + num_draft, shape.num_rows, shape.num_context_tokens, pairs)

    def _draft_s(self, num_rows: int, num_draft: int) -> float:
        return self._draft_ratio * self.estimate_s(num_rows, num_draft)

    # -- learning -----------------------------------------------------------------------------------------------------
    def pass_over(self) -> None:
        """The drafter is not asked in this step, so the next time finds nothing in the caches."""
        self._was_asked = False

    def observe_draft(self, seconds: float, num_asked: int, limit: int, *, has_drafts: bool) -> None:
        """The drafter was asked.

        :param num_asked: rows for which it was; 0: it was not.
        :param limit: the most tokens it was asked for.
        :param has_drafts: False: it could not draft, so the time says nothing.
        """
        self.cost.leave_out(seconds)
        is_warm, self._was_asked = self._was_asked, num_asked > 0
        expected = self.estimate_s(num_asked, limit)
        if not has_drafts or not num_asked or not expected > 0.0:
            return
        ratio = min(max(seconds / expected, 0.02), 50.0)
        if not is_warm and self._num_timed:
            ratio = min(ratio, self._draft_ratio)
        self._num_timed += 1
        if self._num_timed <= _FIRST_TIMES:
            self._draft_ratio = ratio if self._num_timed == 1 else min(ratio, self._draft_ratio)
        else:
            self._draft_ratio += _RATE * (min(ratio, _LARGEST_SURPRISE * self._draft_ratio) - self._draft_ratio)

    def observe_step(self, shape: StepShape, seconds: float, num_draft: int) -> None:
        """A step of decodes took so long, without drafting.

        :param shape: without drafts.
        """
        self.ratios.observe(shape.num_rows, seconds / self._forward_s(shape, num_draft), is_plain=not num_draft)

    def end_round(self, num_rounds: int) -> None:
        """Predict anew from time to time.

        :param num_rounds: so far.
        """
        self._age += 1
        if self._age >= min(_REFRESH, 1 + num_rounds // 4):
            self._age = 0
            self._times.clear()

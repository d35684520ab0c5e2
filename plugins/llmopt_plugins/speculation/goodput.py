"""How many drafts pay: the controller that all drafters share.

Goodput is tokens per second. With ``B`` rows that get a token each and ``m`` drafts of chance ``P`` among them, a step
gives ``B + sum(P)`` tokens in ``T(B + m) + D(m)`` seconds, and the plain step ``B`` in ``T(B)``. The controller takes
the most likely drafts first and stops where the quotient is largest; no draft at all is one of the choices.
Sources: X. Liu et al., "TurboSpec: Closed-loop Speculation Control System for Optimizing LLM Serving Goodput", 2024;
Y. Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023 (expected tokens of a chain).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmopt.cost_model import StepShape
from llmopt_plugins.speculation.acceptance import Acceptance
from llmopt_plugins.speculation.guard import Guard
from llmopt_plugins.speculation.round_costs import RoundCosts, StepTimes

if TYPE_CHECKING:
    from llmopt.cost_model import CostModel
    from llmopt.request import Request

_MIN_GAIN = 0.03  # predicted gain that turns a kind of draft on; it stays on while there is any
_STAY = 0.985  # of the plain goodput, predicted: less turns a kind off
_KEEP = 0.995  # of the best goodput: a number of drafts that reaches so much is kept
_EXPLORE_SHARE = 0.004  # of the time may go into longer drafts than pay by what is known
_MAX_CREDIT = 2.0  # plain steps that may have been saved up for them
_PROBE_SHARE = 0.005  # of the time may go into probes that fail
_PROBE_DRAFTS = 3  # tokens of a probe, if they do not take long
_PROBE_COST = 1.3  # steps that a probe of more than one token may take
_FIRST_PROBES = 3  # without a wait
_BURST = 2  # probes after a wait: the first one finds nothing in the caches, and its time says little
_PROBE_MEMORY = 0.8  # of windows while they are probed: what was seen before the pause counts less
_MAX_BACK_OFF = 16  # waits between failing probes grow up to this factor
_ASK_SHARE = 0.002  # of the time may go into asking a drafter whose drafts are not used
_PASSED_OVER = 0.95  # what is kept of a request's record when others get drafts: nobody is out of luck for ever
_MANY_VAIN = 64  # calls in a row that brought no draft: from then on the drafter is asked less often
_LONGEST_SLEEP = 64  # steps for which it is not asked because of that
_RATE = 0.1


@dataclass(slots=True)
class Row:
    """A row that may get drafts."""

    request: Request
    room: int  # drafts that it may have
    kind: int = 0  # class of confidence


@dataclass(slots=True)
class _Kind:
    """What is known of one class of drafts."""

    acceptance: Acceptance
    is_on: bool = True
    num_draft: int = 0  # chosen last, for one row
    wait: int = 0  # chances to draft that are passed over until the next probe
    back_off: int = 1
    trials: int = _FIRST_PROBES  # probes that come without a wait
    probed_cost: float = 0.0  # steps that the probe under way should take; 0: none is
    all_accepted: bool = False  # of the last draft
    credit: float = 1.0  # plain steps that may be lost with a draft that is longer than pays


@dataclass(slots=True)
class _Round:
    """The step that is under way."""

    shape: StepShape
    began_s: float
    num_tokens: int  # that the step gives without drafts
    # kind of each draft, its tokens, and those that were asked for
    drafted: dict[Request, tuple[int, int, int]] = field(default_factory=dict)
    draft_s: float = 0.0  # that drafting took
    predicted: float = 1.0  # speed-up


class Goodput:
    """Chooses the number of drafts of each row; one object per drafter.

    :param cost: seconds of a step.
    :param draft_s: (rows, tokens per row) -> seconds of drafting, as the drafter estimates it.
    :param priors: for each kind of draft, the chance of a token whose predecessor was accepted, before any was seen.
    :param fixed: always so many drafts, whatever they cost; None: what pays.
    """

    def __init__(
        self,
        cost: CostModel,
        draft_s: Callable[[int, int], float],
        max_num_draft: int,
        priors: Sequence[float] = (0.5,),
        fixed: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.costs = RoundCosts(cost, draft_s, max_num_draft)
        self.guard = Guard()
        self.fixed, self.clock = fixed, clock
        self.kinds = [_Kind(Acceptance(prior, max_num_draft)) for prior in priors]
        self._round: _Round | None = None
        self._sleep = 0  # steps until the drafter is asked again
        self._token_s = self._draft_row_s = 0.0  # see `price`
        self._skills: dict[Request, list[float]] = {}  # accepted and expected drafts, of late
        self._ask_s = 0.0  # time of a call that brought no draft
        self._num_vain = 0  # calls in a row that brought none
        self._predicted = 0.0  # moving mean over rounds
        self.num_rounds = self.num_drafted = self.num_accepted = 0
        self.num_probes = self.num_slept = 0
        self._total_draft_s = 0.0

    # -- before the forward -------------------------------------------------------------------------------------------
    def is_asleep(self) -> bool:
        """Whether this step goes without the drafter. Counts down; called once per step."""
        self._round = None
        if self._sleep > 0:
            self._sleep -= 1
            self.costs.pass_over()
            self.num_slept += 1
            return True
        return False

    def begin(self, shape: StepShape, num_tokens: int) -> None:
        """A step begins that may have drafts.

        :param shape: of its forward without drafts.
        :param num_tokens: rows that get a token in any case.
        """
        self._round = _Round(shape, self.clock(), num_tokens)

    def plan(self, rows: Sequence[Row]) -> list[int]:
        """How many drafts each row should have, of at most ``room``. Goes before `draft` or after it."""
        now = self._round
        assert now is not None
        if self.fixed is not None:
            return [min(row.room, self.fixed) for row in rows]
        if not self.costs.is_known:
            return [0] * len(rows)
        counts = self._plan_one(rows[0], now) if len(rows) == 1 else self._plan_many(rows, now)
        is_used = any(self.kinds[row.kind].is_on for row, count in zip(rows, counts, strict=True) if count)
        if is_used and self.costs.ratios.is_plain_due(now.shape.num_rows, now.predicted):
            return [0] * len(rows)
        self._num_vain = 0 if any(counts) else self._num_vain + 1
        return counts

    def _plan_one(self, row: Row, now: _Round) -> list[int]:
        kind = self.kinds[row.kind]
        times = self._times(now, 1)
        chances = kind.acceptance.chances()
        most = min(row.room, times.most)
        plain = now.num_tokens / times.plain
        tokens, costs, made = [float(now.num_tokens)], [times.plain], 0.0
        best, best_count, kept = 0.0, 0, 0.0
        for count, share in enumerate(kind.acceptance.made()[:most], start=1):
            made += share
            tokens.append(tokens[-1] + chances[count - 1])
            costs.append(times.of(count, made))
            rate = tokens[count] / costs[count]
            if count == kind.num_draft:
                kept = rate
            if rate > best:
                best, best_count = rate, count
        if kept >= _KEEP * best and kept > plain:
            best_count, best = kind.num_draft, kept
        now.predicted = max(best / plain, 1.0)
        self._token_s = 1.0 / max(best, plain)
        if best_count and best > (_STAY if kind.is_on and kind.num_draft else 1.0 + _MIN_GAIN) * plain:
            self._turn_on(kind)
            kind.num_draft = best_count
            return [self._explore(kind, best_count, most, tokens, costs)]
        return [self._probe(kind, row.room, times) if row.room else 0]

    def _explore(self, kind: _Kind, count: int, most: int, tokens: list[float], times: list[float]) -> int:
        """Try twice as many now and then after a draft that was accepted whole: nobody has seen where it ends."""
        kind.credit = min(kind.credit + _EXPLORE_SHARE * times[count] / times[0], _MAX_CREDIT)
        longer = min(2 * count, most)
        if not kind.all_accepted or longer <= count:
            return count
        loss = (times[longer] - tokens[longer] * times[count] / tokens[count]) / times[0]
        if loss > kind.credit:
            return count
        kind.credit -= max(loss, 0.0)
        return longer

    def _plan_many(self, rows: Sequence[Row], now: _Round) -> list[int]:
        """The most likely drafts of all rows first, as long as they raise the goodput of the step."""
        counts = [0] * len(rows)
        candidates: list[tuple[float, int, int, float]] = []
        shares = [kind.acceptance.made() for kind in self.kinds]
        for place, row in enumerate(rows):
            skill, made = self._skill_of(row.request), shares[row.kind]
            for depth, chance in enumerate(self.kinds[row.kind].acceptance.chances()[: row.room]):
                candidates.append((-min(1.0, skill * chance), depth, place, made[depth]))
        candidates.sort()  # chances of a row never rise, so every prefix has the first ones of each row
        times = self._times(now, len(rows))
        plain = now.num_tokens / times.plain
        tokens, best, best_count, num_made = float(now.num_tokens), plain, 0, 0.0
        for count, (chance, _, _, share) in enumerate(candidates[: times.most], start=1):
            tokens -= chance
            num_made += share
            rate = tokens / times.of(count, num_made)
            if rate > best:
                best, best_count = rate, count
            elif rate < 0.8 * best:
                break
        now.predicted = best / plain
        self._token_s = 1.0 / best
        is_worth_it = best > (1.0 + _MIN_GAIN) * plain or any(self.kinds[row.kind].is_on for row in rows)
        if best_count and is_worth_it:
            for _, _, place, _ in candidates[:best_count]:
                counts[place] += 1
            for row, count in zip(rows, counts, strict=True):
                if not count and (record := self._skills.get(row.request)) is not None:
                    record[:] = _PASSED_OVER * record[0], _PASSED_OVER * record[1]
        used = {rows[place].kind for place, count in enumerate(counts) if count}
        for kind in used:
            self._turn_on(self.kinds[kind])
        probed: set[int] = set()
        for place, row in enumerate(rows):
            if row.kind not in used and row.kind not in probed and row.room:
                probed.add(row.kind)
                counts[place] = self._probe(self.kinds[row.kind], row.room, times)
        return counts

    def price(self) -> tuple[float, float]:
        """Seconds that a token costs in the step under way, and that one more draft costs to verify.

        0 and 0 where the number of drafts is fixed or nothing is known yet.
        """
        return self._token_s, self._draft_row_s

    def _turn_on(self, kind: _Kind) -> None:
        kind.is_on, kind.wait, kind.back_off = True, 0, 1

    def _probe(self, kind: _Kind, room: int, times: StepTimes) -> int:
        """A kind of draft does not pay: whether it is tried all the same, and with how many tokens.

        Waits are so long that probes which fail cost a fixed share of the time, and grow while they fail.
        """
        if kind.is_on:
            kind.is_on, kind.num_draft = False, 0
            kind.wait = 0 if kind.trials else self._wait_of(times)
        count = _probe_size(room, times)
        if kind.trials:
            kind.trials -= 1
        elif kind.wait > 0:
            kind.wait -= 1
            if len(self.kinds) == 1 and kind.wait:
                self._sleep, kind.wait = kind.wait, 0
            return 0
        else:
            kind.trials = _BURST - 1
        if not kind.trials:
            kind.wait = self._wait_of(times) * kind.back_off * _BURST
            kind.back_off = min(2 * kind.back_off, _MAX_BACK_OFF)
        kind.probed_cost = times.of(count, count) / times.plain
        self.num_probes += 1
        return count

    def _wait_of(self, times: StepTimes) -> int:
        count = _probe_size(_PROBE_DRAFTS, times)
        probe = times.of(count, count) / times.plain - 1.0
        return max(1, math.ceil(probe / _PROBE_SHARE))

    def _skill_of(self, request: Request) -> float:
        """How much better than others this request is guessed."""
        hits, expected = self._skills.get(request, (0.0, 0.0))
        return min(2.0, (hits + 4.0) / (expected + 4.0))

    def _times(self, now: _Round, num_rows: int) -> StepTimes:
        times = self.costs.times(now.shape, num_rows)
        self._draft_row_s = times.draft_row_s
        return times

    def end_draft(self, drafted: Iterable[tuple[Request, int, int, int]], num_asked: int, limit: int) -> None:
        """Drafts were made, and cut.

        :param drafted: request, kind, number of tokens and of those that were asked for, of each draft; a draft may be
            empty, because the drafter was not sure of any token.
        :param num_asked: rows for which the drafter was asked; 0: it was not.
        :param limit: the most tokens it was asked for.
        """
        now = self._round
        assert now is not None
        seconds = self.clock() - now.began_s
        now.draft_s = seconds
        for request, kind, count, asked in drafted:
            now.drafted[request] = (kind, count, asked)
        self.costs.observe_draft(seconds, num_asked, limit, has_drafts=bool(now.drafted))
        if now.drafted:
            return
        self._ask_s += _RATE * (seconds - self._ask_s) if self._ask_s else seconds
        if self._num_vain >= _MANY_VAIN and self.costs.is_known and self.fixed is None:
            plain_s = self._times(now, 1).plain
            self._sleep = max(self._sleep, min(_LONGEST_SLEEP, int(self._ask_s / (_ASK_SHARE * plain_s))))

    # -- after the step -----------------------------------------------------------------------------------------------
    @property
    def is_under_way(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._round is not None

    def end(self, accepted: dict[Request, Sequence[int]], num_draft: int) -> None:
        """The step was committed.

        :param accepted: for each request that got tokens, the indices of its drafts that were accepted.
        :param num_draft: draft tokens of the step, those of other drafters too.
        """
        now, self._round = self._round, None
        if now is None or not self.costs.is_known:
            return
        seconds = self.clock() - now.began_s
        is_decode = now.shape.num_tokens == now.shape.num_rows
        if is_decode:
            self.costs.observe_step(now.shape, seconds - now.draft_s, num_draft)
        if not now.drafted:
            return
        for request, (kind, count, asked) in now.drafted.items():
            places = accepted.get(request, ()) if count else ()
            self.num_accepted += len(places)
            self.num_rounds += count > 0
            self._count(request, self.kinds[kind], count, asked, places)
        total = sum(map(len, accepted.values()))  # those of other drafters too
        self._predicted += (now.predicted - self._predicted) * max(_RATE, 1.0 / max(1, self.num_rounds))
        self.costs.end_round(self.num_rounds)
        if is_decode:
            self._total_draft_s += now.draft_s
            plain_s = self.costs.plain_s(now.shape)
            wait = self.guard.observe((now.num_tokens + total) / now.num_tokens * plain_s, seconds)
            if wait and self.fixed is None:
                self._sleep = wait
                for kind_of_draft in self.kinds:
                    kind_of_draft.is_on, kind_of_draft.num_draft = False, 0

    def _count(self, request: Request, kind: _Kind, count: int, asked: int, places: Sequence[int]) -> None:
        self.num_drafted += count
        skill = self._skills.setdefault(request, [0.0, 0.0])
        expected = kind.acceptance.expected(asked)
        skill[0] = 0.9 * skill[0] + len(places)
        skill[1] = 0.9 * skill[1] + expected
        kind.all_accepted = len(places) == count == asked
        if kind.is_on:
            kind.acceptance.observe(asked, places, num_made=count)
            return
        kind.acceptance.observe(asked, places, _PROBE_MEMORY, num_made=count)
        if 1.0 + len(places) > kind.probed_cost > 0.0:  # it has paid by itself: the next one follows at once
            kind.trials, kind.back_off = max(kind.trials, 1), 1
        kind.probed_cost = 0.0

    def forget(self, request: Request) -> None:
        """A request has finished."""
        self._skills.pop(request, None)

    # -- showing ------------------------------------------------------------------------------------------------------
    @property
    def is_on(self) -> bool:
        """Whether any kind of draft is used."""
        return self.fixed is not None or (not self._sleep and any(kind.is_on for kind in self.kinds))

    def stats(self) -> dict[str, Any]:
        """Counters since the pipeline was built."""
        rounds = max(1, self.num_rounds)
        return {
            "is_on": self.is_on,
            "rounds": self.num_rounds,  # rows that had drafts, over all steps
            "drafted": self.num_drafted,
            "accepted": self.num_accepted,
            "tokens_per_round": round(1.0 + self.num_accepted / rounds, 3) if self.num_rounds else 0.0,
            "num_draft": self.fixed if self.fixed is not None else [kind.num_draft for kind in self.kinds],
            "acceptance": [[round(p, 3) for p in kind.acceptance.chances()[:4]] for kind in self.kinds],
            "predicted_speedup": round(self._predicted, 3),  # of rounds, over plain steps
            "measured_speedup": round(self.guard.speedup, 3),
            "draft_us": round(1e6 * self._total_draft_s / rounds, 1),  # per round
            "num_probes": self.num_probes,
            "num_guarded": 0
            if self.fixed is not None
            else self.guard.num_alarms,  # times that rounds were slower than plain steps, and were turned off
            "num_slept": self.num_slept,  # steps in which the drafter was not asked
        }


def _probe_size(room: int, times: StepTimes) -> int:
    """Tokens of a probe: few, and one when tokens cost much."""
    count = min(room, _PROBE_DRAFTS, times.most)
    return count if times.of(count, count) <= _PROBE_COST * times.plain else min(count, 1)

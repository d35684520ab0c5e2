"""Interleaved timing: every contender once per round, so that a slow minute of the machine hits all of them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from llmopt.bench.budget import Rounds
from llmopt.bench.clock import ForwardClock

if TYPE_CHECKING:
    from llmopt.bench.contenders import Contender
    from llmopt.bench.workloads import BenchRequest


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range of a repeated measurement."""

    median: float
    low: float  # smallest value
    high: float  # largest value

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Summarise at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    @property
    def percent(self) -> float:
        """Half the range, in percent of the median."""
        return 50.0 * (self.high - self.low) / self.median if self.median else 0.0


@dataclass(slots=True)
class Timing:
    """What one contender took on one workload, one value per round."""

    name: str
    total_s: list[float] = field(default_factory=list)  # the whole batch
    first_token_s: list[float] = field(default_factory=list)  # the batch with one new token per request
    outside_s: list[float] = field(default_factory=list)  # time outside the forward, per forward
    num_tokens: int = 0  # new tokens of the batch
    longest: int = 0  # new tokens of its longest request

    @property
    def tokens_per_s(self) -> Spread:
        """New tokens of the whole batch over its whole time, prefill included."""
        return Spread.of([self.num_tokens / seconds for seconds in self.total_s])

    @property
    def ms_per_token(self) -> Spread:
        """Milliseconds between two tokens of the longest request, after its first; prefill left out."""
        steps = max(1, self.longest - 1)
        pairs = zip(self.total_s, self.first_token_s, strict=True)
        return Spread.of([1e3 * max(0.0, total - first) / steps for total, first in pairs])

    @property
    def first_token_ms(self) -> Spread:
        """Milliseconds until every request of the batch has its first token."""
        return Spread.of([1e3 * seconds for seconds in self.first_token_s])

    @property
    def outside_us(self) -> Spread:
        """Host time per step: microseconds outside the forward, per forward."""
        return Spread.of([1e6 * seconds for seconds in self.outside_s])

    def speedup_over(self, other: Timing) -> Spread:
        """How many times faster than another contender, compared round by round."""
        return Spread.of([theirs / mine for mine, theirs in zip(self.total_s, other.total_s, strict=True)])


def measure(
    contenders: Sequence[Contender],
    make_batch: Callable[[int], list[BenchRequest]],
    rounds: int,
    on_progress: Callable[[str], None] = lambda name: None,
    seconds: float | None = None,
) -> list[Timing]:
    """Time every contender on every round's batch, A B C A B C ...

    :param make_batch: from a number to a batch; numbers are never used twice, so caches meet new text.
    :param rounds: at most.
    :param on_progress: called with the contender's name before each of its turns.
    :param seconds: no round begins that would not end in this time, except for the first; None: all rounds.
    """
    timings = [Timing(contender.name) for contender in contenders]
    clock = ForwardClock()
    allowed = Rounds(math.inf if seconds is None else seconds, rounds)
    while allowed.goes_on():
        turn = allowed.num_done - 1
        batch, first_batch = make_batch(2 * turn), make_batch(2 * turn + 1)
        first_batch = [replace(request, max_new_tokens=1) for request in first_batch]
        for contender, timing in zip(contenders, timings, strict=True):
            on_progress(contender.name)
            timing.first_token_s.append(_seconds(contender, first_batch))
            with contender.timed_forward(clock):
                clock.reset()
                seconds = _seconds(contender, batch)
            timing.total_s.append(seconds)
            timing.outside_s.append((seconds - clock.seconds) / max(1, clock.num_calls))
            timing.num_tokens = sum(request.max_new_tokens for request in batch)
            timing.longest = max(request.max_new_tokens for request in batch)
    return timings


def _seconds(contender: Contender, batch: list[BenchRequest]) -> float:
    _synchronize()
    started = time.perf_counter()
    contender.generate(batch)
    _synchronize()
    return time.perf_counter() - started


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()

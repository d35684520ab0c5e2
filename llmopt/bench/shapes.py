"""Workloads of a fixed shape: prompts of random ids, so many new tokens, no early end.

Two runs, with 1 and with 1 + N new tokens, separate prefill from decode. The best of the rounds counts: what is
asked is what the code can do, and others on the machine can only make it slower.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from llmopt.bench.budget import Rounds
from llmopt.bench.workloads import BenchRequest

if TYPE_CHECKING:
    from llmopt.bench.contenders import Contender

_CHECK_ROWS, _CHECK_TOKENS = 8, 16  # the token check looks at so many rows and new tokens
_FEWEST_TOKENS = 8  # below, the difference of two runs says nothing
_WARM_UP = 2_000_000  # number of the round that is not timed


@dataclass(frozen=True, slots=True)
class Shape:
    """A named shape."""

    name: str
    batch: int  # requests at once
    prompt: int  # ids per prompt
    num_new: int  # decode steps that are timed; 0 times the prefill

    @property
    def summary(self) -> str:
        """One line for tables."""
        what = f"{self.num_new} decode steps" if self.is_decode else "prefill"
        return f"{what}, {self.batch} x {self.prompt:,} prompt tokens"

    @property
    def is_decode(self) -> bool:
        """Whether decode steps are what counts."""
        return self.num_new > 0

    def fitted(self, max_model_len: int, *, quick: bool) -> Shape:
        """The shape as a model with this limit can run it; small with ``quick``."""
        num_new = min(self.num_new, _FEWEST_TOKENS) if quick else self.num_new
        num_new = min(num_new, max(1, max_model_len // 4)) if self.is_decode else 0
        prompt = min(self.prompt, 64) if quick else self.prompt
        batch = min(self.batch, 4) if quick else self.batch
        return Shape(self.name, batch, max(1, min(prompt, max_model_len - num_new - 2)), num_new)

    def requests(self, number: int, vocab_size: int, max_new_tokens: int, batch: int = 0) -> list[BenchRequest]:
        """One batch; another number gives other ids. The first ids of a vocabulary are special and left out."""
        rng = random.Random(number)
        first = min(10, vocab_size - 1)
        return [
            BenchRequest([rng.randrange(first, vocab_size) for _ in range(self.prompt)], max_new_tokens)
            for _ in range(batch or self.batch)
        ]

    def check_requests(self, vocab_size: int) -> list[BenchRequest]:
        """What the tokens are checked on: the same prompts, fewer rows and tokens; one row of a long prompt."""
        rows = 1 if self.prompt > 2048 else min(self.batch, _CHECK_ROWS)
        return self.requests(1_000_000, vocab_size, min(_CHECK_TOKENS, self.num_new + 1 or 1), rows)


SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("decode1", 1, 32, 64),
        Shape("decode8", 8, 32, 64),
        Shape("decode32", 32, 32, 64),
        Shape("prefill1024", 1, 1024, 0),
        Shape("decode4096", 1, 4096, 32),
    )
}


@dataclass(slots=True)
class ShapeTiming:
    """What one contender took, one value per round."""

    name: str
    shape: Shape
    first_s: list[float] = field(default_factory=list)  # all prompts and one token each
    full_s: list[float] = field(default_factory=list)  # with num_new more; empty for a prefill

    @property
    def prefill_s(self) -> float:
        """The fastest prefill of the batch."""
        return min(self.first_s)

    @property
    def step_s(self) -> float:
        """Seconds of what the shape is about: a decode step, or the whole prefill."""
        if not self.shape.is_decode:
            return self.prefill_s
        return max(1e-9, min(self.full_s) - self.prefill_s) / self.shape.num_new

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens of the whole batch per second."""
        return self.shape.batch * self.shape.prompt / self.prefill_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of what the shape is about, the whole batch together."""
        return self.shape.batch / self.step_s if self.shape.is_decode else self.prefill_tokens_per_s

    @property
    def spread_percent(self) -> float:
        """How far the slowest round lies above the fastest, in percent; 0 after one round."""
        times = self.full_s or self.first_s
        return 100.0 * (max(times) / min(times) - 1)


def measure_shape(
    contenders: Sequence[Contender],
    shape: Shape,
    vocab_size: int,
    *,
    seconds: float,
    max_rounds: int,
    on_progress: Callable[[str], None] = lambda name: None,
) -> list[ShapeTiming]:
    """Time every contender once per round, A B C A B C ..., as many rounds as fit into ``seconds``, one at least.

    Before that each runs the prompts once, untimed: the first run of a shape takes memory that later ones find.
    When not even one round fits, decode steps become fewer: the shape of the result says how many were timed.
    """
    rounds = Rounds(seconds, max_rounds)
    timings = [ShapeTiming(contender.name, shape) for contender in contenders]
    for contender in contenders:
        on_progress(contender.name)
        contender.generate(shape.requests(_WARM_UP, vocab_size, 1))
    while rounds.goes_on():
        number = 2 * rounds.num_done
        for contender, timing in zip(contenders, timings, strict=True):
            on_progress(contender.name)
            timing.first_s.append(_seconds(contender, shape.requests(number, vocab_size, 1)))
        if rounds.num_done == 1 and shape.is_decode:
            shape = _shortened(contenders, shape, vocab_size, timings, seconds)
            for timing in timings:
                timing.shape = shape
        if shape.is_decode:
            for contender, timing in zip(contenders, timings, strict=True):
                on_progress(contender.name)
                requests = shape.requests(number + 1, vocab_size, 1 + shape.num_new)
                timing.full_s.append(_seconds(contender, requests))
    return timings


def _shortened(
    contenders: Sequence[Contender], shape: Shape, vocab_size: int, timings: list[ShapeTiming], seconds: float
) -> Shape:
    """The shape with as many decode steps as fit, from the time of one step more than the prefill.

    Together they take as long as a prefill at least: fewer would drown in its noise, since it is subtracted.
    """
    steps_s, least = 0.0, _FEWEST_TOKENS
    for contender, timing in zip(contenders, timings, strict=True):
        took = _seconds(contender, shape.requests(1, vocab_size, 3))
        step_s = max(1e-6, took - timing.first_s[0]) / 2
        steps_s += step_s
        least = max(least, math.ceil(timing.first_s[0] / step_s))
    left = seconds - 2 * sum(timing.first_s[0] for timing in timings) - 2 * steps_s
    num_new = min(shape.num_new, max(least, int(left / steps_s)))
    return Shape(shape.name, shape.batch, shape.prompt, num_new)


def _seconds(contender: Contender, requests: list[BenchRequest]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    started = time.perf_counter()
    contender.generate(requests)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started

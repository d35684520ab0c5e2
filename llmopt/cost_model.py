"""What a step costs: seconds as a function of tokens, rows and context, measured once and corrected while serving.

A plugin that decides by time calls `CostModel.wanted` in one of its hooks. Then, and only then,
`llmopt.cost_measurement` times a few forwards at the end of `build`, and the pipeline reports every step to
`CostModel.observe`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from llmopt.errors import PluginError

if TYPE_CHECKING:
    from llmopt.batch import Batch

_RATE, _FIRST_RATE = 0.1, 0.4  # share of a step's error that is corrected at once; of the first steps of their size
_LARGEST_SURPRISE = 1.5  # a step that took longer or shorter than this factor counts as one that did just that
_SCALE_LIMIT = 50.0  # how far corrections may lead away from what was measured
_ALIKE = 8  # steps of one size, when it is known, that are learned from at once
_KNOWN_WEIGHT = 3.0  # steps after which a measured point goes by its own correction and not by its neighbours'


class StepShape(NamedTuple):
    """What the time of a step depends on. Made in every step."""

    num_tokens: int  # tokens of the forward
    num_rows: int  # requests that they belong to
    # KV tokens that decodes read for their newest token, itself included, and those of earlier steps that chunks read
    num_context_tokens: int
    num_prefill_pairs: int  # tokens times context, summed over drafts and rows of several tokens

    @classmethod
    def of(cls, batch: Batch) -> StepShape:
        """The shape of a batch. A row reads its context once; drafts and tokens of a chunk are pairs beside that."""
        if batch.num_tokens == batch.num_requests:
            return cls(batch.num_tokens, batch.num_requests, sum(batch.seq_lens.tolist()), 0)
        context = pairs = 0
        for count, length, num_draft in zip(
            batch.num_scheduled.tolist(), batch.seq_lens.tolist(), batch.num_drafts.tolist(), strict=True
        ):
            if count - num_draft == 1:
                context += length - num_draft
                if num_draft:
                    pairs += num_pairs(num_draft, length - num_draft)
            else:
                context += length - count
                pairs += num_pairs(count, length - count)
        return cls(batch.num_tokens, batch.num_requests, context, pairs)


@dataclass(frozen=True, slots=True)
class Measurements:
    """What `llmopt.cost_measurement` found; all times in seconds."""

    prompts: tuple[tuple[int, float], ...]  # tokens of one prompt from its start, and the time of its step; ascending
    rows: tuple[tuple[int, float], ...] = ()  # rows of one token with next to no context, ascending
    context_token_s: float = 0.0  # per KV token that a row reads
    prefill_pair_s: float = 0.0  # per token and context token of longer rows, beside that
    copy_fixed_s: float = 0.0  # a copy between pool and host memory, whatever its size
    copy_byte_s: float = 0.0  # per byte of such a copy
    max_tokens: int = 4096  # tokens that a step may have
    took_s: float = 0.0  # for measuring all this


class CostModel:
    """Seconds of a step that has not run yet.

    The estimate is a sum: a curve over tokens through measured points, a curve over rows, and two attention terms,
    ``num_context_tokens`` and ``num_prefill_pairs``. It never falls when one of them grows. Each observed step moves
    those parts that its time consists of, by a share of the error.
    """

    def __init__(self) -> None:
        self.is_wanted = False
        self.measured: Measurements | None = None
        self.max_tokens = 0  # the longest step
        self._tokens: list[int] = []  # points of the curve over tokens
        self._token_s: list[float] = []  # as measured, without attention
        self._token_scales: list[float] = []  # corrections, learned
        self._token_weights: list[float] = []  # how often each was corrected
        self._curve: list[float] = []  # corrected, never falling
        self._rows: list[int] = []
        self._row_s: list[float] = []  # beyond what the tokens cost
        self._row_scale = self._context_scale = self._pair_scale = 1.0
        self._left_out_s = 0.0
        self._known: StepShape | None = None  # of the last step that was learned from, if its size is known well
        self._alike: list[float] = []  # seconds of the steps since then, which are like it
        self._num_observed = 0
        self._error = 0.0  # moving mean of |log(seen / predicted)|

    # -- building -----------------------------------------------------------------------------------------------------
    def wanted(self) -> CostModel:
        """Ask for the model to be measured when the pipeline is built. Called in a hook; returns the model itself."""
        self.is_wanted = True
        return self

    def fit(self, found: Measurements) -> None:
        """Start from measurements.

        :raises ValueError: there is no point.
        """
        if not found.prompts:
            raise ValueError("a cost model needs the time of at least one step")
        self.is_wanted = True
        self.measured, self.max_tokens = found, found.max_tokens
        tokens = [n for n, _ in found.prompts]
        times: list[float] = []
        for n, seconds in found.prompts:  # attention has a term of its own; what is left cannot be less than nothing
            rest = seconds - _attention_of_prompt(found, n)
            times.append(max(rest, 0.1 * seconds, times[-1] if times else 0.0))
        while tokens[-1] < found.max_tokens:  # points to correct later
            tokens.append(min(2 * tokens[-1], found.max_tokens))
            slope = times[-1] / tokens[-2]  # of a line through nothing: at the most what a longer step takes
            if len(times) > 1 and tokens[-2] > tokens[-3]:
                slope = min(slope, (times[-1] - times[-2]) / (tokens[-2] - tokens[-3]))
            times.append(times[-1] + slope * (tokens[-1] - tokens[-2]))
        self._tokens, self._token_s = tokens, times
        self._token_scales, self._token_weights = [1.0] * len(tokens), [0.0] * len(tokens)
        self._row_scale = self._context_scale = self._pair_scale = 1.0
        self._curve = list(times)
        self._rows, self._row_s = [1], [0.0]
        for rows, seconds in found.rows:
            if rows > 1:
                extra = seconds - _interpolate(self._tokens, self._curve, rows) - 2 * rows * found.context_token_s
                self._rows.append(rows)
                self._row_s.append(max(extra, self._row_s[-1]))
        self._num_observed, self._error = 0, 0.0
        self._known = None
        self._alike.clear()

    # -- asking -------------------------------------------------------------------------------------------------------
    def step_s(
        self, num_tokens: int, num_rows: int = 1, num_context_tokens: int = 0, num_prefill_pairs: int = 0
    ) -> float:
        """Seconds of a step, with all that the host does in it.

        :param num_tokens: tokens of the forward, in all rows.
        :param num_rows: requests that they belong to.
        :param num_context_tokens: KV tokens that rows read: decodes for their newest token, chunks what earlier steps
            left, over all of them.
        :param num_prefill_pairs: tokens times context of longer rows and of drafts: see `num_pairs`.
        :raises PluginError: nothing was measured.
        """
        found = self._found()
        if num_tokens <= 0:
            return 0.0
        return (
            _interpolate(self._tokens, self._curve, num_tokens)
            + self._row_scale * _interpolate(self._rows, self._row_s, num_rows)
            + self._context_scale * found.context_token_s * num_context_tokens
            + self._pair_scale * found.prefill_pair_s * num_prefill_pairs
        )

    def batch_s(self, batch: Batch) -> float:
        """Seconds of the step of a batch."""
        shape = StepShape.of(batch)
        return self.step_s(shape.num_tokens, shape.num_rows, shape.num_context_tokens, shape.num_prefill_pairs)

    def largest_prefill(
        self,
        budget_s: float,
        num_decode_rows: int = 0,
        num_context_tokens: int = 0,
        *,
        num_computed_tokens: int = 0,
        limit: int | None = None,
    ) -> int:
        """Prompt tokens of one request that fit into a step of at most ``budget_s`` beside decodes; 0 when none do.

        :param num_decode_rows: rows of one token in the same step.
        :param num_context_tokens: KV tokens that these rows read.
        :param num_computed_tokens: where the chunk starts in its prompt; it reads the KV before that.
        :param limit: tokens that are left of the prompt, when that is less than a step holds.
        """
        self._found()
        most, context = self.max_tokens - num_decode_rows, num_context_tokens + num_computed_tokens
        low, high = 0, max(0, most if limit is None else min(limit, most))

        def fits(count: int) -> bool:
            pairs = num_pairs(count, num_computed_tokens)
            return self.step_s(num_decode_rows + count, num_decode_rows + 1, context, pairs) <= budget_s

        while low < high:
            middle = (low + high + 1) // 2
            if fits(middle):
                low = middle
            else:
                high = middle - 1
        return low

    def recompute_s(self, num_tokens: int, num_computed_tokens: int = 0) -> float:
        """Seconds to compute a request's KV from ``num_computed_tokens`` to ``num_tokens``, in steps of its own."""
        total, start = 0.0, num_computed_tokens
        while start < num_tokens:
            count = min(self.max_tokens or 1, num_tokens - start)
            total += self.step_s(count, 1, start, num_pairs(count, start))
            start += count
        return total

    def copy_s(self, num_bytes: int) -> float:
        """Seconds to copy so many bytes of KV between the pool and host memory, one way."""
        found = self._found()
        return found.copy_fixed_s + found.copy_byte_s * num_bytes if num_bytes > 0 else 0.0

    def _found(self) -> Measurements:
        if self.measured is None:
            raise PluginError(
                "the cost model was asked before it was measured. Call context.cost_model.wanted() in a hook, and ask "
                "it in a stage: it is measured at the end of build."
            )
        return self.measured

    # -- learning -----------------------------------------------------------------------------------------------------
    def leave_out(self, seconds: float) -> None:
        """Take seconds of the step that runs now out of its time, for work that says nothing of later steps.

        A drafter's, for example: who asks what a step with drafts costs adds the time of drafting himself.
        """
        self._left_out_s += seconds

    def observe(self, shape: StepShape, seconds: float) -> None:
        """Learn from a step that ran.

        Its error is shared out over the parts of the estimate by how much each contributed; a tenth of it is corrected,
        more while steps of this size are new. A step far off what was expected moves them no further than one that was
        off by a half: pauses of the machine do no harm, lasting changes are followed within some twenty steps. Of steps
        that are alike and well known, eight are learned from at once.
        """
        seconds, self._left_out_s = seconds - self._left_out_s, 0.0
        if self.measured is None or shape.num_tokens <= 0 or not seconds > 0.0:
            return
        self._num_observed += 1
        known = self._known
        if known is not None and _are_alike(shape, known):
            self._alike.append(seconds)
            if len(self._alike) == _ALIKE:
                self._learn_alike(shape)
            return
        if known is not None:
            self._learn_alike(known)
        self._known = shape if self._learn(shape, seconds) else None

    def _learn_alike(self, shape: StepShape) -> None:
        """Learn from the median of the steps that wait: in every step of a server, so it must cost little."""
        if self._alike:
            self._learn(shape, sorted(self._alike)[len(self._alike) // 2], len(self._alike))
            self._alike.clear()
            self._known = shape

    def _learn(self, shape: StepShape, seconds: float, num_steps: int = 1) -> bool:
        """Correct the model by steps of one shape; returns whether their size is known well."""
        found = self._found()
        left, share = _place(self._tokens, shape.num_tokens)
        parts = [
            (1.0 - share) * self._curve[left],
            share * self._curve[left + 1] if share else 0.0,
            self._row_scale * _interpolate(self._rows, self._row_s, shape.num_rows),
            self._context_scale * found.context_token_s * shape.num_context_tokens,
            self._pair_scale * found.prefill_pair_s * shape.num_prefill_pairs,
        ]
        if share > 1.0:  # beyond the last point: the curve goes on as a line
            parts[0], parts[1] = 0.0, _interpolate(self._tokens, self._curve, shape.num_tokens)
        expected = sum(parts)
        if not expected > 0.0:
            return False
        ratio = seconds / expected
        self._error += max(_RATE, 1.0 / self._num_observed) * (abs(math.log(ratio)) - self._error)
        surprise = min(max(ratio, 1.0 / _LARGEST_SURPRISE), _LARGEST_SURPRISE) - 1.0
        weights = [part / expected for part in parts]
        known = weights[0] * self._token_weights[left]
        known += weights[1] * self._token_weights[left + 1] if weights[1] else 0.0
        rate = max(_RATE, _FIRST_RATE / (1.0 + known))
        if num_steps > 1:
            rate = 1.0 - (1.0 - rate) ** num_steps
        gain = rate * surprise * expected / sum(part * part for part in parts)
        for index, part, weight in ((left, parts[0], weights[0]), (left + 1, parts[1], weights[1])):
            if part > 0.0:
                self._token_scales[index] = _bounded(self._token_scales[index] * (1.0 + gain * part))
                self._token_weights[index] += num_steps * weight
        self._row_scale = _bounded(self._row_scale * (1.0 + gain * parts[2]))
        self._context_scale = _bounded(self._context_scale * (1.0 + gain * parts[3]))
        self._pair_scale = _bounded(self._pair_scale * (1.0 + gain * parts[4]))
        self._correct_curve()
        return known >= _KNOWN_WEIGHT

    def _correct_curve(self) -> None:
        """The curve from points and corrections; points without steps of their own go by their neighbours'."""
        known = [i for i, weight in enumerate(self._token_weights) if weight >= _KNOWN_WEIGHT]
        scales = self._token_scales
        if known:
            values = [scales[i] for i in known]
            scales = [
                scales[i]
                if self._token_weights[i] >= _KNOWN_WEIGHT
                else values[0]
                if i < known[0]
                else values[-1]
                if i > known[-1]
                else _interpolate(known, values, i)
                for i in range(len(scales))
            ]
        highest = 0.0
        for i, (seconds, scale) in enumerate(zip(self._token_s, scales, strict=True)):
            highest = max(highest, seconds * scale)
            self._curve[i] = highest

    # -- showing ------------------------------------------------------------------------------------------------------
    def stats(self) -> dict[str, Any]:
        """Points (tokens -> milliseconds), attention terms, and how far predictions are off."""
        found = self.measured
        if found is None:
            return {"is_measured": False}
        return {
            "is_measured": True,
            "measuring_s": round(found.took_s, 3),
            "num_observed": self._num_observed,
            "relative_error": round(math.expm1(self._error), 4),
            "step_ms": {n: round(1e3 * s, 4) for n, s in zip(self._tokens, self._curve, strict=True)},
            "rows_ms": {n: round(1e3 * s * self._row_scale, 4) for n, s in zip(self._rows, self._row_s, strict=True)},
            "context_token_us": round(1e6 * found.context_token_s * self._context_scale, 5),
            "prefill_pair_us": round(1e6 * found.prefill_pair_s * self._pair_scale, 5),
            "copy_gb_s": round(1e-9 / found.copy_byte_s, 2) if found.copy_byte_s else None,
        }

    def table(self) -> str:
        """The model as text: a line per point, and the other terms."""
        found = self._found()
        measured = dict(found.prompts)
        lines = [f"{'tokens':>8} {'prompt alone':>14} {'as measured':>14} {'per token':>12}"]
        for n in self._tokens:
            now = self.step_s(n, 1, 0, num_pairs(n, 0))
            first = f"{1e3 * measured[n]:.2f} ms" if n in measured else "-"
            lines.append(f"{n:>8} {1e3 * now:>11.2f} ms {first:>14} {1e6 * now / n:>9.1f} us")
        rows = ", ".join(
            f"{n}: {1e3 * s * self._row_scale:.2f} ms" for n, s in zip(self._rows, self._row_s, strict=True) if n > 1
        )
        lines += [
            f"rows beyond the first add  {rows or 'nothing that was measured'}",
            f"a row reads a KV token in     {1e6 * found.context_token_s * self._context_scale:.3f} us",
            f"a prefill token and KV token  {1e6 * found.prefill_pair_s * self._pair_scale:.4f} us",
            f"a copy of 1 MB                {1e3 * self.copy_s(10**6):.3f} ms",
            f"{self._num_observed} steps observed, off by {math.expm1(self._error):.1%} in the mean of the last ones",
        ]
        return "\n".join(lines)


def num_pairs(num_tokens: int, num_computed_tokens: int) -> int:
    """Pairs of a token and a KV token that it reads, in a chunk that starts at ``num_computed_tokens``."""
    return num_tokens * num_computed_tokens + num_tokens * (num_tokens + 1) // 2


def _are_alike(one: StepShape, other: StepShape) -> bool:
    """Whether two steps should take about the same time."""
    return (
        one.num_tokens == other.num_tokens
        and one.num_rows == other.num_rows
        and abs(one.num_context_tokens - other.num_context_tokens) <= 0.1 * other.num_context_tokens + 64
        and abs(one.num_prefill_pairs - other.num_prefill_pairs) <= 0.1 * other.num_prefill_pairs + 64
    )


def _attention_of_prompt(found: Measurements, num_tokens: int) -> float:
    if num_tokens == 1:
        return found.context_token_s
    return found.prefill_pair_s * num_pairs(num_tokens, 0)


def _place(points: Sequence[int], x: float) -> tuple[int, float]:
    """The interval that x is in, by its left point, and the share of the way to the right one; may be beyond 1."""
    if len(points) == 1 or x <= points[0]:
        return 0, 0.0
    left = min(bisect_right(points, x) - 1, len(points) - 2)
    return left, (x - points[left]) / (points[left + 1] - points[left])


def _interpolate(points: Sequence[int], values: Sequence[float], x: float) -> float:
    left, share = _place(points, x)
    if share == 0.0:
        return values[left]
    return values[left] + share * (values[left + 1] - values[left])


def _bounded(scale: float) -> float:
    return min(max(scale, 1.0 / _SCALE_LIMIT), _SCALE_LIMIT)

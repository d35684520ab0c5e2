"""Streams beside long prompts, with prompts computed in the same process and in processes of their own.

Streams decode alone for a while, then beside one long prompt after the other. A pipeline with ``pd_separation`` in
processes keeps a part of the CPUs for prompts, also when there are none, so the pipelines are built and run one after
the other, there and back; all others have every CPU.

Prompts beside which streams are timed want one token: what they decoded further would be another stream, and no
prefill. Before and after those a prompt wants several, so that the KV that was handed over is read.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmopt.bench.serving import percentile
from llmopt.bench.target import Target
from llmopt.bench.tokens import replay
from llmopt.bench.workloads import BenchRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from llmopt.pipeline import InferencePipeline
    from llmopt.request import Request

PARTS = ("alone", "beside")
_ORDER = ("alone", "beside", "alone")  # contexts grow all the time, so those of both parts are as long in the mean
_UNAFFECTED = 1.1  # times the P99 of undisturbed streams
_CHECKED_TOKENS = 64  # of each stream; later ones are not reached by everybody
_CHECKED_NEW = 8  # tokens of a prompt beside which nothing is timed


@dataclass(frozen=True, slots=True)
class Separation:
    """Streams, and the prompts beside them."""

    num_streams: int = 4
    stream_prompt: int = 32
    long_prompt: int = 2048
    part_s: float = 4.0  # of each part, alone and beside
    max_model_len: int = 4096

    def fitted(self, max_model_len: int, *, quick: bool) -> Separation:
        """As a model with this limit can run it; small with ``quick``."""
        length = min(self.max_model_len, max_model_len)
        long_prompt = min(512 if quick else self.long_prompt, length // 2)
        return Separation(self.num_streams, self.stream_prompt, long_prompt, 1.0 if quick else self.part_s, length)


@dataclass(slots=True)
class SeparationTiming:
    """What one pipeline did in all rounds."""

    name: str
    gaps_s: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    tokens_per_s: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})  # of streams
    first_token_s: list[float] = field(default_factory=list)  # of long prompts
    # of the last round: first tokens of each stream, and tokens of each long prompt, behind their prompts
    streams: list[tuple[list[int], list[int]]] = field(default_factory=list)
    prompts: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def gap_s(self, part: str, share: float) -> float:
        """Percentile of the time between two tokens of a stream."""
        return percentile(self.gaps_s[part], share)

    def rate(self, part: str) -> float:
        """Tokens per second of all streams, median of the rounds."""
        return statistics.median(self.tokens_per_s[part])

    @property
    def first_token_p50_s(self) -> float:
        """Median time to the first token of a long prompt."""
        return statistics.median(self.first_token_s)

    @property
    def ratio(self) -> float:
        """P99 beside prompts over P99 alone."""
        return self.gap_s("beside", 0.99) / self.gap_s("alone", 0.99)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Tokens of a pipeline beside those of the baseline, of streams and prompts that both have seen."""

    num_outputs: int
    num_others: int  # outputs with another token
    gap: float = 0.0  # how far tokens of those lie below the best one of a float32 copy, in logits
    baseline_gap: float = 0.0  # of the baseline's, in the same outputs
    passed: bool = True  # the same, or near-ties

    @property
    def word(self) -> str:
        """For a table."""
        return "others" if not self.passed else "near-ties" if self.num_others else "same"

    def __str__(self) -> str:
        if not self.num_others:
            return "same tokens"
        told = f"{self.num_others} of {self.num_outputs} outputs part"
        if self.gap or self.baseline_gap:
            told += f", at most {self.gap:.2f} below the best of a float32 copy, the baseline {self.baseline_gap:.2f}"
        return f"{'same tokens up to near-ties' if self.passed else 'other tokens'} ({told})"


def compare_tokens(
    first: SeparationTiming,
    other: SeparationTiming,
    make_reference: Callable[[], PreTrainedModel | None],
    max_gap: float,
) -> Agreement:
    """Whether two pipelines gave the same tokens.

    In half precision the order of additions decides near-ties, and it depends on chunks and on who else is in the
    batch. So outputs that part are replayed, both of them, through a float32 copy.

    :param make_reference: called when outputs part: the copy, or None when the model computes in float32 itself, which
        demands the same tokens.
    :param max_gap: how far a token may lie below the best one; twice what the baseline needs itself is always allowed.
    """
    pairs = [
        *zip(first.streams, other.streams, strict=True),
        *zip(first.prompts, other.prompts, strict=False),  # as many as there was time for
    ]
    requests: list[BenchRequest] = []
    outputs: tuple[list[list[int]], list[list[int]]] = ([], [])
    for (prompt, expected), (its_prompt, found) in pairs:
        assert prompt == its_prompt
        count = min(len(expected), len(found))
        if expected[:count] != found[:count]:
            requests.append(BenchRequest(prompt, count))
            outputs[0].append(expected[:count])
            outputs[1].append(found[:count])
    if not requests:
        return Agreement(len(pairs), 0)
    reference = make_reference()
    if reference is None:
        return Agreement(len(pairs), len(requests), passed=False)
    baseline_gap, gap = (replay(reference, requests, side).max_gap for side in outputs)
    return Agreement(len(pairs), len(requests), gap, baseline_gap, gap <= max(max_gap, 2 * baseline_gap))


def run_separation(
    builders: Sequence[tuple[str, Callable[[], AbstractContextManager[InferencePipeline]]]],
    setting: Separation,
    seconds: float,
    on_progress: Callable[[str], None] = lambda name: None,
) -> list[SeparationTiming]:
    """Run every pipeline, twice when there is time.

    :param builders: row and what builds its pipeline; the first one is the baseline.
    """
    timings = [SeparationTiming(name) for name, _ in builders]
    turns = list(zip(builders, timings, strict=True))
    start, number = time.monotonic(), 0
    while number == 0 or (number < 4 and time.monotonic() - start < seconds * number / (number + 1)):
        for (name, build), timing in turns[:: -1 if number % 2 else 1]:
            on_progress(name)
            with build() as pipe:
                _run(pipe, setting, number, timing)
        number += 1
    return timings


def separation_target(timings: Sequence[SeparationTiming], agreement: Agreement, *, quick: bool) -> Target:
    """The target of the last row, which is that of `pd_separation`.

    :param agreement: its tokens beside those of the first row.
    """
    last = timings[-1]
    figure = f"{agreement}; {last.ratio:.2f} times (without: {timings[0].ratio:.1f} times)"
    text = f"same tokens, and P99 beside prompts at most {_UNAFFECTED:g} times P99 alone"
    return Target(text, figure, None if quick else agreement.passed and last.ratio <= _UNAFFECTED)


def _run(pipe: InferencePipeline, setting: Separation, number: int, timing: SeparationTiming) -> None:
    """One round: streams alone, then beside prompts. Steps are made here, so that nobody else takes time."""
    from llmopt.text import make_requests

    chooser = random.Random(number)
    vocab_size = pipe.capabilities.vocab_size
    last: dict[Request, float] = {}
    part = ""

    def listen(request: Request) -> None:
        now = time.perf_counter()
        if request in last and part:
            timing.gaps_s[part].append(now - last[request])
        last[request] = now

    def make(size: int, new: int) -> Request:
        ids = [chooser.randrange(3, vocab_size) for _ in range(size)]
        options: dict[str, Any] = {"max_new_tokens": new, "ignore_eos": True, "temperature": 0.0}
        (request,) = make_requests(pipe, ids, options)
        request.wants_text = False
        return request

    new = setting.max_model_len - setting.stream_prompt - 1
    streams = [make(setting.stream_prompt, new) for _ in range(setting.num_streams)]
    for stream in streams:
        pipe.add(stream, listen)
    # one prompt before the clock runs: buffers grow, and whoever computes prompts wakes up
    prompts: list[Request] = []
    checked = [make(setting.long_prompt, _CHECKED_NEW) for _ in range(2)]
    _compute(pipe, checked[0])
    spent = dict.fromkeys(PARTS, 0.0)
    made = dict.fromkeys(PARTS, 0)
    for part in _ORDER:  # which `listen` reads
        last.clear()
        start, before = time.perf_counter(), sum(s.num_output_tokens for s in streams)
        end = start + setting.part_s / _ORDER.count(part)
        prompt: Request | None = None
        while time.perf_counter() < end and not any(s.is_finished for s in streams):
            if part == "beside" and (prompt is None or prompt.is_finished):
                prompt = make(setting.long_prompt, 1)
                prompts.append(prompt)
                pipe.add(prompt)
            pipe.advance()
        spent[part] += time.perf_counter() - start
        made[part] += sum(s.num_output_tokens for s in streams) - before
        here, part = part, ""
        if here == "beside" and not prompts[-1].is_finished:
            _compute(pipe, prompts[-1], is_added=True)
    for name in PARTS:
        timing.tokens_per_s[name].append(made[name] / spent[name])
    timing.first_token_s += [p.first_token_s - p.arrival_s for p in prompts if p.first_token_s is not None]
    _compute(pipe, checked[1])
    timing.streams = [(stream.prompt_ids, stream.output_ids[:_CHECKED_TOKENS]) for stream in streams]
    timing.prompts = [(p.prompt_ids, p.output_ids) for p in (*checked, *prompts)]
    for stream in streams:
        pipe.abort(stream)


def _compute(pipe: InferencePipeline, request: Request, *, is_added: bool = False) -> None:
    """Step until a request has ended."""
    if not is_added:
        pipe.add(request)
    while not request.is_finished:
        pipe.advance()

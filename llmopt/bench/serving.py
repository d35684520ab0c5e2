"""Requests that arrive while others run: what a long prompt does to streams, and what a service under load feels like.

    stall        streams decode, one long prompt arrives
    arrivals50   requests at random moments (Poisson), at half of what the pipeline can serve; arrivals80, arrivals95

Tokens carry the time at which their step ended. Prompts are random ids and no output ends early, so every contender has
the same work. Times to the first token count from the moment at which the request was due, also when the sender was
late.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmopt.bench.contenders import Pipeline
    from llmopt.pipeline import InferencePipeline
    from llmopt.request import Request

DEFAULT_PLUGINS = {"stall": ("chunked_prefill",), "arrivals": ("batch_window", "pd_separation")}
LOADS = {"arrivals50": 0.50, "arrivals80": 0.80, "arrivals95": 0.95}  # of the capacity
_FIRST_TOKEN_LIMIT = 4.0  # times what the longest prompt takes alone
_GAP_LIMIT = 4.0  # times the typical gap when the pipeline is full
_CAPACITY_REQUESTS = 32


@dataclass(frozen=True, slots=True)
class Due:
    """A request that is due at some moment."""

    at_s: float  # after the start of the run
    prompt_ids: list[int]
    max_new_tokens: int


@dataclass(slots=True)
class Trace:
    """When the tokens of one request came, in seconds of time.perf_counter()."""

    due_s: float
    times: list[float] = field(default_factory=list)

    @property
    def first_token_s(self) -> float:
        """Seconds from the moment at which the request was due."""
        return self.times[0] - self.due_s

    @property
    def gaps(self) -> list[float]:
        """Seconds between two tokens."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


class Sender:
    """Sends requests to the background thread of a pipeline, and notes when their tokens come."""

    def __init__(self, pipe: InferencePipeline) -> None:
        self.pipe = pipe
        self.traces: list[Trace] = []
        self._left = 0
        self._errors: list[BaseException] = []
        self._changed = threading.Condition()
        pipe.start()

    def send(self, prompt_ids: list[int], max_new_tokens: int, due_s: float | None = None) -> Trace:
        """Send one request now."""
        from llmopt.text import make_requests

        options = {"max_new_tokens": max_new_tokens, "ignore_eos": True, "temperature": 0.0}
        (request,) = make_requests(self.pipe, prompt_ids, options)
        request.wants_text = False
        trace = Trace(time.perf_counter() if due_s is None else due_s)
        self.traces.append(trace)

        def listen(request: Request) -> None:
            now = time.perf_counter()
            trace.times.extend([now] * (request.num_output_tokens - len(trace.times)))
            with self._changed:
                if request.error is not None:
                    self._errors.append(request.error)
                self._left -= request.is_finished
                self._changed.notify_all()

        self._left += 1
        self.pipe.add(request, listen)
        return trace

    def wait(self, is_done: Callable[[], bool] | None = None) -> None:
        """Wait for the end of all requests, or for ``is_done()``.

        :raises LlmoptError: a request failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: bool(self._errors) or (self._left == 0 if is_done is None else is_done()))
        if self._errors:
            raise self._errors[0]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


# -- a long prompt beside streams ------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Stall:
    """Streams that decode, and one long prompt."""

    num_streams: int = 16
    stream_prompt: int = 32
    lead: int = 32  # tokens of each stream before the long prompt arrives, and after its first token
    num_new: int = 512  # tokens of each stream
    long_prompt: int = 4096
    long_new: int = 4

    def fitted(self, max_model_len: int, *, quick: bool) -> Stall:
        """As a model with this limit can run it; small with ``quick``."""
        long_prompt = min(1024 if quick else self.long_prompt, max_model_len - self.long_new - 1)
        num_new = min(112 if quick else self.num_new, max_model_len - self.stream_prompt - 1)
        return Stall(self.num_streams, self.stream_prompt, min(self.lead, num_new // 4), num_new, long_prompt)


@dataclass(slots=True)
class StallTiming:
    """What one contender did; lists have one value per round."""

    name: str
    calm_s: list[float] = field(default_factory=list)  # median gap before the prompt arrived
    calm_p99_s: list[float] = field(default_factory=list)  # what the machine's own noise does
    median_s: list[float] = field(default_factory=list)  # of gaps around the prompt: `lead` tokens before and after
    p99_s: list[float] = field(default_factory=list)
    largest_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)  # of the long prompt
    tokens_per_s: list[float] = field(default_factory=list)  # prompt and new tokens of the whole run

    @property
    def ratio(self) -> float:
        """P99 over the gap of undisturbed streams, best round."""
        return min(p99 / calm for p99, calm in zip(self.p99_s, self.calm_s, strict=True))

    @property
    def p99_over_p50(self) -> float:
        """P99 over the median of the same window, best round."""
        return min(p99 / p50 for p99, p50 in zip(self.p99_s, self.median_s, strict=True))


def run_stall(contender: Pipeline, stall: Stall, vocab_size: int, number: int, timing: StallTiming) -> None:
    """One round; another number gives other ids."""
    rng = random.Random(number)
    sender = Sender(contender.pipe)
    start = time.perf_counter()
    streams = [sender.send(_ids(rng, stall.stream_prompt, vocab_size), stall.num_new) for _ in range(stall.num_streams)]
    sender.wait(lambda: all(len(trace.times) >= stall.lead for trace in streams))
    long = sender.send(_ids(rng, stall.long_prompt, vocab_size), stall.long_new)
    sender.wait()
    seconds = time.perf_counter() - start
    calm: list[float] = []
    around: list[float] = []
    for trace in streams:
        before = sum(moment <= long.due_s for moment in trace.times)
        until = sum(moment <= long.times[0] for moment in trace.times) + stall.lead
        calm += trace.gaps[1 : before - 1]
        around += trace.gaps[max(1, before - stall.lead) : until]
    timing.calm_s.append(statistics.median(calm))
    timing.calm_p99_s.append(percentile(calm, 0.99))
    timing.median_s.append(statistics.median(around))
    timing.p99_s.append(percentile(around, 0.99))
    timing.largest_s.append(max(around))
    timing.first_token_s.append(long.first_token_s)
    num_tokens = stall.num_streams * (stall.stream_prompt + stall.num_new) + stall.long_prompt + stall.long_new
    timing.tokens_per_s.append(num_tokens / seconds)


# -- random arrivals -------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Mix:
    """What the requests are like: mostly short prompts, some long ones, outputs of all lengths."""

    prompts: tuple[tuple[int, float], ...] = ((32, 0.5), (256, 0.35), (1024, 0.15))  # tokens, share
    shortest_new: int = 16
    longest_new: int = 64

    def fitted(self, max_model_len: int) -> Mix:
        """As a model with this limit can run it."""
        room = max(1, max_model_len - self.longest_new - 1)
        return Mix(tuple((min(size, room), share) for size, share in self.prompts), self.shortest_new, self.longest_new)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(size for size, _ in self.prompts)

    def requests(self, rng: random.Random, count: int, vocab_size: int) -> list[Due]:
        """So many requests that are all due at once."""
        sizes, shares = zip(*self.prompts, strict=True)
        made = []
        for _ in range(count):
            prompt = _ids(rng, rng.choices(sizes, shares)[0], vocab_size)
            made.append(Due(0.0, prompt, rng.randint(self.shortest_new, self.longest_new)))
        return made

    def arrivals(self, rng: random.Random, rate: float, seconds: float, vocab_size: int) -> list[Due]:
        """Requests at random moments, ``rate`` per second on average."""
        made: list[Due] = []
        moment = rng.expovariate(rate)
        while moment < seconds or not made:
            (due,) = self.requests(rng, 1, vocab_size)
            made.append(Due(moment, due.prompt_ids, due.max_new_tokens))
            moment += rng.expovariate(rate)
        return made


@dataclass(frozen=True, slots=True)
class Capacity:
    """What the first contender can do, and the limits that follow from it."""

    requests_per_s: float  # when all are there at once
    first_token_limit_s: float
    gap_limit_s: float


@dataclass(slots=True)
class LoadTiming:
    """What one contender did under one load."""

    name: str
    seconds: float
    traces: list[Trace]
    capacity: Capacity

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second, from the start to the last token."""
        return sum(len(trace.times) for trace in self.traces) / self.seconds

    def first_token_s(self, share: float) -> float:
        """Percentile of the time to the first token."""
        return percentile([trace.first_token_s for trace in self.traces], share)

    def gap_s(self, share: float) -> float:
        """Percentile of the time between two tokens."""
        return percentile([gap for trace in self.traces for gap in trace.gaps], share)

    @property
    def num_good(self) -> int:
        """Requests within the limits: the time to the first token, and every gap after it."""
        limits = self.capacity
        return sum(
            trace.first_token_s <= limits.first_token_limit_s and max(trace.gaps, default=0.0) <= limits.gap_limit_s
            for trace in self.traces
        )

    @property
    def goodput(self) -> float:
        """Requests within the limits, per second."""
        return self.num_good / self.seconds


def warm_up(contender: Pipeline, mix: Mix, vocab_size: int) -> None:
    """Let buffers grow and threads start: the longest prompt beside a short one."""
    sender = Sender(contender.pipe)
    for size in (mix.longest_prompt, 8):
        sender.send(_ids(random.Random(size), size, vocab_size), mix.shortest_new)
    sender.wait()


def measure_capacity(contender: Pipeline, mix: Mix, vocab_size: int, *, quick: bool) -> Capacity:
    """Send many requests at once; then the longest prompt alone."""
    rng = random.Random(7)
    sender = Sender(contender.pipe)
    requests = mix.requests(rng, _CAPACITY_REQUESTS // (4 if quick else 1), vocab_size)
    start = time.perf_counter()
    for due in requests:
        sender.send(due.prompt_ids, due.max_new_tokens)
    sender.wait()
    seconds = time.perf_counter() - start
    gap = statistics.median(gap for trace in sender.traces for gap in trace.gaps)
    alone = sender.send(_ids(rng, mix.longest_prompt, vocab_size), 1)
    sender.wait()
    return Capacity(len(requests) / seconds, _FIRST_TOKEN_LIMIT * alone.first_token_s, _GAP_LIMIT * gap)


def run_load(contender: Pipeline, arrivals: Sequence[Due], timing: LoadTiming) -> None:
    """Send requests when they are due, wait for their end, and add what came of them."""
    sender = Sender(contender.pipe)
    start = time.perf_counter()
    for due in arrivals:
        moment = start + due.at_s
        delay = moment - time.perf_counter()
        if delay > 0:
            time.sleep(delay)
        sender.send(due.prompt_ids, due.max_new_tokens, moment)
    sender.wait()
    timing.seconds += time.perf_counter() - start
    timing.traces += sender.traces


def _ids(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randrange(min(10, vocab_size - 1), vocab_size) for _ in range(count)]

"""A request, from arrival to finish, and what its sampling asks for."""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from llmopt.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

    from llmopt.batch import AcceptedTokens


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request chooses its tokens. ``temperature == 0`` is greedy; "off" values are listed per field."""

    max_new_tokens: int | None = None  # None: until the context is full
    min_new_tokens: int = 0  # stop ids and stop strings are ignored before
    temperature: float = 0.0  # 0 (and anything up to 1e-5): greedy
    top_k: int = 0  # 0 and -1: off
    top_p: float = 1.0  # 1: off; the best token always survives
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # over prompt and output, as in Hugging Face; 1: off
    presence_penalty: float = 0.0  # over the output only, once per id
    frequency_penalty: float = 0.0  # over the output only, per occurrence
    logit_bias: Mapping[int, float] | None = None  # token id -> number added to its logit
    seed: int | None = None  # None: a new seed per request
    n: int = 1  # independent continuations of the prompt
    stop: tuple[str, ...] = ()  # strings that end the output; they are not part of the text
    stop_token_ids: tuple[int, ...] = ()  # ids that end the output, beside the model's eos ids
    ignore_eos: bool = False  # go on after the model's eos ids
    skip_special_tokens: bool = True  # leave special tokens out of the text

    def __post_init__(self) -> None:
        self._check_types()
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        checks: tuple[tuple[bool, str, object], ...] = (
            (self.max_new_tokens is None or self.max_new_tokens >= 1, "max_new_tokens >= 1", self.max_new_tokens),
            (self.min_new_tokens >= 0, "min_new_tokens >= 0", self.min_new_tokens),
            (self.max_new_tokens is None or self.min_new_tokens <= self.max_new_tokens,
             f"min_new_tokens <= max_new_tokens (which is {self.max_new_tokens})", self.min_new_tokens),
            (self.temperature >= 0.0, "temperature >= 0", self.temperature),
            (self.top_k >= -1, "top_k >= -1", self.top_k),
            (0.0 <= self.top_p <= 1.0, "0 <= top_p <= 1", self.top_p),
            (0.0 <= self.min_p <= 1.0, "0 <= min_p <= 1", self.min_p),
            (self.repetition_penalty > 0.0, "repetition_penalty > 0", self.repetition_penalty),
            (self.n >= 1, "n >= 1", self.n),
            (all(isinstance(s, str) and s for s in self.stop), "stop strings that are not empty", self.stop),
            (all(_is_int(i) for i in self.stop_token_ids), "stop_token_ids that are ints", self.stop_token_ids),
        )  # fmt: skip
        for holds, want, found in checks:
            if not holds:
                raise RequestError(f"sampling parameters need {want}, found {found!r}.")

    def _check_types(self) -> None:
        """Refuse what cannot be compared with a limit, so that it does not fail in the middle of a step."""
        for name in ("max_new_tokens", "min_new_tokens", "top_k", "seed", "n"):
            value = getattr(self, name)
            if not (_is_int(value) or (value is None and name in ("max_new_tokens", "seed"))):
                raise RequestError(f"sampling parameters need {name} as an int, found {value!r}.")
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not _is_finite(value):
                raise RequestError(f"sampling parameters need {name} as a finite number, found {value!r}.")
        for name in ("stop", "stop_token_ids"):
            if not isinstance(getattr(self, name), Iterable):
                raise RequestError(f"sampling parameters need {name} as a list, found {getattr(self, name)!r}.")
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias maps token ids to numbers, as a dict, found {self.logit_bias!r}.")
        for token_id, bias in (self.logit_bias or {}).items():
            if not _is_int(token_id) or not _is_finite(bias):
                raise RequestError(f"logit_bias maps token ids (ints) to finite numbers, found {token_id!r}: {bias!r}.")

    @property
    def is_greedy(self) -> bool:
        """Whether the best token is always taken."""
        return self.temperature <= 1e-5

    @property
    def changes_logits(self) -> bool:
        """Whether logits are edited before a token is chosen."""
        return self.has_penalties or self.min_new_tokens > 0

    @property
    def has_penalties(self) -> bool:
        """Whether logits are edited by anything but the minimum length."""
        return bool(
            self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty or self.logit_bias
        )


def _is_int(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


class RequestStatus(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"  # holds no KV
    RUNNING = "running"  # holds KV
    FINISHED = "finished"  # `finish_reason` says why


class Lockstep(Protocol):
    """Requests that choose their tokens together, because something sees all of them at once.

    `Verify` hands over one row of logits per request; when every unfinished request has delivered, it calls `choose`.
    """

    def put(self, request: Request, logits: Tensor) -> bool:
        """Store one row of logits, ``[vocab]``. Returns whether the group is complete and `choose` may be called."""

    def choose(self) -> AcceptedTokens:
        """Choose one token for every request that goes on, and say which of them end with it."""


@dataclass(slots=True, eq=False)
class Request:
    """One sequence on its way through the pipeline. Owned by scheduling; later stages read it."""

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    max_len: int  # prompt and output may hold this many tokens
    eos_token_ids: frozenset[int] = frozenset()  # ids that end the output, `stop_token_ids` included
    arrival_s: float = field(default_factory=time.perf_counter)
    priority: int = 0  # smaller runs first, for schedulers that care
    tenant: str | None = None  # on whose behalf, for schedulers that share fairly; None is a tenant like any other
    deadline_s: float | None = None  # seconds from arrival to the last token, for schedulers that refuse what is late
    seed: int = 0  # the random stream of this request
    parent: Request | None = None  # the request with the same prompt whose KV is shared (n > 1)
    lockstep: Lockstep | None = None  # the group that chooses this request's tokens
    adapter: str | None = None  # name of the LoRA adapter
    cache_salt: str | None = None  # KV is shared with requests of the same salt only, for plugins that keep it
    constraint: Any = None  # state of a grammar, owned by `constrain`
    media: Any = None  # inputs beside the ids, owned by `encode_media` and `execute`; the ids then only hold places
    companions: object | None = None  # requests with the same object share one prefill, of whole prompts
    logits_processors: Sequence[Callable[[np.ndarray, Tensor], Tensor]] = ()  # (ids [L], logits [V]) -> logits [V]
    wants_text: bool = True  # whether `detokenize` is called for it
    keep_blocks: bool = False  # after the finish, KV and slot stay until `InferencePipeline.release`

    status: RequestStatus = RequestStatus.WAITING
    num_tokens: int = 0  # prompt and output so far
    num_computed_tokens: int = 0  # tokens whose KV is in the pool
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # prompt tokens that `lookup` found in the pool
    block_table: list[int] = field(default_factory=list)  # block ids, in order of position; some may be GIVEN_BACK
    slot: int = -1  # number among the running requests; row of the recurrent states for models that have them
    token_ids: np.ndarray = field(init=False)  # [max_len] int64; the first `num_tokens` are set
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    stop_reason: int | str | None = None  # the id or string that ended the output
    error: BaseException | None = None
    text: str = ""  # text that can no longer change, stop strings cut
    takes_best: bool = field(init=False)  # greedy, and nothing edits the logits but `min_new_tokens`
    text_state: Any = None  # state of the detokenizer, owned by `detokenize`
    first_token_s: float | None = None  # time stamps of time.perf_counter()
    finished_s: float | None = None

    def __post_init__(self) -> None:
        prompt = np.asarray(self.prompt_ids, dtype=np.int64)
        self.token_ids = np.empty(max(self.max_len, prompt.size), dtype=np.int64)
        self.token_ids[: prompt.size] = prompt
        self.num_tokens = int(prompt.size)
        params = self.sampling
        self.takes_best = params.is_greedy and not params.has_penalties and not self.logits_processors

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens chosen so far."""
        return self.num_tokens - len(self.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        """The tokens chosen so far."""
        ids: list[int] = self.token_ids[len(self.prompt_ids) : self.num_tokens].tolist()
        return ids

    @property
    def is_finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.status is RequestStatus.FINISHED

    def append(self, token_id: int) -> None:
        """Add one chosen token."""
        self.token_ids[self.num_tokens] = token_id
        self.num_tokens += 1

    def finish(self, reason: str, error: BaseException | None = None) -> None:
        """Mark the request as finished. Its KV is freed by whoever owns it."""
        self.status = RequestStatus.FINISHED
        self.finish_reason = reason
        self.error = error
        self.finished_s = time.perf_counter()

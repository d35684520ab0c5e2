"""Text in, text out: one request as a stream, many as a batch."""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from llmopt import recovery
from llmopt.errors import RequestError
from llmopt.hf.fields import FIELDS
from llmopt.request import Request, SamplingParams

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from llmopt.pipeline import InferencePipeline
    from llmopt.stages import Prompt

logger = logging.getLogger("llmopt")

_SAMPLING = {f.name for f in fields(SamplingParams)}
_REQUEST = {"request_id", "priority", "tenant", "deadline_s", "adapter", "cache_salt", "logits_processors"}
_numbers = itertools.count()


@dataclass(slots=True)
class TextOutput:
    """What became of one request."""

    request_id: str
    prompt_ids: list[int]
    token_ids: list[int]  # the output, the id that ended it included
    text: str  # stop strings, and the id that ended it, left out
    finish_reason: str  # "stop", "length", "abort" or "error"
    stop_reason: int | str | None  # the id or the string that ended it
    error: BaseException | None  # set when finish_reason is "error" or "abort"
    num_cached_tokens: int  # prompt tokens whose KV was in the pool already when the request started
    ttft_s: float | None  # from arrival to the first token
    latency_s: float | None  # from arrival to the end

    @classmethod
    def of(cls, request: Request) -> TextOutput:
        """The output of a finished request."""
        first, end, start = request.first_token_s, request.finished_s, request.arrival_s
        return cls(
            request_id=request.request_id,
            prompt_ids=list(request.prompt_ids),
            token_ids=request.output_ids,
            text=request.text,
            finish_reason=request.finish_reason or "",
            stop_reason=request.stop_reason,
            error=request.error,
            num_cached_tokens=request.num_cached_tokens,
            ttft_s=None if first is None else first - start,
            latency_s=None if end is None else end - start,
        )


def sampling_params(
    config: GenerationConfig, given: SamplingParams | None, options: Mapping[str, Any]
) -> SamplingParams:
    """Sampling parameters from keyword arguments; what is not given, or None, comes from the generation config.

    Read from it: ``max_new_tokens``, ``repetition_penalty`` and, with ``do_sample``, ``temperature``, ``top_k``,
    ``top_p`` and ``min_p``; its end ids are read by `make_requests`. Its other fields have no effect on requests of
    ``stream``, ``batch`` and ``submit``; `generate` follows all of them.

    :raises RequestError: for names that do not exist, and values out of range.
    """
    unknown = set(options) - _SAMPLING
    if unknown:
        raise RequestError(
            f"unknown options {', '.join(sorted(unknown))}. Options: {', '.join(sorted(_SAMPLING | _REQUEST))}."
        )
    if given is not None:
        if not isinstance(given, SamplingParams):
            raise RequestError(f"sampling must be SamplingParams, found {type(given).__name__}.")
        values = {name: getattr(given, name) for name in _SAMPLING}
    else:
        values = {
            "max_new_tokens": config.max_new_tokens,
            "repetition_penalty": config.repetition_penalty or 1.0,
        }
        if config.do_sample:
            values |= {
                "temperature": 1.0 if config.temperature is None else config.temperature,
                "top_k": 50 if config.top_k is None else config.top_k,
                "top_p": 1.0 if config.top_p is None else config.top_p,
                "min_p": config.min_p or 0.0,
            }
    return SamplingParams(**{**values, **{name: value for name, value in options.items() if value is not None}})


_READ = {"max_new_tokens", "repetition_penalty", "do_sample", "temperature", "top_k", "top_p", "min_p", "eos_token_id"}
_NEUTRAL = {"pad_token_id", "bos_token_id", "use_cache", "cache_implementation", "max_length"}  # no choice of tokens


_OFF_AT_ONE = {"num_beams", "num_return_sequences", "typical_p", "guidance_scale", "encoder_repetition_penalty"}


def _is_on(name: str, value: Any) -> bool:
    """Whether a field of a generation config asks for anything."""
    if name.endswith("_id"):
        return value is not None  # 0 is an id
    return bool(value) and not (name in _OFF_AT_ONE and value == 1)


def _note_ignored(pipeline: InferencePipeline, config: GenerationConfig) -> None:
    """Warn once per pipeline of fields of the model's generation config that would change what is generated."""
    if pipeline.has_noted_ignored:
        return
    pipeline.has_noted_ignored = True
    ignored = [
        name
        for name, served in FIELDS.items()
        if served.way != "no effect"
        and name not in _READ | _NEUTRAL
        and not name.startswith(("output_", "return_"))
        and _is_on(name, getattr(config, name, None))
    ]
    if ignored:
        logger.warning(
            "stream, batch and submit do not read these fields of the model's generation config: %s. `generate` does.",
            ", ".join(sorted(ignored)),
        )


def make_requests(pipeline: InferencePipeline, prompt: Prompt, options: Mapping[str, Any]) -> list[Request]:
    """Requests for one prompt, one for each of its ``n`` continuations.

    :raises RequestError: bad prompt or parameters.
    :raises UnsupportedModelError: the engine cannot run the model.
    """
    pipeline.check_supported()
    options = dict(options)
    request_id = str(options.pop("request_id", None) or f"request-{next(_numbers)}")
    others = {name: options.pop(name) for name in list(options) if name in _REQUEST}
    processors = others.get("logits_processors", ())
    if not isinstance(processors, Sequence) or not all(map(callable, processors)):
        raise RequestError(f"logits_processors must be a list of callables, found {processors!r}.")
    _check_service(others)
    config = pipeline.model.generation_config
    given = options.pop("sampling", None)
    _note_ignored(pipeline, config)
    params = sampling_params(config, given, options)
    with recovery.naming(pipeline.registry, f"request {request_id!r}"):
        prompt_ids = pipeline.tokenize(prompt)
        if not isinstance(prompt_ids, list):
            raise recovery.WrongResultError("tokenize", prompt_ids, "a list of ids")
    limit = pipeline.max_model_len
    if given is None and options.get("max_new_tokens") is None and params.max_new_tokens is not None:
        # the model's own wish, which the caller did not choose: what fits of it
        room = max(1, limit - len(prompt_ids), params.min_new_tokens)
        params = replace(params, max_new_tokens=min(params.max_new_tokens, room))
    new = params.max_new_tokens
    max_len = max(len(prompt_ids) + 1, limit) if new is None else len(prompt_ids) + new
    eos = config.eos_token_id
    ends = set(params.stop_token_ids)
    if eos is not None and not params.ignore_eos:
        ends |= set(eos) if isinstance(eos, (list, tuple)) else {int(eos)}
    seed = secrets.randbits(63) if params.seed is None else params.seed
    requests: list[Request] = []
    for number in range(params.n):
        requests.append(
            Request(
                request_id=request_id if params.n == 1 else f"{request_id}-{number}",
                prompt_ids=prompt_ids,
                sampling=params,
                max_len=max_len,
                eos_token_ids=frozenset(ends),
                seed=seed + number * 0x5851F42D4C957F2D,  # far apart, so that streams do not overlap
                parent=requests[0] if number else None,
                wants_text=pipeline.tokenizer is not None,
                **others,
            )
        )
    return requests


def _check_service(others: Mapping[str, Any]) -> None:
    """Refuse values that a scheduler could not compare, and salts that are no text.

    :raises RequestError: names the option.
    """
    priority, tenant, deadline_s = others.get("priority", 0), others.get("tenant"), others.get("deadline_s")
    if not isinstance(priority, Integral) or isinstance(priority, bool):
        raise RequestError(f"priority must be an int, smaller runs first; found {priority!r}.")
    if tenant is not None and not isinstance(tenant, str):
        raise RequestError(f"tenant must be a text, found {tenant!r}.")
    salt = others.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        raise RequestError(f"cache_salt must be a text, found {salt!r}.")
    is_number = isinstance(deadline_s, Real) and not isinstance(deadline_s, bool)
    if deadline_s is not None and not (is_number and deadline_s > 0):
        raise RequestError(f"deadline_s must be a number of seconds above 0, found {deadline_s!r}.")


def stream(pipeline: InferencePipeline, prompt: Prompt, **options: Any) -> Iterator[str]:
    """Yield the text of one request as it comes.

    Pieces join to the whole text. Half characters and possible stop strings are held back until they are decided.
    The request is aborted when the generator is closed early.

    :param prompt: text, chat messages, or token ids.
    :param options: fields of `SamplingParams` (also as ``sampling=``), ``request_id``, ``priority``, ``tenant``,
        ``deadline_s``, ``adapter``, ``cache_salt``, ``logits_processors``. What is not given comes from the model's
        generation config: see `sampling_params`, which says which of its fields count.
    :raises RequestError: bad prompt or parameters, at the call and not at the first piece.
    """
    requests = make_requests(pipeline, prompt, options)
    if len(requests) != 1:
        raise RequestError(f"a stream has one continuation, n={len(requests)} was asked for. Use batch, or a "
                           "stream for each.")  # fmt: skip
    (request,) = requests
    if not request.wants_text:
        raise RequestError("a stream needs a tokenizer, and the pipeline has none. Pass tokenizer=... to build.")
    pipeline.add(request)
    pieces = _pieces(pipeline, request)
    next(pieces)  # enters the block that aborts the request when the generator goes, also when it is never read
    return pieces


def _pieces(pipeline: InferencePipeline, request: Request) -> Iterator[str]:
    done = 0

    def has_news() -> bool:
        return len(request.text) > done or request.is_finished

    try:
        yield ""
        while True:
            pipeline.wait(has_news)
            piece = request.text[done:]
            done += len(piece)
            if not piece:
                break
            yield piece
        if request.error is not None:
            raise request.error
    finally:
        pipeline.abort(request)


def batch(
    pipeline: InferencePipeline, requests: Iterable[Any], *, progress: bool = True, **options: Any
) -> list[TextOutput]:
    """Run many requests at once and return their outputs in order, ``n`` of them for each.

    A request that fails ends with ``finish_reason == "error"`` and its error; the others go on.

    :param requests: prompts, or dicts with ``prompt`` and the options of that request.
    :param progress: show a progress bar.
    :param options: defaults for all requests.
    :raises RequestError: a request is malformed or can never run; nothing is started then.
    """
    _check_is_many(requests)
    made: list[Request] = []
    for number, entry in enumerate(requests):
        own: dict[str, Any] = {"prompt": entry}
        if isinstance(entry, Mapping):
            own = dict(entry)
            if "prompt" not in own:
                raise RequestError(f"requests[{number}] is a dict without 'prompt'.")
        prompt = own.pop("prompt")
        made += make_requests(pipeline, prompt, {**options, **own})
    pipeline.add_all(made)
    try:
        with _progress(len(made), progress) as show:
            while any(not r.is_finished for r in made):
                count = sum(r.is_finished for r in made)
                pipeline.wait(lambda seen=count: sum(r.is_finished for r in made) > seen)  # type: ignore[misc]
                show(sum(r.is_finished for r in made), sum(r.num_output_tokens for r in made))
    finally:
        for request in made:
            pipeline.abort(request)
    return [TextOutput.of(r) for r in made]


def _check_is_many(requests: Any) -> None:
    """Refuse one prompt where many are wanted.

    :raises RequestError: says what to write instead.
    """
    if isinstance(requests, (str, bytes)):
        raise RequestError(f"batch takes a list of prompts, found the text {requests[:40]!r}. Write batch([prompt]).")
    if isinstance(requests, Mapping) or not isinstance(requests, Iterable):
        raise RequestError(f"batch takes a list of prompts, found {type(requests).__name__}. Write batch([...]).")
    first = requests[0] if isinstance(requests, Sequence) and requests else None
    if isinstance(first, Mapping) and "role" in first and "prompt" not in first:
        raise RequestError("batch takes a list of prompts, found one list of messages. Write batch([messages]).")
    if isinstance(first, Integral):
        raise RequestError("batch takes a list of prompts, found one list of token ids. Write batch([ids]).")


@contextlib.contextmanager
def _progress(total: int, wanted: bool) -> Iterator[Any]:
    """A bar that counts finished requests and tokens."""
    if not wanted:
        yield lambda done, tokens: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens"))
    with Progress(*columns, TimeElapsedColumn()) as bar:
        task = bar.add_task("requests", total=total, tokens=0)
        yield lambda done, tokens: bar.update(task, completed=done, tokens=tokens)

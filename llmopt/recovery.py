"""After a step that raised: find the requests that make it raise, end those, and let the others go on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from llmopt.batch import AcceptedTokens, Batch, BestTokens, DraftTokens, StepOutput
from llmopt.errors import LlmoptError, StageError
from llmopt.request import Request, RequestStatus

if TYPE_CHECKING:
    from llmopt.pipeline import InferencePipeline
    from llmopt.registry import Registry


@contextlib.contextmanager
def naming(registry: Registry, what: str) -> Iterator[None]:
    """Give unexpected exceptions of a stage the name of stage and plugin."""
    try:
        yield
    except LlmoptError:
        raise
    except Exception as error:
        raise _stage_error(registry, error, what) from error


def named(registry: Registry, error: BaseException, what: str) -> LlmoptError:
    """An error that names stage and plugin; errors that this library raised on purpose say enough already.

    :param what: whom it concerns, for example ``"request 'a'"``.
    """
    return error if isinstance(error, LlmoptError) else _stage_error(registry, error, what)


class WrongResultError(TypeError):
    """A stage returned something that its protocol does not allow."""

    def __init__(self, stage: str, found: object, wanted: str) -> None:
        super().__init__(f"stage {stage!r} returned {_short(found)}; it returns {wanted}")
        self.stage, self.found, self.wanted = stage, found, wanted


def checked_output(output: StepOutput) -> StepOutput:
    """What `commit` returned, if it is what it must be: nothing after it in the step would notice.

    :raises WrongResultError: it is something else.
    """
    if not isinstance(output, StepOutput):
        raise WrongResultError("commit", output, "a StepOutput")
    return output


def _wrong_result(registry: Registry, error: BaseException) -> WrongResultError | None:
    """What a stage returned and another one stumbled over, read from the variables of the step that raised."""
    if isinstance(error, WrongResultError):
        return error
    if not isinstance(error, (TypeError, AttributeError, ValueError)):
        return None
    from llmopt.pipeline import InferencePipeline

    trace, step = error.__traceback__, InferencePipeline.step.__code__
    while trace is not None and trace.tb_frame.f_code is not step:
        trace = trace.tb_next
    if trace is None:
        return None
    seen = trace.tb_frame.f_locals
    pair = seen.get("exchanged")
    is_pair = isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], Batch) and _is_drafts(pair[1])
    if (
        "exchanged" in seen and not is_pair and registry.chains["exchange"].plugins
    ):  # the plain one hands on what it got
        return WrongResultError("exchange", pair, "a Batch with DraftTokens or None")
    if not isinstance(seen.get("batch"), Batch):
        return WrongResultError("schedule", seen.get("batch"), "a Batch or None")
    if not _is_drafts(seen.get("drafts")):
        return WrongResultError("propose", seen.get("drafts"), "DraftTokens or None")
    if not hasattr(seen.get("mask"), "apply") and seen.get("mask") is not None:
        return WrongResultError("constrain", seen["mask"], "a LogitsMask or None")
    if "logits" in seen and not isinstance(seen["logits"], (Tensor, BestTokens)):
        return WrongResultError("execute", seen["logits"], "a Tensor, or BestTokens")
    if "accepted" in seen and not isinstance(seen["accepted"], AcceptedTokens):
        return WrongResultError("verify", seen["accepted"], "AcceptedTokens")
    return None


def _is_drafts(value: object) -> bool:
    return value is None or isinstance(value, DraftTokens)


def _short(value: object) -> str:
    """A value for a message: arrays and batches are long."""
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


def _stage_error(registry: Registry, error: BaseException, what: str) -> StageError:
    wrong = _wrong_result(registry, error)
    plugins = registry.chains[wrong.stage].plugins if wrong is not None else []
    if wrong is not None and plugins:
        who = f"plugin {' or '.join(map(repr, plugins))}"
        told = StageError(f"{who} returned {_short(wrong.found)} from stage {wrong.stage!r} for {what}; it returns "
                          f"{wrong.wanted}.")  # fmt: skip
        told.__cause__ = error
        return told
    stage, plugin = registry.blame(error)
    where = "outside of the stages" if stage is None else f"in stage {stage!r}"
    who = "the baseline" if plugin == "baseline" else f"plugin {plugin!r}"
    told = StageError(f"{who} failed {where} for {what}: {type(error).__name__}: {error}")
    told.__cause__ = error
    return told


def restart(pipeline: InferencePipeline, requests: Sequence[Request]) -> None:
    """Send running requests back to the head of the line, in their order: what the cache holds of them is unknown."""
    for request in reversed(requests):
        if request.status is RequestStatus.RUNNING:
            pipeline.allocate.free(request)
            pipeline.queue.preempt(request)


def isolate(pipeline: InferencePipeline, error: Exception) -> StepOutput:
    """Run the requests of a failed step one by one, each from its start, and end those that fail alone.

    A lockstep group chooses for all of its rows at once, and cannot do so twice; when it may have chosen before the
    exception came, it ends.
    """
    queue = pipeline.queue
    stage, _ = pipeline.registry.blame(error)
    running, waiting = list(queue.running), list(queue.waiting)
    has_chosen = stage in ("verify", "commit", None)
    restart(pipeline, running)
    total = StepOutput()
    if len(running) + len(waiting) == 1:
        fail(pipeline, (running + waiting)[0], error, total)
        return total
    for request in running:
        _run_alone(pipeline, request, error if request.lockstep is not None and has_chosen else None, total)
    if stage == "schedule" or not running:  # then a request that was about to start may be the reason
        for request in waiting:
            if any(r.finish_reason == "error" for r in total.finished):
                break
            _run_alone(pipeline, request, None, total)
    return total


def _run_alone(pipeline: InferencePipeline, request: Request, verdict: Exception | None, total: StepOutput) -> None:
    """One step with a queue that shows this request only.

    :param verdict: the error with which it ends without another try.
    """
    if request.is_finished:
        return
    if verdict is not None:
        fail(pipeline, request, verdict, total)
        return
    whole, view = pipeline.queue, pipeline.queue.only(request)
    own_error: Exception | None = None
    output = StepOutput()
    pipeline.queue = view
    try:
        output = checked_output(pipeline.step())
    except Exception as raised:
        own_error = raised
    finally:
        pipeline.queue = whole
        whole.absorb(view)
    if own_error is not None:
        fail(pipeline, request, own_error, total)
        return
    total.num_tokens += output.num_tokens
    total.num_new_tokens += output.num_new_tokens
    total.advanced += output.advanced
    total.finished += output.finished


def fail(pipeline: InferencePipeline, request: Request, error: BaseException, output: StepOutput) -> None:
    """End a request, and with it its lockstep group, with an error that says why: see `named`."""
    told = named(pipeline.registry, error, f"request {request.request_id!r}")
    for member in list(pipeline.queue):
        if member is request or (request.lockstep is not None and member.lockstep is request.lockstep):
            member.finish("error", told)
            pipeline.queue.remove(member)
            pipeline.allocate.free(member)
            output.finished.append(member)


def end_all(pipeline: InferencePipeline, error: BaseException) -> StepOutput:
    """End every request with this error: the last resort, so that nobody waits for ever."""
    output = StepOutput()
    for request in list(pipeline.queue):
        request.finish("error", _stage_error(pipeline.registry, error, f"request {request.request_id!r}"))
        pipeline.queue.remove(request)
        with contextlib.suppress(Exception):  # perhaps the very thing that fails
            pipeline.allocate.free(request)
        output.finished.append(request)
    return output

"""The inference pipeline: one object per model, one callable per stage, and the step that calls them."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from llmopt import recovery
from llmopt.batch import BestTokens, StepOutput
from llmopt.cost_model import StepShape
from llmopt.errors import PipelineClosedError, RequestAbortedError, RequestError, UnsupportedModelError
from llmopt.request import Request, RequestStatus
from llmopt.spoiled_rows import repeat_without_drafts
from llmopt.step_lock import StepLock
from llmopt.threads import one_torch_thread

if TYPE_CHECKING:
    from types import SimpleNamespace

    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from llmopt.batch_builder import BatchBuilder
    from llmopt.block_pool import BlockPool
    from llmopt.config import PipelineConfig
    from llmopt.cost_model import CostModel
    from llmopt.describe import Description
    from llmopt.hf.capabilities import Capabilities
    from llmopt.hf.generate import Generate
    from llmopt.kv_cache import KVCache
    from llmopt.queue import RequestQueue
    from llmopt.registry import Registry
    from llmopt.stages import (
        Adapt,
        Admit,
        Allocate,
        Budget,
        Commit,
        Constrain,
        Detokenize,
        EncodeMedia,
        Exchange,
        Execute,
        Lookup,
        Machine,
        Order,
        Prompt,
        Propose,
        Schedule,
        Tokenize,
        Verify,
    )
    from llmopt.submit import RequestHandle
    from llmopt.text import TextOutput


logger = logging.getLogger("llmopt")

_IDLE_S = 0.01  # a scheduler that runs nothing and names no time is asked again after this


class InferencePipeline:
    """Runs requests through the stages. Made by `llmopt.build`, which sets every attribute below.

    With no plugin, each stage is the object in ``baseline`` of the same name.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    config: PipelineConfig
    registry: Registry
    machine: Machine
    capabilities: Capabilities
    why_not: str | None  # why the engine cannot run this model; None when it can
    max_model_len: int  # longest sequence, prompt included
    max_num_requests: int  # requests that run at once; fewer than configured when recurrent states would not fit
    baseline: SimpleNamespace  # the plain stages, by name
    queue: RequestQueue
    block_pool: BlockPool
    kv_cache: KVCache
    cost_model: CostModel  # measured when a plugin wants it
    batch_builder: BatchBuilder
    has_own_threads: bool  # `execute` does not compute on torch's threads, which would be in its way
    notes: list[str]  # what `build` decided that a user should know

    tokenize: Tokenize
    encode_media: EncodeMedia
    constrain: Constrain
    detokenize: Detokenize
    admit: Admit
    order: Order
    budget: Budget
    schedule: Schedule
    commit: Commit
    lookup: Lookup
    allocate: Allocate
    adapt: Adapt
    propose: Propose
    verify: Verify
    execute: Execute
    exchange: Exchange
    generate: Generate

    def __init__(self) -> None:
        self._lock = StepLock()  # one step at a time; notified when a request was added or a step ended
        self._listeners: dict[Request, Callable[[Request], None]] = {}
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._is_stepping = False
        self.has_own_threads = False
        self.has_noted_ignored = False  # whether fields of the generation config that requests ignore were warned of
        names = ("num_steps", "num_step_tokens", "num_new_tokens", "num_finished", "num_aborted", "num_errors")
        self._counts = dict.fromkeys(names, 0)
        self._step_s = 0.0

    # -- the step -----------------------------------------------------------------------------------------------------
    def step(self) -> StepOutput:
        """Run one step over the queue. `advance` is the same with locks and errors taken care of."""
        start = time.perf_counter()
        batch = self.schedule(self.queue)
        if batch is None:
            return StepOutput()
        drafts = self.propose(batch)
        if drafts is not None:
            batch = self.batch_builder.with_drafts(batch, drafts)
        mask = self.constrain(batch, drafts)
        if mask is not None:
            batch.wants_best = False  # it is applied to logits
        exchanged = self.exchange(batch, drafts)
        batch, drafts = exchanged
        self.adapt(batch)
        logits = self.execute(batch, drafts)
        if self.has_own_threads and not isinstance(logits, BestTokens):
            with one_torch_thread():
                accepted = self.verify(batch, drafts, logits, mask)
        else:
            accepted = self.verify(batch, drafts, logits, mask)
        if accepted.errors and drafts is not None:
            repeat_without_drafts(self, batch, accepted)
        if accepted.paths is not None:
            self.kv_cache.keep_paths(batch, accepted)
        if not self.cost_model.is_wanted:
            return self.commit(batch, accepted)
        shape = StepShape.of(batch)
        output = self.commit(batch, accepted)
        self.cost_model.observe(shape, time.perf_counter() - start)
        return output

    def advance(self) -> StepOutput:
        """Run one step under the lock; a stage that raises only ends the requests that make it raise."""
        with self._lock:
            if self._is_stepping:  # the lock is this thread's already
                raise RequestError(
                    "the pipeline was called from inside its own step, by a stage, a processor or a listener. "
                    "Call it after the step, or from another thread without waiting for it here."
                )
            start = time.perf_counter()
            self._is_stepping = True
            try:
                try:
                    output = recovery.checked_output(self.step())
                except Exception as error:
                    output = self._recover(error)
            except BaseException:  # interrupted: what the cache holds is unknown
                recovery.restart(self, list(self.queue.running))
                raise
            finally:
                self._is_stepping = False
            if self.queue.refused:
                for request in self.queue.refused:
                    self.allocate.free(request)  # it has no blocks, but stages may have begun something for it
                output.finished += [r for r in self.queue.refused if r not in output.finished]
                self.queue.refused.clear()
            if output.num_tokens:
                counts = self._counts
                counts["num_steps"] += 1
                counts["num_step_tokens"] += output.num_tokens
                counts["num_new_tokens"] += output.num_new_tokens
                self._step_s += time.perf_counter() - start
            self._notify(output)
            return output

    def _recover(self, error: Exception) -> StepOutput:
        """End the requests that make a step raise. See `llmopt.recovery`."""
        try:
            output = recovery.isolate(self, error)
        except Exception as second_error:
            logger.exception("a failed step could not be undone; every request ends.")
            output = recovery.end_all(self, second_error)
        # those that ended before the step raised were not told yet
        output.finished += [r for r in self._listeners if r.is_finished and r not in output.finished]
        return output

    def _notify(self, output: StepOutput) -> None:
        for request in output.finished:
            self._counts["num_aborted" if request.finish_reason == "abort" else "num_finished"] += 1
            if request.finish_reason == "error" and request.error is not None:
                self._counts["num_errors"] += 1
                if request.lockstep is None:  # the caller of `generate` gets what his processors raised
                    request.error = recovery.named(self.registry, request.error, f"request {request.request_id!r}")
        if self._listeners:
            for request in {*output.advanced, *output.finished}:
                listener = self._listeners.get(request)
                if listener is not None:
                    if request.is_finished:
                        del self._listeners[request]
                    try:
                        listener(request)
                    except Exception:  # somebody else's code on the stepping thread
                        logger.exception("a listener of request %r failed.", request.request_id)
        self._lock.notify_all()

    # -- requests -----------------------------------------------------------------------------------------------------
    def add(self, request: Request, listener: Callable[[Request], None] | None = None) -> None:
        """Put a request into the queue.

        :param listener: called after each step that gave the request tokens or ended it, on the stepping thread.
        :raises RequestError: when it can never run.
        """
        self._prepare(request)
        self._admit(request, listener)

    def _prepare(self, request: Request) -> None:
        """What happens on the caller's thread, outside of the lock."""
        self.check_supported()
        if request.is_finished:
            raise RequestError(f"request {request.request_id!r} has run already. Make a new one.")
        if request.adapter is not None and self.adapt is self.baseline.adapt:
            raise RequestError(
                f"request {request.request_id!r} asks for adapter {request.adapter!r}, and no plugin that loads "
                "adapters is listed. Leave the adapter out, or build with such a plugin."
            )
        with recovery.naming(self.registry, f"request {request.request_id!r}"):
            self.encode_media(request)

    def _admit(self, request: Request, listener: Callable[[Request], None] | None = None) -> None:
        with self._lock:
            self._check_open()
            try:
                with recovery.naming(self.registry, f"request {request.request_id!r}"):
                    self.admit(request, self.queue)
            except BaseException:
                self.queue.remove(request)  # a wrapping plugin may raise after the baseline has taken it
                raise
            if listener is not None:
                self._listeners[request] = listener
            self._lock.notify_all()

    def add_all(self, requests: Sequence[Request]) -> None:
        """Put requests into the queue together, before a step sees any of them; or none, when one is refused.

        :raises RequestError: one of them can never run.
        """
        for request in requests:
            self._prepare(request)
        with self._lock:
            try:
                for request in requests:
                    self._admit(request)
            except BaseException:
                for request in requests:
                    self.abort(request)
                raise

    def abort(self, request: Request | str) -> None:
        """End a request now, wherever it stands; its blocks are free afterwards. Unknown ids are ignored.

        A member of a lockstep group takes the whole group with it.
        """
        if self.why_not is not None:
            return  # nothing ever runs here
        with self._lock:
            found = self.queue.by_id.get(request) if isinstance(request, str) else request
            if found is None or found.is_finished:
                return
            output = StepOutput()
            for member in list(self.queue):
                if member is found or (found.lockstep is not None and member.lockstep is found.lockstep):
                    member.finish("abort", RequestAbortedError(f"request {member.request_id!r} was aborted."))
                    self.queue.remove(member)
                    self.allocate.free(member)
                    output.finished.append(member)
            self._notify(output)

    def run(self, requests: Sequence[Request]) -> None:
        """Add requests and step until all of them are finished.

        :raises BaseException: the error of the first request that failed; the others are aborted.
        """
        self.add_all(requests)  # rows which share a prefill are all there when the first one starts
        try:
            self.wait(lambda: _are_over(requests))
        finally:
            for request in requests:
                self.abort(request)
        for request in requests:
            if request.error is not None and not isinstance(request.error, RequestAbortedError):
                raise request.error
        for request in requests:
            if request.error is not None:
                raise request.error

    def release(self, requests: Iterable[Request]) -> None:
        """Free blocks and slots of finished requests that kept them (``keep_blocks``)."""
        with self._lock:
            for request in requests:
                self.allocate.free(request)
                self.queue.free_slot(request)
            self._lock.notify_all()  # somebody may wait for these blocks

    def wait(self, is_done: Callable[[], bool]) -> None:
        """Step until ``is_done()``, or let the background thread do so when there is one."""
        while True:
            with self._lock:
                if is_done():
                    return
                self._check_open()
                if self._thread is not None and self._thread.is_alive():
                    self._lock.wait(timeout_s=1.0)
                    continue
                self._advance_or_sleep()
            self._give_way()

    def _advance_or_sleep(self) -> None:
        """Run one step; when nothing can run, sleep until a request comes or goes, or the scheduler wants a step."""
        output = self.advance()
        if not output.num_tokens and not output.finished:
            wake_s = self.queue.wake_s
            timeout_s = _IDLE_S if wake_s is None else min(1.0, wake_s - time.perf_counter())
            if timeout_s > 0.0:
                self._lock.wait(timeout_s)

    def _give_way(self) -> None:
        """Let other callers take the lock between two steps."""
        if self._lock.is_wanted:
            time.sleep(0.00005)  # long enough for the others to wake up

    def between_steps(self, call: Callable[[], None]) -> None:
        """Call something while no step runs: it may look at the queue and the pool, and change what a step reads.

        :raises PipelineClosedError: the pipeline was closed.
        """
        with self._lock:
            self._check_open()
            call()

    def check_supported(self) -> None:
        """Raise `UnsupportedModelError` when only `generate` works, through the model's own loop, now or always."""
        if self.why_not is not None:
            raise UnsupportedModelError(
                f"the engine cannot run this model: {self.why_not}. `generate` works, through the model's own loop."
            )
        if self.model.training:
            raise UnsupportedModelError(
                "the model is in training mode, so dropout would change its tokens. Call model.eval() first."
            )
        changed = self.generate.changed_fact()
        if changed is not None:
            raise UnsupportedModelError(f"{changed}.")

    def _check_open(self) -> None:
        if self._is_closed:
            raise PipelineClosedError("the pipeline was closed. Build a new one.")

    # -- faces --------------------------------------------------------------------------------------------------------
    def stream(self, prompt: Prompt, **options: Any) -> Any:
        """Yield the text of one request piece by piece. See `llmopt.text.stream`."""
        from llmopt.text import stream

        return stream(self, prompt, **options)

    def batch(self, requests: Sequence[Any], *, progress: bool = True, **options: Any) -> list[TextOutput]:
        """Run many requests and return their outputs in order. See `llmopt.text.batch`."""
        from llmopt.text import batch

        return batch(self, requests, progress=progress, **options)

    def submit(self, prompt: Prompt, **options: Any) -> RequestHandle:
        """Start a request on the background thread and return at once. See `llmopt.submit.submit`."""
        from llmopt.submit import submit

        return submit(self, prompt, **options)

    def start(self) -> None:
        """Start the background thread that steps while there is work. Harmless when it runs already.

        :raises UnsupportedModelError: the engine cannot run the model.
        """
        self.check_supported()
        with self._lock:
            self._check_open()
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._serve, name="llmopt-engine", daemon=True)
                self._thread.start()
                atexit.register(self._close_at_exit)

    def _close_at_exit(self) -> None:
        """Stop the thread before the interpreter goes: in the middle of a native call it would abort the process."""
        if self._thread is not None and self._thread.is_alive():  # not so in a forked child, where it never ran
            self.close()

    def _serve(self) -> None:
        try:
            while True:
                with self._lock:
                    while not len(self.queue) and not self._is_closed:
                        self._lock.wait()
                    if self._is_closed:
                        return
                    self._advance_or_sleep()
                self._give_way()
        except BaseException as error:  # no error of a stage, `advance` deals with those: the thread is told to exit
            logger.exception("the background thread ends; so do the requests that it was running.")
            with self._lock:
                self._thread = None  # `start` makes another
                self._notify(recovery.end_all(self, error))

    def stats(self) -> dict[str, Any]:
        """Counters since the pipeline was built, and what the stages report of themselves."""
        with self._lock:
            numbers: dict[str, Any] = dict(self._counts)
            numbers["step_s"] = self._step_s
            numbers["generate_calls"] = dict(self.generate.calls)
            numbers["fall_backs"] = dict(self.generate.fall_backs)
            if self.why_not is None:
                numbers["num_waiting"] = len(self.queue.waiting)
                numbers["num_running"] = len(self.queue.running)
                numbers["num_blocks"] = self.block_pool.num_blocks
                numbers["num_blocks_used"] = self.block_pool.num_used
            if self.cost_model.is_wanted:
                numbers["cost_model"] = self.cost_model.stats()
            for chain in self.registry.chains.values():
                for owner, made in zip(chain.owners, chain.objects, strict=True):
                    report = getattr(made, "stats", None)
                    if report is not None:
                        numbers[f"{chain.stage}.{owner}"] = report()
            return numbers

    def describe(self) -> Description:
        """Say which plugin stands in which stage, how the model is run, and what fell back and why."""
        from llmopt.describe import describe

        return describe(self)

    def close(self) -> None:
        """Abort what is running, stop the background thread, free the pool. The model stays as it is."""
        with self._lock:
            if self._is_closed:
                return
            if self.why_not is None:
                for request in list(self.queue):
                    self.abort(request)
            self._is_closed = True
            self._lock.notify_all()
        atexit.unregister(self._close_at_exit)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=60.0)
        self.registry.close_stages()
        if self.why_not is None:
            self.kv_cache.layers.clear()

    def __enter__(self) -> InferencePipeline:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __call__(self, inputs: Tensor | None = None, **kwargs: Any) -> Any:
        """Same as `generate`."""
        return self.generate(inputs, **kwargs)


def _are_over(requests: Sequence[Request]) -> bool:
    """Whether all of them are finished, or one has failed. Asked after every step, so it is a plain loop."""
    is_over = True
    for request in requests:
        if request.error is not None:
            return True
        if request.status is not RequestStatus.FINISHED:
            is_over = False
    return is_over

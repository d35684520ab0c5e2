"""Requests on the background thread: followed from threads or from asyncio."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any

from llmopt.errors import RequestError
from llmopt.text import TextOutput, make_requests

if TYPE_CHECKING:
    from llmopt.pipeline import InferencePipeline
    from llmopt.request import Request
    from llmopt.stages import Prompt


class RequestHandle:
    """A submitted request.

    ``for piece in handle`` and ``async for piece in handle`` give its text, `result` and ``await handle`` its output.
    """

    def __init__(self, pipeline: InferencePipeline, request: Request) -> None:
        self._pipeline = pipeline
        self._request = request
        self._changed = threading.Condition()
        self._wakers: list[Callable[[], None]] = []

    @property
    def request_id(self) -> str:
        """The id under which the request runs."""
        return self._request.request_id

    @property
    def is_finished(self) -> bool:
        """Whether no more tokens will come."""
        return self._request.is_finished

    def abort(self) -> None:
        """End the request now."""
        self._pipeline.abort(self._request)

    def result(self, timeout_s: float | None = None) -> TextOutput:
        """Wait for the end and return the output.

        :raises TimeoutError: it did not finish in time; it goes on.
        :raises LlmoptError: the request failed or was aborted.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._request.is_finished, timeout_s):
                raise TimeoutError(f"request {self.request_id!r} did not finish within {timeout_s} s.")
        return self._output()

    def __iter__(self) -> Iterator[str]:
        done = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: len(self._request.text) > done or self._request.is_finished)
            piece = self._request.text[done:]
            done += len(piece)
            if piece:
                yield piece
            elif self._request.is_finished:
                self._output()
                return

    async def __aiter__(self) -> AsyncIterator[str]:
        done = 0
        try:
            while True:
                await self._wait(lambda: len(self._request.text) > done or self._request.is_finished)
                piece = self._request.text[done:]
                done += len(piece)
                if piece:
                    yield piece
                elif self._request.is_finished:
                    self._output()
                    return
        finally:
            if not self._request.is_finished:  # the reader went away
                self.abort()

    def __await__(self) -> Any:
        return self._finish().__await__()

    async def _finish(self) -> TextOutput:
        await self._wait(lambda: self._request.is_finished)
        return self._output()

    async def _wait(self, is_done: Callable[[], bool]) -> None:
        loop, event = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            loop.call_soon_threadsafe(event.set)

        with self._changed:
            self._wakers.append(wake)
        try:
            while not is_done():
                await event.wait()
                event.clear()
        finally:
            with self._changed:
                self._wakers.remove(wake)

    def _output(self) -> TextOutput:
        if self._request.error is not None:
            raise self._request.error
        return TextOutput.of(self._request)

    def _on_progress(self, request: Request) -> None:
        with self._changed:
            self._changed.notify_all()
            wakers = list(self._wakers)
        for wake in wakers:
            wake()


def submit(pipeline: InferencePipeline, prompt: Prompt, **options: Any) -> RequestHandle:
    """Start a request on the pipeline's background thread and return at once.

    :param prompt: text, chat messages, or token ids.
    :param options: as for `llmopt.text.stream`.
    :raises RequestError: bad prompt or parameters, or a request that can never run.
    """
    requests = make_requests(pipeline, prompt, options)
    if len(requests) != 1:
        raise RequestError(f"submit starts one continuation, n={len(requests)} was asked for. Call it {len(requests)} "
                           "times, or use batch.")  # fmt: skip
    handle = RequestHandle(pipeline, requests[0])
    pipeline.start()
    pipeline.add(requests[0], handle._on_progress)
    return handle

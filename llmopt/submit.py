"""Requests on the background thread: followed from threads or from asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
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
    A reader that leaves early (a broken loop, a cancelled task) aborts the request; a `result` that times out does not.
    """

    def __init__(self, pipeline: InferencePipeline, request: Request) -> None:
        self._pipeline = pipeline
        self._request = request
        self._news = threading.Condition()
        self._wakers: list[Callable[[], None]] = []
        # what readers see, as of the end of the last step: the request itself changes in the middle of one
        self._text = ""
        self._is_done = False

    @property
    def request_id(self) -> str:
        """The id under which the request runs."""
        return self._request.request_id

    @property
    def is_finished(self) -> bool:
        """Whether no more tokens will come."""
        return self._is_done

    def abort(self) -> None:
        """End the request now."""
        self._pipeline.abort(self._request)

    def result(self, timeout_s: float | None = None) -> TextOutput:
        """Wait for the end and return the output.

        :raises TimeoutError: it did not finish in time; it goes on.
        :raises LlmoptError: the request failed or was aborted.
        """
        with self._news:
            if not self._news.wait_for(lambda: self._is_done, timeout_s):
                raise TimeoutError(f"request {self.request_id!r} did not finish within {timeout_s} s.")
        return self._output()

    def __iter__(self) -> Iterator[str]:
        done = 0

        def has_news() -> bool:
            return len(self._text) > done or self._is_done

        try:
            while True:
                with self._news:
                    self._news.wait_for(has_news)
                    piece = self._text[done:]
                done += len(piece)
                if piece:
                    yield piece
                else:
                    self._output()
                    return
        finally:
            self._leave()

    async def __aiter__(self) -> AsyncIterator[str]:
        done = 0

        def has_news() -> bool:
            return len(self._text) > done or self._is_done

        try:
            while True:
                await self._wait(has_news)
                piece = self._text[done:]
                done += len(piece)
                if piece:
                    yield piece
                else:
                    self._output()
                    return
        finally:
            self._leave()

    def __await__(self) -> Generator[Any, None, TextOutput]:
        return self._finish().__await__()

    async def _finish(self) -> TextOutput:
        try:
            await self._wait(lambda: self._is_done)
        finally:
            self._leave()
        return self._output()

    def _leave(self) -> None:
        if not self._is_done:
            self.abort()

    async def _wait(self, is_done: Callable[[], bool]) -> None:
        loop, event = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(event.set)

        with self._news:
            self._wakers.append(wake)
        try:
            while not is_done():
                await event.wait()
                event.clear()
        finally:
            with self._news:
                self._wakers.remove(wake)

    def _output(self) -> TextOutput:
        if self._request.error is not None:
            raise self._request.error
        return TextOutput.of(self._request)

    def _on_progress(self, request: Request) -> None:
        """Called on the stepping thread, between two steps."""
        with self._news:
            self._text, self._is_done = request.text, request.is_finished
            self._news.notify_all()
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

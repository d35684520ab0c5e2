"""One worker, kept alive: started, fed with chunks, watched, and started again when it is lost."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from llmopt.batch import NO_IDS, Batch
from llmopt_plugins.scheduling.pd_separation.protocol import Broken, Channel, Chunk, Done, Ready, Setup

logger = logging.getLogger("llmopt")

_IN_FLIGHT = 2  # chunks that a worker has: one runs, one is there when it ends
_MAX_DELAY_S = 60.0
_MAX_BROKEN = 3  # times that a worker may fail to be set up before it is left alone


class Process(Protocol):
    """A worker that was started."""

    channel: Channel
    pid: int | None  # None: on another machine
    receive: Callable[[list[int]], None] | None  # brings the KV of blocks into the pool; None: it is there

    def complete(self, setup: Setup) -> Setup:
        """The setup as this process needs it."""

    def kill(self) -> None:
        """End it. Afterwards it writes to the pool no more."""


@dataclass(slots=True, eq=False)
class Job:
    """A prompt that a worker computes. Belongs to the lock of its `Keeper` while it is not over."""

    name: str  # of the request, for messages
    token_ids: np.ndarray  # [end] int64
    blocks: list[int]  # held for the request, or for nobody once it is not wanted
    start: int  # tokens whose KV is in the blocks already
    end: int  # tokens whose KV shall be there
    num_sent: int = 0  # tokens that the worker was told to compute, ``start`` included
    num_done: int = 0  # tokens whose KV is there
    num_in_flight: int = 0  # chunks that the worker has: it may write to the blocks
    is_wanted: bool = True
    is_over: bool = False  # nobody writes to the blocks any more
    error: str | None = None  # why it is over before its end
    logits: np.ndarray | None = None  # [vocab] float32, of token ``end - 1``, once its KV is there


@dataclass(frozen=True, slots=True)
class Limits:
    """What a keeper waits for, in seconds."""

    chunk_tokens: int
    chunk_s: float  # a chunk that takes longer: the worker hangs
    start_s: float  # until a worker is ready
    delay_s: float  # before a lost worker is started again; doubles each time


class Keeper:
    """Owns one worker process and the thread that listens to it.

    :param launch: starts a process.
    :param on_over: called on the keeper's thread, without its lock, when jobs are over.
    """

    def __init__(
        self,
        number: int,
        launch: Callable[[], Process],
        setup: Setup,
        limits: Limits,
        on_over: Callable[[list[Job]], None],
    ) -> None:
        self.setup, self.limits = setup, limits
        self.is_ready = False
        self.why_not: str | None = None  # why the worker was lost or could not be set up, the last time
        self.has_given_up = False
        self.has_own_pool = False  # KV that is found in the pool is not there for the worker
        self.num_starts = self.num_chunks = 0
        self.busy_s = 0.0  # of the worker
        self._launch, self._on_over = launch, on_over
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._process: Process | None = None
        self._jobs: deque[Job] = deque()  # those with chunks to send
        self._in_flight: deque[tuple[int, Job, int, list[int]]] = deque()  # chunk, job, tokens then done, blocks
        self._since_s = 0.0  # when the first of them began, as far as is known
        self._number = 0
        self._is_closed = False
        self._thread = threading.Thread(target=self._keep, name=f"llmopt-prefill-{number}", daemon=True)

    # -- called by the decode process ---------------------------------------------------------------------------------
    def start(self) -> None:
        """Start the worker, in the background."""
        self._thread.start()

    def wait_ready(self, timeout_s: float) -> str | None:
        """Wait until the worker is ready; None, or why it is not."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_ready or self.why_not is not None, timeout_s)
            if self.is_ready:
                return None
            return self.why_not or f"it was not ready after {timeout_s:g} s"

    @property
    def pid(self) -> int | None:
        """Of the worker's process, while there is one on this machine."""
        with self._lock:
            return None if self._process is None else self._process.pid

    @property
    def num_jobs(self) -> int:
        """Jobs that are not over."""
        with self._lock:
            return len({id(job) for job in (*self._jobs, *(job for _, job, *_ in self._in_flight))})

    def add(self, job: Job) -> bool:
        """Take a job. False when the worker is not there."""
        with self._lock:
            if not self.is_ready:
                return False
            job.num_sent = job.num_done = job.start
            self._jobs.append(job)
            self._feed()
            return True

    def cancel(self, job: Job) -> bool:
        """Send no more chunks of a job. Returns whether it is over now; if not, `on_over` tells when it is."""
        with self._lock:
            job.is_wanted = False
            if job in self._jobs:
                self._jobs.remove(job)
            if job.num_in_flight == 0:
                job.is_over = True
            return job.is_over

    def close(self) -> None:
        """End the worker and wait for the thread. All jobs are over afterwards."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            process = self._process
        if process is not None:
            process.kill()
        if self._thread.is_alive():
            self._thread.join(timeout=30.0)

    # -- under the lock -----------------------------------------------------------------------------------------------
    def _feed(self) -> None:
        """Send chunks, as many as the worker may have. They are small: sending does not wait for it."""
        assert self._process is not None
        while self._jobs and len(self._in_flight) < _IN_FLIGHT:
            job = self._jobs[0]
            count = min(self.limits.chunk_tokens, job.end - job.num_sent)
            batch = chunk_batch(job, job.num_sent, count, self.setup.block_size)
            self._number += 1
            if not self._in_flight:
                self._since_s = time.perf_counter()
            written = job.blocks[job.num_sent // self.setup.block_size :]
            written = written[: -(-(job.num_sent % self.setup.block_size + count) // self.setup.block_size)]
            job.num_sent += count
            job.num_in_flight += 1
            self._in_flight.append((self._number, job, job.num_sent, written))
            if job.num_sent == job.end:
                self._jobs.popleft()
            with contextlib.suppress(OSError):  # it is gone, which the thread will notice
                self._process.channel.send(Chunk(self._number, batch.to_bytes(), written))

    def _take(self, done: Done) -> list[Job]:
        """Note that a chunk is over; the jobs that are over with it."""
        _, job, num_done, _ = self._in_flight.popleft()
        self._since_s = time.perf_counter()
        self.num_chunks += 1
        self.busy_s += done.seconds
        job.num_in_flight -= 1
        if done.error is not None and job.error is None:
            job.error = done.error
            if job in self._jobs:
                self._jobs.remove(job)
        if job.error is None:
            job.num_done = num_done
            job.logits = done.logits
        self._feed()
        is_last = job.num_in_flight == 0 and (job.num_done == job.end or job.error is not None or not job.is_wanted)
        job.is_over = is_last
        return [job] if is_last else []

    def _lose(self, reason: str) -> list[Job]:
        """The process is gone, and all that it had to do."""
        lost = list(dict.fromkeys([*(job for _, job, *_ in self._in_flight), *self._jobs]))
        for job in lost:
            job.error = job.error or f"the worker was lost: {reason}"
            job.num_in_flight, job.is_over = 0, True
        self._in_flight.clear()
        self._jobs.clear()
        self.is_ready, self._process, self.why_not = False, None, reason
        self._changed.notify_all()
        return lost

    # -- the thread ---------------------------------------------------------------------------------------------------
    def _keep(self) -> None:
        delay_s, num_broken = self.limits.delay_s, 0
        while True:
            num_chunks = self.num_chunks
            reason = self._run_once()
            if self._is_closed:
                return
            if isinstance(reason, Broken):
                num_broken += 1
                if num_broken >= _MAX_BROKEN:
                    self.has_given_up = True
                    logger.warning("pd_separation: no worker any more, it cannot be set up: %s", reason.reason)
                    return
            if self.num_chunks > num_chunks:
                delay_s, num_broken = self.limits.delay_s, 0
            told = reason.reason if isinstance(reason, Broken) else reason
            logger.warning(
                "pd_separation: the worker is gone (%s). Prompts are computed here until another one is ready, which "
                "is started in %g s.", told, delay_s,
            )  # fmt: skip
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, delay_s)
            if self._is_closed:
                return
            delay_s = min(2 * delay_s, _MAX_DELAY_S)

    def _run_once(self) -> str | Broken:
        """Start a process and serve it until it is gone; why it is."""
        try:
            process = self._launch()
        except Exception as error:
            with self._changed:
                self._lose(f"it could not be started: {error}")
            return f"it could not be started: {error}"
        with self._lock:
            self._process = process
            self.num_starts += 1
        reason: str | Broken = "it was closed"
        try:
            if not self._is_closed:
                reason = self._listen(process)
        except (EOFError, OSError):
            reason = "its process ended"
        except Exception as error:  # an answer that makes no sense
            reason = f"{type(error).__name__}: {error}"
        finally:
            process.kill()
        told = reason.reason if isinstance(reason, Broken) else reason
        with self._changed:
            lost = self._lose(told)
        if lost and not self._is_closed:
            self._on_over(lost)
        return reason

    def _listen(self, process: Process) -> str | Broken:
        channel, receive = process.channel, process.receive
        channel.send(process.complete(self.setup))
        start_s = time.perf_counter()
        while True:
            if not channel.poll(0.5):
                now = time.perf_counter()
                if not self.is_ready and now - start_s > self.limits.start_s:
                    return f"it was not ready after {self.limits.start_s:g} s"
                with self._lock:
                    is_late = bool(self._in_flight) and now - self._since_s > self.limits.chunk_s
                if is_late:
                    return f"a chunk took more than {self.limits.chunk_s:g} s"
                continue
            message: Any = channel.recv()
            if isinstance(message, Broken):
                return message
            if isinstance(message, Ready):
                with self._changed:
                    self.is_ready, self.why_not = True, None
                    self._changed.notify_all()
                continue
            with self._lock:
                number, _, _, blocks = self._in_flight[0] if self._in_flight else (0, None, 0, [])
            if number != message.number:
                return f"it answered chunk {message.number}, not {number}"
            if receive is not None and message.error is None:
                receive(blocks)
            with self._lock:
                over = self._take(message)
            if over:
                self._on_over(over)


def chunk_batch(job: Job, start: int, count: int, block_size: int) -> Batch:
    """The batch of a part of a prompt; it wants logits of its end, and no others."""
    positions = np.arange(start, start + count)
    num_blocks = -(-(start + count) // block_size)
    table = np.array(job.blocks[:num_blocks], dtype=np.int32)
    return Batch(
        request_ids=[job.name],
        num_scheduled=np.array([count], dtype=np.int32),
        token_ids=job.token_ids[start : start + count],
        positions=positions,
        cu_seqlens_q=np.array([0, count], dtype=np.int32),
        seq_lens=np.array([start + count], dtype=np.int32),
        block_tables=table[None],
        slot_mapping=table[positions // block_size].astype(np.int64) * block_size + positions % block_size,
        logits_indices=np.array([count - 1]) if start + count == job.end else NO_IDS,
        slots=np.zeros(1, dtype=np.int32),
        num_drafts=np.zeros(1, dtype=np.int32),
    )

"""The keeper of a prefill worker, with workers that are threads: what is sent, lost, late and started again."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from typing import Any

import numpy as np
import pytest

from llmopt.batch import Batch
from llmopt.block_pool import BlockPool
from llmopt.config import PipelineConfig
from llmopt_plugins.scheduling.pd_separation.cpu_split import split
from llmopt_plugins.scheduling.pd_separation.hand_over import HandOver
from llmopt_plugins.scheduling.pd_separation.keeper import Job, Keeper, Limits, chunk_batch
from llmopt_plugins.scheduling.pd_separation.protocol import Broken, Done, Ready, Setup

SETUP = Setup("folder", {}, [], PipelineConfig(), 64, 4, {}, [], 1)
LIMITS = Limits(chunk_tokens=8, chunk_s=60.0, start_s=60.0, delay_s=0.01)


class FakeProcess:
    """A worker that is a thread: ``behave(channel)`` is all it does."""

    receive = None

    def complete(self, setup: Setup) -> Setup:
        return setup

    def __init__(self, behave: Callable[[Any], None]) -> None:
        self.channel, self.other = Pipe()
        self.pid = None
        self.is_killed = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(behave,), daemon=True)
        self.thread.start()

    def _run(self, behave: Callable[[Any], None]) -> None:
        try:
            behave(self.other)
        except (EOFError, OSError):
            pass
        finally:
            self.other.close()

    def kill(self) -> None:
        self.is_killed.set()
        self.channel.close()


class Watched:
    """A keeper whose workers behave as told, one after the other, and what it told of jobs that are over."""

    def __init__(self, *behaviours: Callable[[Any], None], limits: Limits = LIMITS) -> None:
        self.behaviours = list(behaviours)
        self.processes: list[FakeProcess] = []
        self.over: list[Job] = []
        self.keeper = Keeper(0, self.launch, SETUP, limits, self.over.extend)
        self.keeper.start()

    def launch(self) -> FakeProcess:
        behave = self.behaviours.pop(0) if len(self.behaviours) > 1 else self.behaviours[0]
        self.processes.append(FakeProcess(behave))
        return self.processes[-1]

    def wait(self, is_true: Callable[[], bool]) -> None:
        end = time.monotonic() + 20.0
        while not is_true():
            assert time.monotonic() < end, "it did not happen within 20 s"
            time.sleep(0.002)


@pytest.fixture
def watch() -> Iterator[Callable[..., Watched]]:
    made: list[Watched] = []

    def make(*behaviours: Callable[[Any], None], **options: Any) -> Watched:
        made.append(Watched(*behaviours, **options))
        return made[-1]

    yield make
    for watched in made:
        watched.keeper.close()
        assert all(process.is_killed.is_set() for process in watched.processes)


def good(channel: Any) -> None:
    channel.recv()
    channel.send(Ready())
    while True:
        channel.send(Done(channel.recv().number, 0.001))


def job(end: int = 30, start: int = 0) -> Job:
    return Job("a", np.arange(end), list(range(8, 8 + -(-end // 4))), start, end)


def test_a_prompt_goes_out_in_chunks_and_is_over_when_the_last_is_answered(watch: Any) -> None:
    batches: list[Batch] = []

    def keeping(channel: Any) -> None:
        channel.recv()
        channel.send(Ready())
        while True:
            chunk = channel.recv()
            batches.append(Batch.from_bytes(chunk.batch))
            channel.send(Done(chunk.number, 0.5))

    watched = watch(keeping)
    assert watched.keeper.wait_ready(20.0) is None
    work = job(30, start=4)
    assert watched.keeper.add(work)
    watched.wait(lambda: work.is_over)
    assert [b.positions[0] for b in batches] == [4, 12, 20, 28]
    assert np.concatenate([b.token_ids for b in batches]).tolist() == list(range(4, 30))
    assert (work.num_done, work.error) == (30, None)
    assert watched.over == [work]
    assert watched.keeper.num_jobs == 0
    assert watched.keeper.busy_s == pytest.approx(2.0)


def test_a_chunk_names_its_places_in_the_pool() -> None:
    batch = chunk_batch(job(30), 6, 8, block_size=4)
    assert batch.slot_mapping.tolist() == [38, 39, 40, 41, 42, 43, 44, 45]  # block 8 holds positions 0 to 3
    assert batch.seq_lens.tolist() == [14]
    assert batch.block_tables.tolist() == [[8, 9, 10, 11]]
    assert not batch.logits_indices.size


def test_at_most_two_chunks_are_with_the_worker(watch: Any) -> None:
    seen: list[int] = []
    proceed = threading.Event()

    def slow(channel: Any) -> None:
        channel.recv()
        channel.send(Ready())
        proceed.wait(20.0)
        while channel.poll(0.05):
            seen.append(channel.recv().number)
        good_rest = seen[:]
        for number in good_rest:
            channel.send(Done(number, 0.0))
        while True:
            channel.send(Done(channel.recv().number, 0.0))

    watched = watch(slow)
    watched.keeper.wait_ready(20.0)
    work = job(60)
    watched.keeper.add(work)
    proceed.set()
    watched.wait(lambda: work.is_over)
    assert seen == [1, 2]


def test_a_lost_worker_is_started_again_and_its_jobs_keep_what_was_answered(watch: Any) -> None:
    have_come = threading.Event()  # a job that comes later is not taken

    def dies(channel: Any) -> None:
        channel.recv()
        channel.send(Ready())
        channel.send(Done(channel.recv().number, 0.0))
        channel.recv()
        have_come.wait(20.0)  # and is gone

    watched = watch(dies, good)
    watched.keeper.wait_ready(20.0)
    first, second = job(60), job(20)
    assert watched.keeper.add(first)
    assert watched.keeper.add(second)
    have_come.set()
    watched.wait(lambda: first.is_over and second.is_over)
    assert first.num_done == 8
    assert first.error is not None
    assert second.num_done == 0
    assert watched.processes[0].is_killed.wait(20.0)  # before anybody may use the blocks again
    watched.wait(lambda: watched.keeper.is_ready)
    again = job(60)
    assert watched.keeper.add(again)
    watched.wait(lambda: again.is_over)
    assert (again.num_done, again.error) == (60, None)
    assert watched.keeper.num_starts == 2


def test_the_process_is_killed_before_its_jobs_are_over(watch: Any) -> None:
    order: list[str] = []

    def dies(channel: Any) -> None:
        channel.recv()
        channel.send(Ready())
        channel.recv()

    watched = watch(dies, good)
    watched.keeper.wait_ready(20.0)
    process, kill = watched.processes[0], watched.processes[0].kill
    process.kill = lambda: (order.append("killed"), kill())  # type: ignore[method-assign]
    work = job()
    watched.keeper._on_over = lambda jobs: order.append("over")
    watched.keeper.add(work)
    watched.wait(lambda: len(order) == 2)
    assert order == ["killed", "over"]


def test_a_worker_that_hangs_is_killed_after_the_time_for_a_chunk(watch: Any) -> None:
    def hangs(channel: Any) -> None:
        channel.recv()
        channel.send(Ready())
        threading.Event().wait(30.0)

    watched = watch(hangs, good, limits=Limits(8, 0.05, 60.0, 0.01))
    watched.keeper.wait_ready(20.0)
    work = job()
    watched.keeper.add(work)
    watched.wait(lambda: work.is_over)
    assert "more than 0.05 s" in str(work.error)
    assert watched.processes[0].is_killed.is_set()
    watched.wait(lambda: watched.keeper.is_ready)


def test_an_error_ends_the_job_and_not_the_worker(watch: Any) -> None:
    def fails_once(channel: Any) -> None:
        channel.recv()
        channel.send(Ready())
        channel.send(Done(channel.recv().number, 0.0))
        channel.send(Done(channel.recv().number, 0.0, "ValueError: no"))
        while True:
            channel.send(Done(channel.recv().number, 0.0))

    watched = watch(fails_once)
    watched.keeper.wait_ready(20.0)
    bad, fine = job(60), job(60)
    watched.keeper.add(bad)
    watched.keeper.add(fine)
    watched.wait(lambda: bad.is_over and fine.is_over)
    assert (bad.num_done, bad.error) == (8, "ValueError: no")
    assert (fine.num_done, fine.error) == (60, None)
    assert len(watched.processes) == 1


def test_a_cancelled_job_is_over_only_when_its_chunks_are_answered(watch: Any) -> None:
    proceed = threading.Event()

    def slow(channel: Any) -> None:
        channel.recv()
        channel.send(Ready())
        while True:
            chunk = channel.recv()
            proceed.wait(20.0)
            channel.send(Done(chunk.number, 0.0))

    watched = watch(slow)
    watched.keeper.wait_ready(20.0)
    running, waiting = job(60), job(60)
    watched.keeper.add(running)
    watched.keeper.add(waiting)
    assert watched.keeper.cancel(waiting)
    assert not watched.keeper.cancel(running)
    assert not running.is_over
    proceed.set()
    watched.wait(lambda: running.is_over)
    assert watched.over == [running]
    assert watched.keeper.num_chunks == 2


def test_a_worker_that_cannot_be_set_up_is_tried_three_times(watch: Any) -> None:
    def broken(channel: Any) -> None:
        channel.recv()
        channel.send(Broken("no such model"))

    watched = watch(broken)
    assert watched.keeper.wait_ready(20.0) == "no such model"
    watched.wait(lambda: watched.keeper.has_given_up)
    assert watched.keeper.num_starts == 3
    assert not watched.keeper.add(job())


def test_a_process_that_cannot_be_started_is_tried_again() -> None:
    calls: list[int] = []

    def launch() -> Any:
        calls.append(1)
        if len(calls) < 3:
            raise OSError("no memory")
        return FakeProcess(good)

    keeper = Keeper(0, launch, SETUP, LIMITS, lambda jobs: None)
    keeper.start()
    assert "no memory" in str(keeper.wait_ready(20.0))
    end = time.monotonic() + 20.0
    while not keeper.is_ready and time.monotonic() < end:
        time.sleep(0.002)
    assert keeper.is_ready
    keeper.close()


def test_an_answer_to_another_chunk_is_a_lost_worker(watch: Any) -> None:
    def confused(channel: Any) -> None:
        channel.recv()
        channel.send(Ready())
        channel.recv()
        channel.send(Done(77, 0.0))
        channel.recv()
        channel.recv()

    watched = watch(confused, good)
    watched.keeper.wait_ready(20.0)
    work = job()
    watched.keeper.add(work)
    watched.wait(lambda: work.is_over)
    assert "77" in str(work.error)


def test_closing_ends_a_busy_worker_and_all_jobs(watch: Any) -> None:
    def hangs(channel: Any) -> None:
        channel.recv()
        channel.send(Ready())
        threading.Event().wait(30.0)

    watched = watch(hangs)
    watched.keeper.wait_ready(20.0)
    work = job()
    watched.keeper.add(work)
    start = time.monotonic()
    watched.keeper.close()
    assert time.monotonic() - start < 10.0
    assert work.is_over


@pytest.mark.parametrize(
    ("cpus", "threads", "workers", "wanted", "own", "others"),
    [
        ((0,), 1, 1, None, (), [()]),
        ((0, 1), 2, 1, None, (0,), [(1,)]),
        ((0, 1), 2, 2, None, (0,), [(1,), (1,)]),
        ((3, 5, 8, 9), 4, 2, None, (3, 5), [(8,), (9,)]),
        ((3, 5, 8, 9), 4, 1, 3, (3,), [(5, 8, 9)]),
        ((3, 5, 8, 9), 4, 1, 9, (3,), [(5, 8, 9)]),
    ],
)
def test_cpus_are_split_and_none_is_left_without(
    cpus: Any, threads: int, workers: int, wanted: int | None, own: Any, others: Any
) -> None:
    mine, theirs = split(cpus, threads, workers, wanted)
    assert mine.cpus == own
    assert [share.cpus for share in theirs] == others
    assert min(share.num_threads for share in (mine, *theirs)) >= 1


def test_a_quota_is_split_in_proportion() -> None:
    mine, (theirs,) = split(tuple(range(16)), 8, 1, 4)
    assert (mine.num_threads, theirs.num_threads) == (6, 2)


def test_a_forked_child_that_closes_leaves_the_workers_of_its_parent_alone() -> None:
    class Spy:
        is_closed = False

        def close(self) -> None:
            self.is_closed = True

    hand_over, keeper, closed = HandOver(BlockPool(4, 4), min_tokens=1), Spy(), []
    hand_over.keepers.append(keeper)  # type: ignore[arg-type]
    hand_over.closers.append(lambda: closed.append(True))
    child = os.fork()
    if child == 0:
        hand_over.close()
        os._exit(int(keeper.is_closed or bool(closed)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    hand_over.close()
    assert keeper.is_closed
    assert closed

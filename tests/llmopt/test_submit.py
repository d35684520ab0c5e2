"""Requests on the background thread: from threads, from asyncio, aborted at any moment."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import llmopt
from llmopt.errors import PipelineClosedError, RequestAbortedError, RequestError, StageError
from llmopt.pipeline import InferencePipeline
from llmopt.testing import scripted_model, tiny_prompts, tiny_tokenizer
from tests.llmopt.helpers import alone, assert_idle, build_tiny, wrap

LONG = "".join(chr(ord("a") + i % 26) for i in range(200))


def slow(seconds: float) -> Any:
    """A plugin that makes every step take at least so long."""

    def change(inner: Callable[..., Any]) -> Any:
        def execute(batch: Any, drafts: Any) -> Any:
            time.sleep(seconds)
            return inner(batch, drafts)

        return execute

    return wrap("execute", change)


def speaker(step_s: float) -> InferencePipeline:
    tokenizer = tiny_tokenizer()
    scripts = [(str(i), LONG[i : i + 60]) for i in range(8)]
    return llmopt.build(scripted_model(scripts, tokenizer), [slow(step_s)], tokenizer=tokenizer, block_size=4)


@pytest.fixture
def spoken() -> Any:
    with speaker(0.001) as pipe:
        yield pipe


@pytest.fixture
def unhurried() -> Any:
    """Slow enough that nothing ends before the test has done what it wants to do."""
    with speaker(0.01) as pipe:
        yield pipe


def wait_until(is_true: Callable[[], bool]) -> None:
    end = time.perf_counter() + 20
    while not is_true():
        assert time.perf_counter() < end
        time.sleep(0.002)


# -- threads --------------------------------------------------------------------------------------
def test_handles_give_pieces_and_outputs(spoken: InferencePipeline) -> None:
    handles = [spoken.submit(str(i), max_new_tokens=70) for i in range(8)]
    assert ["".join(handle) for handle in handles] == [LONG[i : i + 60] for i in range(8)]
    assert [h.result().text for h in handles] == [LONG[i : i + 60] for i in range(8)]
    assert all(h.is_finished for h in handles)
    assert_idle(spoken)


def test_two_readers_of_one_handle_both_get_the_whole_text(spoken: InferencePipeline) -> None:
    handle = spoken.submit("1", max_new_tokens=70)
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append("".join(handle))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert texts == [LONG[1:61]] * 2


def test_a_result_that_times_out_leaves_the_request_running(unhurried: InferencePipeline) -> None:
    handle = unhurried.submit("1", max_new_tokens=70)
    with pytest.raises(TimeoutError, match="did not finish within 0.001 s"):
        handle.result(timeout_s=0.001)
    assert handle.result(timeout_s=20).text == LONG[1:61]


def test_a_reader_that_breaks_off_aborts_the_request(unhurried: InferencePipeline) -> None:
    handle = unhurried.submit("1", max_new_tokens=70)
    for piece in handle:
        assert LONG[1:].startswith(piece)
        break
    with pytest.raises(RequestAbortedError):
        handle.result(20)
    assert_idle(unhurried)


def test_an_abort_from_another_thread_at_any_moment_ends_the_request_or_comes_too_late() -> None:
    chooser = random.Random(0)
    prompts = tiny_prompts(4, max_length=20)
    with build_tiny(block_size=4, max_tokens_per_step=8) as pipe:
        wanted = [alone(pipe, p, max_new_tokens=12, ignore_eos=True) for p in prompts]
        outcomes = set()
        for number in range(150):
            which = number % 4
            handle = pipe.submit(prompts[which], max_new_tokens=12, ignore_eos=True)
            delay = chooser.random() * 0.02
            thread = threading.Thread(target=lambda h=handle, d=delay: (time.sleep(d), h.abort()))
            thread.start()
            try:
                assert handle.result(20).token_ids == wanted[which]
                outcomes.add("finished")
            except RequestAbortedError:
                outcomes.add("aborted")
            thread.join(20)
        assert outcomes == {"finished", "aborted"}
        assert_idle(pipe)


def test_one_continuation_per_submit(spoken: InferencePipeline) -> None:
    with pytest.raises(RequestError, match="n=3 was asked for. Call it 3 times"):
        spoken.submit("1", n=3)
    with pytest.raises(RequestError, match="unknown options"):
        spoken.submit("1", best_of=3)
    assert_idle(spoken)


def test_a_failing_request_gives_its_error_to_every_kind_of_reader() -> None:
    with build_tiny() as pipe:
        options: dict[str, Any] = {"logits_processors": [lambda ids, line: 1 / 0], "max_new_tokens": 4}
        for read in (lambda h: h.result(20), list, lambda h: asyncio.run(_awaited(h)), lambda h: asyncio.run(_read(h))):
            with pytest.raises(StageError, match="ZeroDivisionError"):
                read(pipe.submit([5, 6], **options))
        assert len(pipe.submit([5], max_new_tokens=2, ignore_eos=True).result(20).token_ids) == 2
        assert_idle(pipe)


# -- asyncio --------------------------------------------------------------------------------------
async def _awaited(handle: Any) -> Any:
    return await handle


async def _read(handle: Any) -> str:
    return "".join([piece async for piece in handle])


def test_many_tasks_read_at_once(spoken: InferencePipeline) -> None:
    async def main() -> list[str]:
        handles = [spoken.submit(str(i), max_new_tokens=70) for i in range(8)]
        return await asyncio.gather(*map(_read, handles))

    assert asyncio.run(main()) == [LONG[i : i + 60] for i in range(8)]
    assert_idle(spoken)


def test_a_handle_can_be_awaited_also_twice_and_late(spoken: InferencePipeline) -> None:
    async def main() -> list[str]:
        handle = spoken.submit("2", max_new_tokens=70)
        first = await handle
        second = await handle
        return [first.text, second.text, await _read(handle)]

    assert asyncio.run(main()) == [LONG[2:62]] * 3


@pytest.mark.parametrize("read", [_read, _awaited])
def test_a_cancelled_task_aborts_its_request_and_no_other(unhurried: InferencePipeline, read: Any) -> None:
    async def main() -> str:
        doomed = unhurried.submit("1", max_new_tokens=70)
        other = unhurried.submit("2", max_new_tokens=70)
        task = asyncio.create_task(read(doomed))
        text = asyncio.create_task(_read(other))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert doomed.is_finished
        with pytest.raises(RequestAbortedError):
            doomed.result(1)
        return await text

    assert asyncio.run(main()) == LONG[2:62]
    assert_idle(unhurried)


def test_a_time_limit_of_asyncio_aborts(unhurried: InferencePipeline) -> None:
    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(unhurried.submit("1", max_new_tokens=70), timeout=0.01)

    asyncio.run(main())
    assert_idle(unhurried)


def test_a_loop_that_was_closed_in_between_does_not_disturb_the_others(unhurried: InferencePipeline) -> None:
    """The reader's loop is gone without a cancellation; its waker must not stop the stepping thread."""
    loop = asyncio.new_event_loop()
    lost = unhurried.submit("1", max_new_tokens=70)
    task = loop.create_task(_awaited(lost))
    loop.run_until_complete(asyncio.sleep(0.005))
    loop.close()
    other = unhurried.submit("2", max_new_tokens=70)
    assert other.result(20).text == LONG[2:62]
    assert lost.result(20).text == LONG[1:61]
    del task


# -- the background thread ------------------------------------------------------------------------
def test_a_dying_thread_gives_its_error_to_everybody_and_the_next_submit_starts_another() -> None:
    state = {"armed": False}

    def change(inner: Callable[..., Any]) -> Any:
        def execute(batch: Any, drafts: Any) -> Any:
            if state["armed"]:
                state["armed"] = False
                raise SystemExit("told to exit")
            return inner(batch, drafts)

        return execute

    with build_tiny(plugins=[wrap("execute", change, name="leaver")]) as pipe:
        state["armed"] = True
        handles = [pipe.submit([5, 6 + i], max_new_tokens=30) for i in range(3)]
        errors = []
        for handle in handles:
            try:
                handle.result(20)  # one that came after the exit runs on the next thread
            except StageError as error:
                errors.append(str(error))
        assert errors
        assert all("plugin 'leaver' failed in stage 'execute'" in e and "told to exit" in e for e in errors)
        assert len(pipe.submit([5], max_new_tokens=3, ignore_eos=True).result(20).token_ids) == 3
        assert len(alone(pipe, [5], max_new_tokens=3, ignore_eos=True)) == 3
        assert_idle(pipe)


def test_closing_ends_waiting_readers_of_every_kind(unhurried: InferencePipeline) -> None:
    errors: list[type[BaseException]] = []

    def note(call: Callable[[], Any]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(type(error))

    unhurried.submit("0", max_new_tokens=70)
    calls: list[Callable[[], Any]] = [
        lambda: unhurried.submit("1", max_new_tokens=70).result(20),
        lambda: list(unhurried.submit("2", max_new_tokens=70)),
        lambda: list(unhurried.stream("3", max_new_tokens=70)),
        lambda: asyncio.run(_read(unhurried.submit("4", max_new_tokens=70))),
        lambda: unhurried.run([_plain_request()]),
    ]
    threads = [threading.Thread(target=note, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(unhurried.queue) >= 5)
    unhurried.close()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert len(errors) == 5
    assert set(errors) <= {RequestAbortedError, PipelineClosedError}
    assert not any(t.name == "llmopt-engine" and t.is_alive() for t in threading.enumerate())
    for call in (
        lambda: unhurried.submit("1"),
        lambda: unhurried.stream("1"),
        lambda: unhurried.batch(["1"], progress=False),
    ):
        with pytest.raises(PipelineClosedError):
            call()
    unhurried.close()  # harmless


def _plain_request() -> Any:
    from tests.llmopt.helpers import request

    return request([3 + ord("5")], "plain", max_new_tokens=70)


def test_generate_stream_batch_and_submit_at_once_give_their_solo_outputs() -> None:
    import torch

    prompts = tiny_prompts(4, min_length=4, max_length=20)
    with build_tiny(block_size=4, max_tokens_per_step=16) as pipe:
        options: dict[str, Any] = {"max_new_tokens": 10, "ignore_eos": True}
        sampled = {**options, "temperature": 1.0, "seed": 5}
        row = torch.tensor([prompts[0], prompts[0]])
        calls: list[Callable[[], Any]] = [
            lambda: pipe.generate(row, max_new_tokens=10, do_sample=False).tolist(),
            lambda: pipe.generate(row, max_new_tokens=10, do_sample=False, repetition_penalty=1.2).tolist(),
            lambda: "".join(pipe.stream(prompts[1], **options)),
            lambda: [o.token_ids for o in pipe.batch(prompts, progress=False, **sampled)],
            lambda: pipe.submit(prompts[2], **sampled).result(60).token_ids,
            lambda: asyncio.run(_read(pipe.submit(prompts[3], **options))),
        ]
        wanted = [call() for call in calls]
        failures: list[Any] = []

        def repeat(place: int) -> None:
            for _ in range(8):
                try:
                    got = calls[place]()
                except BaseException as error:
                    got = error
                if got != wanted[place]:
                    failures.append((place, got))

        threads = [threading.Thread(target=repeat, args=(i,)) for i in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        assert failures == []
        assert_idle(pipe)


def test_callers_without_a_background_thread_share_the_steps() -> None:
    prompts = tiny_prompts(4, max_length=12)
    with build_tiny(block_size=4, plugins=[slow(0.002)]) as pipe:
        wanted = [alone(pipe, p, max_new_tokens=10, ignore_eos=True) for p in prompts]
        got: list[Any] = [None] * 4
        threads = [
            threading.Thread(
                target=lambda i=i: got.__setitem__(i, alone(pipe, prompts[i], max_new_tokens=10, ignore_eos=True))
            )
            for i in range(4)
        ]
        steps = pipe.stats()["num_steps"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert got == wanted
        assert pipe.stats()["num_steps"] - steps < 30  # they came together, not one after the other
        assert_idle(pipe)

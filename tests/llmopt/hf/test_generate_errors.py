"""Errors and interrupts inside `generate`: they reach the caller, free everything, and disturb nobody else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.generation.streamers import BaseStreamer

from llmopt.errors import InvalidPromptError, NonFiniteLogitsError, PipelineClosedError
from tests.llmopt.hf.tiny import Pair, left_padded, prompts, tiny_gpt2, tiny_llama

NEW = {"max_new_tokens": 12, "eos_token_id": None}


class OwnError(Exception):
    """Raised by the caller's code in these tests."""


@pytest.fixture(scope="module", params=[tiny_llama, tiny_gpt2], ids=["llama", "gpt2"])
def shared_pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param())


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    """After each test nothing is left behind, and the pipeline works."""
    yield shared_pair
    pipe = shared_pair.pipe
    assert pipe.block_pool.num_used == 0
    pipe.block_pool.check()
    assert len(pipe.queue) == 0
    assert len(pipe.queue.free_slots) == pipe.config.scheduling.max_num_requests
    for options in ({}, {"do_sample": True}):
        shared_pair.same(**left_padded(), **NEW, **options)


class Raising:
    """A processor, criterion and streamer that raises in its n-th call."""

    def __init__(self, error: BaseException, call: int = 3) -> None:
        self.error = error
        self.call = call

    def _count(self) -> None:
        self.call -= 1
        if self.call == 0:
            raise self.error

    def processor(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._count()
        return scores

    def criterion(self, input_ids: Tensor, scores: Any, **_: Any) -> bool:
        self._count()
        return False

    def allowed(self, row: int, input_ids: Tensor) -> list[int]:
        self._count()
        return [4, 5, 6]

    def streamer(self) -> BaseStreamer:
        outer = self

        class Streamer(BaseStreamer):
            def put(self, value: Tensor) -> None:
                outer._count()

            def end(self) -> None:
                raise AssertionError("the end is not reached")

        return Streamer()


WAYS: dict[str, Callable[[Raising], dict[str, Any]]] = {
    "processor": lambda r: {"logits_processor": [r.processor]},
    "criterion": lambda r: {"stopping_criteria": [r.criterion]},
    "prefix function": lambda r: {"prefix_allowed_tokens_fn": r.allowed},
    "streamer": lambda r: {"streamer": r.streamer()},
}


@pytest.mark.parametrize("where", WAYS)
@pytest.mark.parametrize("call", [1, 3])
@pytest.mark.parametrize("kind", [OwnError, ValueError, StopIteration, KeyboardInterrupt, SystemExit, MemoryError])
def test_what_the_callers_code_raises_reaches_the_caller_as_it_is(
    pair: Pair, where: str, call: int, kind: type[BaseException]
) -> None:
    error = kind("raised on purpose")
    with pytest.raises(kind) as caught:
        pair.pipe.generate(**left_padded(), **NEW, **WAYS[where](Raising(error, call)))
    assert caught.value is error


@pytest.mark.parametrize("where", WAYS)
@pytest.mark.parametrize("kind", [OwnError, KeyboardInterrupt])
def test_other_calls_go_on_when_one_call_raises(pair: Pair, where: str, kind: type[BaseException]) -> None:
    """The failing call shares steps with others, greedy and sampled; each is stepped by whichever thread comes."""
    pipe = pair.pipe
    plain = GenerationMixin.generate(pair.model, prompts(2, 9, seed=1), max_new_tokens=40, eos_token_id=None)
    biased = GenerationMixin.generate(
        pair.model, prompts(2, 5, seed=2), max_new_tokens=40, repetition_penalty=1.3, eos_token_id=None
    )
    started = threading.Barrier(3, timeout=30)
    results: dict[str, Any] = {}

    def call(name: str, make: Callable[[], dict[str, Any]]) -> None:
        started.wait()
        try:
            results[name] = pipe.generate(**make(), eos_token_id=None)
        except BaseException as error:
            results[name] = error

    calls: dict[str, Callable[[], dict[str, Any]]] = {
        "plain": lambda: {"input_ids": prompts(2, 9, seed=1), "max_new_tokens": 40},
        "biased": lambda: {"input_ids": prompts(2, 5, seed=2), "max_new_tokens": 40, "repetition_penalty": 1.3},
        "raising": lambda: {**left_padded(), "max_new_tokens": 40, **WAYS[where](Raising(kind("on purpose"), 9))},
    }
    threads = [threading.Thread(target=call, args=item) for item in calls.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert isinstance(results["raising"], kind)
    # an interrupt also stops the thread in which it is raised, which may be stepping for another call
    stopped = {name for name, result in results.items() if isinstance(result, BaseException)} - {"raising"}
    assert len(stopped) <= (kind is KeyboardInterrupt)
    assert all(isinstance(results[name], KeyboardInterrupt) for name in stopped)
    assert "plain" in stopped or torch.equal(results["plain"], plain)
    assert "biased" in stopped or torch.equal(results["biased"], biased)


@pytest.mark.parametrize("where", WAYS)
def test_errors_come_through_the_background_thread_too(where: str) -> None:
    pair = Pair(tiny_llama())
    pair.pipe.start()
    handle = pair.pipe.submit(prompts(1)[0].tolist(), max_new_tokens=60, ignore_eos=True)
    with pytest.raises(OwnError):
        pair.pipe.generate(**left_padded(), **NEW, **WAYS[where](Raising(OwnError("on purpose"))))
    expected = GenerationMixin.generate(pair.model, prompts(1), max_new_tokens=60, eos_token_id=None)[0, 7:]
    assert handle.result(60).token_ids == expected.tolist()
    for options in ({}, {"do_sample": True}, {"return_dict_in_generate": True, "output_logits": True}):
        pair.same(**left_padded(), **NEW, **options)
    pair.pipe.close()
    assert pair.pipe.block_pool.num_used == 0


def test_gradients_are_off_in_callbacks_on_the_background_thread() -> None:
    pair = Pair(tiny_llama())
    pair.pipe.start()
    seen = []

    def processor(input_ids: Tensor, scores: Tensor) -> Tensor:
        seen.append((torch.is_grad_enabled(), threading.current_thread() is threading.main_thread()))
        return scores

    pair.pipe.generate(prompts(), max_new_tokens=3, logits_processor=[processor], eos_token_id=None)
    assert set(seen) == {(False, False)}
    pair.pipe.close()


def test_calls_in_and_outside_of_inference_mode_share_steps(pair: Pair) -> None:
    options = {"max_new_tokens": 40, "repetition_penalty": 1.2, "eos_token_id": None}
    expected = GenerationMixin.generate(pair.model, prompts(), **options)
    results: list[Any] = []

    def call(inference: bool) -> None:
        try:
            with torch.inference_mode(inference):
                results.append(pair.pipe.generate(prompts(), **options))
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=call, args=(mode,)) for mode in (True, False, True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 4
    assert all(torch.equal(result, expected) for result in results)


def test_many_threads_get_their_own_results(pair: Pair) -> None:
    cases: list[dict[str, Any]] = [
        {"input_ids": prompts(1 + n % 3, 4 + n, seed=n), **(left_padded() if n % 4 == 0 else {}), **extra}
        for n, extra in enumerate(
            [{}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 9}] * 2
        )
    ]
    expected = [GenerationMixin.generate(pair.model, **case, max_new_tokens=20) for case in cases]
    results: dict[int, Any] = {}

    def call(number: int) -> None:
        results[number] = pair.pipe.generate(**cases[number], max_new_tokens=20)

    threads = [threading.Thread(target=call, args=(n,)) for n in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(torch.equal(results[n], want) for n, want in enumerate(expected))


def test_an_error_in_preparation_leaves_nothing_behind(pair: Pair) -> None:
    ids = prompts()
    ids[2, 0] = 4000
    with pytest.raises(InvalidPromptError):
        pair.pipe.generate(ids, **NEW)
    with pytest.raises(OwnError):
        pair.pipe.generate(prompts(), **NEW, streamer=Raising(OwnError(), call=1).streamer())


def test_a_closed_pipeline_says_so_and_the_model_still_works() -> None:
    pair = Pair(tiny_llama())
    pair.pipe.close()
    for options in ({}, {"do_sample": True}):
        with pytest.raises(PipelineClosedError):
            pair.pipe.generate(prompts(), **NEW, **options)
    assert pair.model.generate(prompts(), **NEW).shape == (3, 19)


# ---------------------------------------------------------------------------------------------------------------------
# NaN and infinity
# ---------------------------------------------------------------------------------------------------------------------
POISON = 90  # the token whose embedding is not finite


@pytest.fixture(params=[float("nan"), float("inf")], ids=["nan", "inf"])
def poisoned(request: pytest.FixtureRequest) -> Pair:
    """A model that is broken for one token; prompts without it are fine until the token is chosen."""
    model = tiny_llama(tie_word_embeddings=False)
    pair = Pair(model)
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = request.param
    return pair


def poisoned_prompt() -> Tensor:
    ids = prompts()
    ids[1, 2] = POISON
    return ids


@pytest.mark.parametrize(
    "options",
    [{}, {"repetition_penalty": 1.2}, {"return_dict_in_generate": True, "output_scores": True}, {"do_sample": True}],
    ids=["native", "lockstep", "scores", "sampled"],
)
def test_nan_logits_are_an_error_that_says_what_to_do(poisoned: Pair, options: dict[str, Any]) -> None:
    with pytest.raises(NonFiniteLogitsError, match="weights and dtype"):
        poisoned.pipe.generate(poisoned_prompt(), **NEW, **options)
    assert poisoned.pipe.block_pool.num_used == 0
    poisoned.same(prompts(), suppress_tokens=[POISON], **NEW, **options)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_invalid_values_are_removed_on_demand_as_in_transformers(poisoned: Pair, sampled: bool) -> None:
    result, way = poisoned.same(poisoned_prompt(), remove_invalid_values=True, do_sample=sampled, **NEW)
    assert way == "lockstep"
    assert isinstance(result, Tensor)


def test_other_requests_do_not_notice_nan_logits(poisoned: Pair) -> None:
    pipe = poisoned.pipe
    ids = prompts(1, 9, seed=1)
    expected = GenerationMixin.generate(
        poisoned.model, ids, max_new_tokens=40, suppress_tokens=[POISON], eos_token_id=None
    )
    results: dict[str, Any] = {}

    def call(name: str, **kwargs: Any) -> None:
        try:
            results[name] = pipe.generate(**kwargs, eos_token_id=None)
        except Exception as error:
            results[name] = error

    threads = [
        threading.Thread(
            target=call,
            kwargs={"name": "good", "input_ids": ids, "max_new_tokens": 40, "suppress_tokens": [POISON]},
        ),
        *(
            threading.Thread(target=call, kwargs={"name": f"bad {n}", "input_ids": poisoned_prompt()[n : n + 1]})
            for n in (1, 1, 1)
        ),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert torch.equal(results["good"], expected)
    assert isinstance(results["bad 1"], NonFiniteLogitsError)
    assert pipe.block_pool.num_used == 0


def test_minus_infinity_everywhere_is_what_transformers_makes_of_it(pair: Pair) -> None:
    _, way = pair.same(prompts(), suppress_tokens=list(range(128)), **NEW)
    assert way == "lockstep"


def test_a_choice_that_an_interrupted_step_lost_is_given_again_and_not_made_twice() -> None:
    """An interrupt between choice and commit sends the rows back, and their next logits come once more."""
    pair = Pair(tiny_llama())
    pipe = pair.pipe
    commit, steps = pipe.commit, []
    options = {**NEW, "repetition_penalty": 1.2}
    expected = GenerationMixin.generate(pair.model, prompts(), **options)

    def interrupted(batch: Any, accepted: Any) -> Any:
        steps.append(len(batch.requests))
        if len(steps) == 3:
            raise KeyboardInterrupt
        return commit(batch, accepted)

    pipe.commit = interrupted
    results: list[Any] = []

    def call() -> None:
        try:
            results.append(pipe.generate(prompts(), **options))
        except BaseException as error:
            results.append(error)

    # this thread steps, the call waits for it
    pipe._thread = threading.current_thread()
    caller = threading.Thread(target=call)
    caller.start()
    while caller.is_alive():
        try:
            pipe.advance()
        except KeyboardInterrupt:
            steps.append(0)
    pipe._thread = None
    assert torch.equal(results[0], expected)
    assert 0 in steps
    assert pipe.block_pool.num_used == 0


# -- ids --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.uint8, torch.int16])
def test_ids_that_are_no_ids_raise_what_transformers_raises(pair: Pair, dtype: torch.dtype) -> None:
    error, way = pair.same(torch.tensor([[5, 6, 7]]).to(dtype), **NEW)
    assert isinstance(error, RuntimeError)
    assert way == f"input_ids are {dtype}"


def test_ids_of_32_bits_are_ids(pair: Pair) -> None:
    _, way = pair.same(torch.tensor([[5, 6, 7]], dtype=torch.int32), **NEW)
    assert way == "native"

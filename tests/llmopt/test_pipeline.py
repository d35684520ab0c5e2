"""The step and what goes wrong in it: errors name plugin and stage, end one request only, and leave nothing behind."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import llmopt
from llmopt import PluginInfo, hookimpl, recovery
from llmopt.errors import (
    DeadlineError,
    PipelineClosedError,
    RequestAbortedError,
    RequestError,
    StageError,
    UnsupportedModelError,
)
from llmopt.request import Request, SamplingParams
from llmopt.testing import tiny_model, tiny_prompts
from tests.llmopt.helpers import alone, assert_idle, build_tiny, pool_bytes, request, wrap


class Fault(RuntimeError):
    """Raised on purpose."""


def about(argument: Any, name: str) -> bool:
    """Whether the argument of a stage concerns the request ``name``."""
    if isinstance(argument, Request):
        return argument.request_id == name
    if hasattr(argument, "request_ids"):
        return name in argument.request_ids
    return hasattr(argument, "by_id") and name in argument.by_id


def failing(stage: str, name: str = "bad", after: int = 0, *, late: bool = False) -> Any:
    """A plugin whose stage raises for the request ``name`` once it has ``after`` output tokens.

    :param late: raise when the inner stage has done its work.
    """

    class Stage:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, attribute: str) -> Any:
            return getattr(self.inner, attribute)

        def __call__(self, *arguments: Any) -> Any:
            found = self._is_due(arguments[0])
            result = self.inner(*arguments) if late or not found else None
            if found:
                raise Fault("on purpose")
            return result

        @staticmethod
        def _is_due(argument: Any) -> bool:
            if not about(argument, name):
                return False
            if isinstance(argument, Request):
                made = argument
            elif hasattr(argument, "by_id"):
                made = argument.by_id[name]
            else:
                made = next(r for r in argument.requests if r.request_id == name)
            return made.num_output_tokens >= after

    return wrap(stage, Stage, name="saboteur")


STEP_STAGES = [
    "schedule", "order", "budget", "lookup", "allocate", "propose", "constrain", "exchange",
    "adapt", "execute", "verify", "commit", "detokenize",
]  # fmt: skip


@pytest.mark.parametrize("stage", STEP_STAGES)
@pytest.mark.parametrize("after", [0, 3])
def test_a_stage_that_fails_for_one_request_ends_that_request_only(stage: str, after: int) -> None:
    prompts = tiny_prompts(4, min_length=2, max_length=12)
    with build_tiny() as plain:
        wanted = [alone(plain, p, max_new_tokens=8, ignore_eos=True) for p in prompts]
    with build_tiny(plugins=["paged_kv", failing(stage, after=after)], block_size=4, max_tokens_per_step=16) as pipe:
        requests: list[Any] = [
            {"prompt": p, "request_id": n} for p, n in zip(prompts, ("a", "bad", "b", "c"), strict=True)
        ]
        outputs = pipe.batch(requests, max_new_tokens=8, ignore_eos=True, progress=False)
        bad = outputs.pop(1)
        if stage == "lookup" and after:  # looked up once, when it started
            assert bad.error is None
        else:
            assert bad.finish_reason == "error"
            assert isinstance(bad.error, StageError)
            assert "plugin 'saboteur' failed in stage" in str(bad.error)
            assert "'bad'" in str(bad.error)
            assert "Fault: on purpose" in str(bad.error)
            assert isinstance(bad.error.__cause__, Fault)
            assert pipe.stats()["num_errors"] == 1
        assert [o.token_ids for o in outputs] == [wanted[0], *wanted[2:]]
        assert not any(o.error for o in outputs)
        assert_idle(pipe)
        assert alone(pipe, prompts[0], max_new_tokens=8, ignore_eos=True) == wanted[0]


@pytest.mark.parametrize("stage", ["verify", "commit", "detokenize"])
def test_a_stage_that_fails_after_its_work_loses_no_token_of_the_others(stage: str) -> None:
    prompts = tiny_prompts(3, max_length=10)
    with build_tiny() as plain:
        wanted = [alone(plain, p, max_new_tokens=8, ignore_eos=True) for p in prompts]
    with build_tiny(plugins=[failing(stage, after=3, late=True)], block_size=4) as pipe:
        named = zip(prompts, ("a", "bad", "b"), strict=True)
        handles = [pipe.submit(p, request_id=n, max_new_tokens=8, ignore_eos=True) for p, n in named]
        assert handles[0].result(20).token_ids == wanted[0]
        assert handles[2].result(20).token_ids == wanted[2]
        with pytest.raises(StageError, match="saboteur"):
            handles[1].result(20)
        assert_idle(pipe)


def test_requests_that_ended_in_a_step_whose_commit_failed_afterwards_are_told() -> None:
    with build_tiny(plugins=[failing("commit", name="b", after=2, late=True)]) as pipe:
        first = pipe.submit([5, 6], request_id="a", max_new_tokens=3, ignore_eos=True)
        second = pipe.submit([7, 8], request_id="b", max_new_tokens=9, ignore_eos=True)
        assert len(first.result(20).token_ids) == 3
        with pytest.raises(StageError):
            second.result(20)
        assert_idle(pipe)


def test_a_stage_that_always_fails_ends_every_request_and_not_the_pipeline() -> None:
    state = {"broken": False}

    def change(inner: Callable[..., Any]) -> Any:
        def execute(batch: Any, drafts: Any) -> Any:
            if state["broken"]:
                raise Fault("always")
            return inner(batch, drafts)

        return execute

    with build_tiny(plugins=[wrap("execute", change)], max_num_requests=3, block_size=4) as pipe:
        state["broken"] = True
        outputs = pipe.batch([[5, i] for i in range(3, 13)], progress=False, n=2, temperature=1.0, max_new_tokens=4)
        assert [o.finish_reason for o in outputs] == ["error"] * 20
        with pytest.raises(StageError, match="plugin 'inline' failed in stage 'execute'"):
            pipe.generate(torch.tensor([[5, 6]]), max_new_tokens=3, do_sample=False)
        assert_idle(pipe)
        state["broken"] = False
        assert len(alone(pipe, [5], max_new_tokens=3, ignore_eos=True)) == 3


def test_a_failure_while_blocks_are_freed_ends_all_requests_with_it() -> None:
    state = {"broken": False}

    class Leaky:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __call__(self, made: Request, num_tokens: int) -> Any:
            return self.inner(made, num_tokens)

        def free(self, made: Request) -> None:
            if state["broken"]:
                raise Fault("cannot free")
            self.inner.free(made)

        def num_blocks_ever(self, made: Request) -> Any:
            return self.inner.num_blocks_ever(made)

    with build_tiny(plugins=[wrap("allocate", Leaky)]) as pipe:
        handles = [pipe.submit([5, i], max_new_tokens=5, ignore_eos=True) for i in range(3, 6)]
        state["broken"] = True
        more = [pipe.submit([5, i], max_new_tokens=200, ignore_eos=True) for i in range(3, 6)]
        for handle in [*handles, *more]:
            try:
                assert len(handle.result(20).token_ids) == 5  # was quick
            except StageError as error:
                told = str(error)
            else:
                continue
            assert "cannot free" in told
        assert len(pipe.queue) == 0
        state["broken"] = False
        assert len(alone(pipe, [5], max_new_tokens=3, ignore_eos=True)) == 3


@pytest.mark.parametrize("stage", ["tokenize", "encode_media", "admit"])
def test_a_stage_that_fails_on_arrival_names_its_plugin_and_admits_nothing(stage: str) -> None:
    for late in (False, True):

        def change(inner: Callable[..., Any], late: bool = late) -> Any:
            def call(*arguments: Any) -> Any:
                if late:
                    inner(*arguments)
                raise Fault("at the door")

            return call

        with build_tiny(plugins=[wrap(stage, change, name="porter")]) as pipe:
            for face in (
                lambda: pipe.stream("hi"),
                lambda: pipe.submit("hi"),
                lambda: pipe.batch(["hi"], progress=False),
            ):
                with pytest.raises(StageError, match=f"plugin 'porter' failed in stage '{stage}'.*Fault: at the door"):
                    face()
            assert_idle(pipe)


def test_an_error_of_generates_own_processor_reaches_its_caller_unchanged() -> None:
    def broken(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise Fault("mine")

    class Broken:
        __call__ = staticmethod(broken)

    with build_tiny() as pipe:
        other = pipe.submit([5, 6], max_new_tokens=40, ignore_eos=True)
        with pytest.raises(Fault, match="mine"):
            pipe.generate(torch.tensor([[5, 6], [7, 8]]), logits_processor=[Broken()], max_new_tokens=5)
        assert len(other.result(20).token_ids) == 40
        assert_idle(pipe)


def test_a_failure_in_the_forward_leaves_a_lockstep_group_beside_it_whole() -> None:
    model = tiny_model()
    row = torch.tensor([[5, 6, 7], [8, 9, 10]])
    options: dict[str, Any] = {"max_new_tokens": 12, "repetition_penalty": 1.3, "do_sample": False}
    wanted = model.generate(row, **options)
    with llmopt.build(model, [failing("execute", after=2)], block_size=4) as pipe:
        for _ in range(5):
            got: list[Any] = []
            thread = threading.Thread(target=lambda got=got: got.append(pipe.generate(row, **options)))
            bad = request([4, 4], "bad", max_new_tokens=8)
            thread.start()
            with pytest.raises(StageError):
                pipe.run([bad])
            thread.join(20)
            assert len(got) == 1
            assert torch.equal(got[0], wanted)
            assert_idle(pipe)


def test_requests_that_start_again_keep_their_order() -> None:
    with build_tiny(block_size=4) as pipe:
        for name in "abcd":
            pipe.add(request([5, 6], name))
        pipe.advance()
        recovery.restart(pipe, list(pipe.queue.running))
        assert "".join(r.request_id for r in pipe.queue.waiting) == "abcd"
        assert pipe.block_pool.num_used == 0
        pipe.wait(lambda: not len(pipe.queue))
        assert_idle(pipe)


def test_an_interrupted_step_is_done_again() -> None:
    state = {"armed": True}

    def change(inner: Callable[..., Any]) -> Any:
        def commit(batch: Any, accepted: Any) -> Any:
            if state["armed"] and batch.requests[0].num_output_tokens == 3:
                state["armed"] = False
                raise KeyboardInterrupt
            return inner(batch, accepted)

        return commit

    with build_tiny(plugins=[wrap("commit", change)], block_size=4) as pipe:
        state["armed"] = False
        wanted = alone(pipe, [5, 6], max_new_tokens=8, ignore_eos=True)
        state["armed"] = True
        made = request([5, 6])
        pipe.add(made)
        with pytest.raises(KeyboardInterrupt):
            pipe.wait(lambda: made.is_finished)
        pipe.wait(lambda: made.is_finished)
        assert made.output_ids == wanted
        assert_idle(pipe)
        state["armed"] = True
        with pytest.raises(KeyboardInterrupt):
            pipe.batch([[5, 6]], max_new_tokens=8, ignore_eos=True, progress=False)
        assert_idle(pipe)  # the caller went away, and so did his request


def test_a_listener_that_fails_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with build_tiny() as pipe:
        made = request([5, 6], "loud")
        pipe.add(made, lambda r: 1 / 0)
        pipe.wait(lambda: made.is_finished)
        assert made.num_output_tokens == 8
        assert "a listener of request 'loud' failed" in caplog.text
        assert_idle(pipe)


# -- life of a pipeline ---------------------------------------------------------------------------
def test_a_closed_pipeline_refuses_everything_and_closing_twice_is_harmless() -> None:
    pipe = build_tiny()
    with pipe as same:
        assert same is pipe
        assert len(alone(pipe, [5], max_new_tokens=2, ignore_eos=True)) == 2
    pipe.close()
    for call in (
        lambda: pipe.batch([[5]], progress=False),
        lambda: pipe.add(request([5])),
        lambda: pipe.generate(torch.tensor([[5]]), max_new_tokens=2),
        pipe.start,
    ):
        with pytest.raises(PipelineClosedError, match="Build a new one"):
            call()


def test_closing_aborts_what_runs_and_calls_close_of_the_stages() -> None:
    closed: list[str] = []

    class Closing:
        info = PluginInfo(name="closing", layer="kernel", promise="exact")

        @hookimpl
        def llmopt_wrap_execute(self, execute: Any) -> Any:
            class Stage:
                def __call__(self, batch: Any, drafts: Any) -> Any:
                    return execute(batch, drafts)

                def close(self) -> None:
                    closed.append("execute")

            return Stage()

    pipe = build_tiny(plugins=[Closing()])
    made = request([5, 6], max_new_tokens=100)
    pipe.add(made)
    pipe.advance()
    pipe.close()
    assert made.finish_reason == "abort"
    assert isinstance(made.error, RequestAbortedError)
    assert closed == ["execute"]
    assert pipe.block_pool.num_used == 0


def test_a_finished_request_cannot_be_added_again() -> None:
    with build_tiny() as pipe:
        made = request([5, 6])
        pipe.run([made])
        with pytest.raises(RequestError, match="has run already"):
            pipe.add(made)


def test_media_of_many_requests_are_prepared_outside_of_the_lock() -> None:
    free: list[bool] = []

    def encode(inner: Any) -> Any:
        def look(request: Request) -> None:
            def try_lock() -> None:
                with pipe._lock:
                    free.append(True)

            other = threading.Thread(target=try_lock, daemon=True)
            other.start()
            other.join(timeout=5.0)

        return look

    with build_tiny(plugins=[wrap("encode_media", encode)]) as pipe:
        free.clear()  # the self-test has been there
        pipe.batch([[5, 6], [7, 8]], max_new_tokens=2, progress=False)
        assert free == [True, True]


def test_an_adapter_that_nobody_loads_is_refused_on_arrival_and_disturbs_nobody() -> None:
    with build_tiny() as pipe:
        running = request([5, 6], "running")
        pipe.add(running)
        pipe.advance()
        with pytest.raises(RequestError, match="'lost' asks for adapter 'poet', and no plugin that loads adapters"):
            pipe.add(Request("lost", [7, 8], SamplingParams(max_new_tokens=4), 6, adapter="poet"))
        assert running.num_preemptions == 0
        pipe.run([request([5, 6])])
        pipe.abort(running)
        assert_idle(pipe)


def test_an_error_of_this_library_reaches_the_request_as_it_was_raised() -> None:
    class Adapters:
        def __init__(self, adapt: Any) -> None:
            self.adapt = adapt

        def __call__(self, batch: Any) -> None:
            self.adapt(batch)

    with build_tiny(plugins=[wrap("adapt", Adapters)]) as pipe:
        lost = Request("lost", [7, 8], SamplingParams(max_new_tokens=4), 6, adapter="poet", wants_text=False)
        with pytest.raises(RequestError, match="^a request asks for adapter 'poet'"):
            pipe.run([lost])
        assert_idle(pipe)


def test_without_an_engine_abort_does_nothing_and_start_names_the_reason() -> None:
    model = tiny_model()
    model.config.is_encoder_decoder = True
    with llmopt.build(model) as pipe:
        pipe.abort("anything")
        with pytest.raises(UnsupportedModelError, match="engine cannot run this model: encoder-decoder"):
            pipe.start()


def test_aborting_what_is_unknown_or_finished_changes_nothing() -> None:
    with build_tiny() as pipe:
        made = request([5, 6])
        pipe.run([made])
        pipe.abort(made)
        pipe.abort("nobody")
        assert made.finish_reason == "length"
        assert pipe.stats()["num_aborted"] == 0


def test_numbers_count_steps_tokens_and_ends() -> None:
    with build_tiny(max_tokens_per_step=4) as pipe:
        pipe.run([request([5] * 6, max_new_tokens=3)])
        pipe.add(request([5], "gone"))
        pipe.abort("gone")
        numbers = pipe.stats()
        assert (numbers["num_steps"], numbers["num_step_tokens"], numbers["num_new_tokens"]) == (4, 8, 3)
        assert (numbers["num_finished"], numbers["num_aborted"], numbers["num_errors"]) == (1, 1, 0)
        assert numbers["num_blocks_used"] == 0


def test_without_plugins_every_stage_is_the_plain_one() -> None:
    with build_tiny() as pipe:
        for name, plain in vars(pipe.baseline).items():
            if hasattr(pipe, name):
                assert getattr(pipe, name) is plain


def test_the_model_is_as_it_was_before_after_any_use() -> None:
    model = tiny_model()
    ids = torch.tensor([[5, 6, 7, 8]])

    def state() -> dict[str, Any]:
        return {
            "config": copy.deepcopy(vars(model.config)),
            "generation": model.generation_config.to_dict(),
            "training": model.training,
            "attention": model.config._attn_implementation,
            "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
            "grad": [(p.requires_grad, p.dtype) for p in model.parameters()],
            "attributes": sorted(vars(model)),
        }

    before, logits = state(), model(ids).logits.detach()
    mine = model.generate(ids, max_new_tokens=6, do_sample=False)
    with llmopt.build(model, ["paged_kv"], block_size=4) as pipe:
        first = pipe.batch(tiny_prompts(5), max_new_tokens=4, progress=False)
        second = pipe.batch(tiny_prompts(5), max_new_tokens=4, progress=False)
        assert [o.prompt_ids for o in second] == [o.prompt_ids for o in first] == tiny_prompts(5)
        assert [o.token_ids for o in second] == [o.token_ids for o in first]
        assert torch.equal(pipe.generate(ids, max_new_tokens=6, do_sample=False), mine)
        assert torch.equal(model(ids).logits, logits)  # also while the pipeline is there
    assert state() == before
    assert torch.equal(model(ids).logits, logits)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), mine)
    model.train()
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_the_model_can_be_used_by_other_threads_while_the_pipeline_runs() -> None:
    model = tiny_model()
    ids = torch.tensor([tiny_prompts(1, min_length=20)[0]])
    with torch.no_grad():
        logits = model(ids).logits
    mine = model.generate(ids, max_new_tokens=6, do_sample=False)
    with llmopt.build(model, block_size=4) as pipe:
        handles = [pipe.submit([5, 6 + i], max_new_tokens=200, ignore_eos=True) for i in range(4)]
        rounds = 0
        while not all(h.is_finished for h in handles):
            with torch.no_grad():
                assert torch.equal(model(ids).logits, logits)
            assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), mine)
            rounds += 1
        assert rounds > 1
        assert len({len(h.result().token_ids) for h in handles}) == 1


def test_a_crowd_larger_than_pool_and_slots_ends() -> None:
    with build_tiny(plugins=["paged_kv"], block_size=4, max_num_requests=5, pool_bytes=pool_bytes(30, 4),
                    max_model_len=100) as pipe:  # fmt: skip
        outputs = pipe.batch(tiny_prompts(60, max_length=40), max_new_tokens=20, ignore_eos=True, progress=False)
        assert [len(o.token_ids) for o in outputs] == [20] * 60
        assert_idle(pipe)


# -- when nothing can run --------------------------------------------------------------------------------------------
class Held:
    """A budget that lets nobody start before a time, and counts how often it is asked."""

    def __init__(self, inner: Any, until_s: float) -> None:
        self.inner, self.until_s = inner, until_s
        self.num_calls = 0

    def __call__(self, queue: Any) -> Any:
        self.num_calls += 1
        budget = self.inner(queue)
        if time.perf_counter() < self.until_s:
            budget.may_start = False
            budget.wake_at(self.until_s)
        return budget


@pytest.mark.parametrize("face", ["batch", "submit"])
def test_who_waits_for_a_held_request_wakes_up_when_the_scheduler_wants_to_and_does_not_spin(face: str) -> None:
    made: list[Held] = []
    plugin = wrap("budget", lambda inner: made.append(Held(inner, 0.0)) or made[0])
    with build_tiny(plugins=[plugin]) as pipe:
        held = made[0]
        pipe.batch([[5, 6]], max_new_tokens=2, progress=False)
        start, held.num_calls = time.perf_counter(), 0
        held.until_s = start + 0.15
        if face == "batch":
            (output,) = pipe.batch([[5, 6, 7]], max_new_tokens=2, ignore_eos=True, progress=False)
        else:
            output = pipe.submit([5, 6, 7], max_new_tokens=2, ignore_eos=True).result(timeout_s=30)
        assert len(output.token_ids) == 2
        assert output.ttft_s is not None
        assert 0.14 < output.ttft_s < 5.0
        assert held.num_calls <= 8  # once or twice before, twice for the tokens


def test_a_request_that_arrives_while_others_are_held_back_wakes_the_one_who_sleeps() -> None:
    def hold_pairs(inner: Any) -> Any:
        def budget(queue: Any) -> Any:
            found = inner(queue)
            if len(queue) == 1 and not queue.running:
                found.may_start = False
                found.wake_at(time.perf_counter() + 30.0)
            return found

        return budget

    with build_tiny(plugins=[wrap("budget", hold_pairs)]) as pipe:
        start = time.perf_counter()
        first = pipe.submit([5, 6, 7], max_new_tokens=2, ignore_eos=True)
        time.sleep(0.05)
        assert pipe.stats()["num_waiting"] == 1
        second = pipe.submit([5, 6, 7], max_new_tokens=4, ignore_eos=True)
        assert len(first.result(timeout_s=20).token_ids) == 2
        second.abort()
        assert time.perf_counter() - start < 10


def test_a_request_refused_while_it_waits_ends_with_its_error_and_is_counted() -> None:
    def refusing(inner: Any) -> Any:
        def order(queue: Any) -> None:
            inner(queue)
            for made in list(queue.waiting):
                if made.tenant == "late":
                    queue.refuse(made, DeadlineError("too late"))

        return order

    with build_tiny(plugins=[wrap("order", refusing)]) as pipe:
        wanted = alone(pipe, [5, 6, 7], max_new_tokens=3)
        prompts = [{"prompt": [5, 6, 7]}, {"prompt": [8, 9], "tenant": "late"}]
        good, bad = pipe.batch(prompts, max_new_tokens=3, progress=False)
        assert good.token_ids == wanted
        assert isinstance(bad.error, DeadlineError)
        assert bad.finish_reason == "error"
        with pytest.raises(DeadlineError, match="too late"):
            pipe.submit([5, 6], tenant="late").result(timeout_s=20)
        with pytest.raises(DeadlineError, match="too late"):
            list(pipe.stream([5, 6], tenant="late"))
        assert pipe.stats()["num_errors"] == 3
        assert_idle(pipe)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"priority": 0.5}, "priority must be an int"),
        ({"tenant": 3}, "tenant must be a text"),
        ({"deadline_s": 0}, "deadline_s must be a number of seconds above 0, found 0"),
        ({"deadline_s": "soon"}, "deadline_s must be a number"),
    ],
)
def test_what_a_scheduler_could_not_compare_is_refused_at_the_door(options: dict[str, Any], told: str) -> None:
    with build_tiny() as pipe, pytest.raises(RequestError, match=told):
        pipe.batch([[5, 6]], progress=False, **options)


@pytest.mark.parametrize("plugins", [[], pytest.param(["native"], marks=pytest.mark.native)])
def test_requests_for_a_model_of_another_dtype_than_the_pool_are_told_to_build_again(plugins: list[str]) -> None:
    model = tiny_model()
    told = "dtype was torch.float32 when the pipeline was built and is torch.bfloat16 now; build again"
    with llmopt.build(model, plugins) as pipe:
        model.to(torch.bfloat16)
        for call in (pipe.batch, lambda prompts, **options: pipe.submit(prompts[0]), lambda *_, **__: pipe.start()):
            with pytest.raises(UnsupportedModelError, match=told):
                call([[5, 6, 7]], progress=False)
        assert_idle(pipe)
        model.to(torch.float32)
        with llmopt.build(model) as other:  # its weights were rounded meanwhile
            assert alone(pipe, [5, 6, 7], max_new_tokens=4) == alone(other, [5, 6, 7], max_new_tokens=4)

"""Several pipelines, and the user himself, on one model at the same time."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import llmopt
from llmopt.errors import ModelError
from llmopt.testing import tiny_model


def _in_threads(*bodies: Callable[[], None]) -> list[BaseException]:
    errors: list[BaseException] = []

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.mark.parametrize("kind", ["llama", "gemma2"])  # sdpa and eager by default
def test_two_pipelines_step_one_model_at_the_same_time_and_leave_it_as_it_was(kind: str) -> None:
    model = tiny_model(kind)
    before = model.config._attn_implementation
    ids = torch.randint(3, 500, (3, 7))
    expected = model.generate(ids, max_new_tokens=20, do_sample=False)
    pipes = [llmopt.build(model) for _ in range(2)]

    def run(pipe: Any) -> Callable[[], None]:
        def body() -> None:
            for _ in range(10):
                assert torch.equal(pipe.generate(ids, max_new_tokens=20, do_sample=False), expected)

        return body

    assert _in_threads(run(pipes[0]), run(pipes[1])) == []
    for pipe in pipes:
        pipe.close()
    assert model.config._attn_implementation == before
    assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False), expected)


def test_building_and_closing_other_pipelines_does_not_disturb_who_uses_the_model_beside_a_step() -> None:
    model = tiny_model()
    ids = torch.randint(3, 500, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    expected = model(ids, attention_mask=mask).logits
    pipe = llmopt.build(model)
    llmopt.build(model).close()
    stop = threading.Event()

    def use() -> None:
        while not stop.is_set():
            assert torch.equal(model(ids, attention_mask=mask).logits, expected)

    def step() -> None:
        try:
            for _ in range(30):
                pipe.batch([[5, 6, 7]], max_new_tokens=10, progress=False)
                llmopt.build(model).close()
        finally:
            stop.set()

    assert _in_threads(use, step) == []
    pipe.close()


def test_an_implementation_that_the_user_chooses_between_steps_stays() -> None:
    model = tiny_model()
    with llmopt.build(model) as pipe:
        pipe.batch([[5, 6]], max_new_tokens=2, progress=False)
        model.set_attn_implementation("eager")
        pipe.batch([[5, 6]], max_new_tokens=2, progress=False)
        assert model.config._attn_implementation == "eager"


def test_a_config_that_kept_the_name_of_a_step_is_told_what_to_do() -> None:
    model = tiny_model()
    model.config._attn_implementation_internal = "llmopt"
    with pytest.raises(ModelError, match="set_attn_implementation"):
        model(torch.tensor([[5, 6]]))


def test_close_frees_the_pool_even_while_the_pipeline_is_held() -> None:
    pipe = llmopt.build(tiny_model())
    pipe.batch([[5, 6]], max_new_tokens=2, progress=False)
    keys = [weakref.ref(layer.key) for layer in pipe.kv_cache.layers.values()]
    pipe.close()
    gc.collect()
    assert [key() for key in keys] == [None] * len(keys)

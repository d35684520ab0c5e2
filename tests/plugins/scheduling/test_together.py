"""All plugins of scheduling at once, with those of memory: requests come, go and come back, and nothing is left."""

from __future__ import annotations

import random
from typing import Any

import pytest

import llmopt
from llmopt.pipeline import InferencePipeline
from llmopt.testing import assert_same_tokens, tiny_model, tiny_prompts
from tests.llmopt.helpers import alone, assert_idle, build_tiny, pool_bytes, request

SCHEDULING = [
    "request_order:fair=true,deadlines=refuse",
    "batch_window:min_batch=3,max_wait_ms=1",
    "pd_separation:slice_ms=0.05",
    "chunked_prefill:chunk_size=9",
]
COMPANIES = {
    "reversed": SCHEDULING[::-1],
    "cached": ["paged_kv", "prefix_cache", "request_order:policy=cached_prefix", *SCHEDULING[1:]],
}


TURNS = {  # who waits for whom, and in which steps prompts are computed
    "window": ["batch_window"],
    "small window": ["batch_window:min_batch=3,max_wait_ms=5,group_tokens=7", "paged_kv"],
    "slices": ["pd_separation"],
    "small slices": ["pd_separation:slice_ms=0.01,decode_share=0.7", "paged_kv"],
    "window and chunks": ["paged_kv", "batch_window", "chunked_prefill:chunk_size=6"],
    "all": ["paged_kv", "batch_window", "pd_separation", "chunked_prefill:chunk_size=6"],
}


def build(company: str, **options: Any) -> InferencePipeline:
    sizes: dict[str, Any] = {"block_size": 4, "max_num_requests": 3, "pool_bytes": pool_bytes(20, 4)}
    return build_tiny(plugins=COMPANIES[company], **sizes | options)


def assert_nothing_is_left(pipe: InferencePipeline) -> None:
    pipe.block_pool.check()
    assert len(pipe.queue) == 0
    assert pipe.block_pool.num_used == 0
    assert len(set(pipe.queue.free_slots)) == 3


@pytest.mark.parametrize("plugins", TURNS.values(), ids=TURNS)
def test_tokens_are_those_of_the_model_whoever_has_the_turn(plugins: list[str]) -> None:
    model = tiny_model()
    options: dict[str, Any] = {"block_size": 4, "max_model_len": 96, "pool_bytes": pool_bytes(60, 4)}
    with llmopt.build(model, plugins, **options) as pipe:
        assert_same_tokens(pipe, model, tiny_prompts(6, min_length=1, max_length=40), max_new_tokens=16)
        assert_idle(pipe)


@pytest.mark.parametrize("company", COMPANIES)
def test_requests_in_any_order_and_at_any_priority_have_the_tokens_that_they_have_alone(company: str) -> None:
    prompts = tiny_prompts(8, max_length=30, min_length=2)
    settings: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 3}, {"repetition_penalty": 1.3}, {"top_k": 9}]
    requests = [
        {"prompt": prompt, "max_new_tokens": 1 + place, **settings[place % 4]} for place, prompt in enumerate(prompts)
    ]
    with build_tiny() as plain:
        wanted = [alone(plain, r, ignore_eos=True) for r in requests]
    with build(company) as pipe:
        for seed in range(5):
            chooser = random.Random(seed)
            order = chooser.sample(range(8), 8)
            mixed = [
                requests[i] | {"priority": chooser.randrange(3), "tenant": chooser.choice("abc"), "deadline_s": 600.0}
                for i in order
            ]
            outputs = pipe.batch(mixed, ignore_eos=True, progress=False)
            assert [o.token_ids for o in outputs] == [wanted[i] for i in order]
        assert_nothing_is_left(pipe)


@pytest.mark.parametrize("company", COMPANIES)
def test_an_id_that_is_aborted_and_used_again_at_once_belongs_to_the_new_request(company: str) -> None:
    chooser = random.Random(2)
    prompts = tiny_prompts(6, max_length=30)
    with build(company) as pipe:
        wanted = [alone(pipe, prompt, max_new_tokens=6, ignore_eos=True) for prompt in prompts]
        for _ in range(60):
            pipe.add(request(chooser.choice(prompts), "r", max_new_tokens=6))
            for _ in range(chooser.randint(0, 3)):
                pipe.advance()
            pipe.abort("r")
            number = chooser.randrange(len(prompts))
            again = request(prompts[number], "r", max_new_tokens=6)
            pipe.run([again])
            assert again.output_ids == wanted[number]
        assert_nothing_is_left(pipe)


@pytest.mark.parametrize("company", COMPANIES)
def test_waiting_requests_that_are_aborted_leave_nothing_behind(company: str) -> None:
    with build(company) as pipe:
        made = [request(tiny_prompts(1, min_length=9, max_length=9)[0], str(i), tenant=str(i % 2)) for i in range(10)]
        for r in made:
            pipe.add(r)
        for _ in range(3):
            pipe.advance()
        for r in made:
            pipe.abort(r)
        assert all(r.finish_reason in ("abort", "length") for r in made)
        assert_nothing_is_left(pipe)


@pytest.mark.parametrize("company", COMPANIES)
def test_calls_one_after_the_other_return_their_own_results_in_order(company: str) -> None:
    prompts = tiny_prompts(11, max_length=20)
    with build(company) as pipe:
        for number in range(20):
            size = (1, 7, 3)[number % 3]
            chosen = random.Random(number).sample(prompts, size)
            outputs = pipe.batch(chosen, max_new_tokens=3, progress=False)
            assert [o.prompt_ids for o in outputs] == chosen
        assert_nothing_is_left(pipe)


@pytest.mark.parametrize("company", COMPANIES)
def test_a_prompt_that_fits_only_when_another_ends_is_not_computed_again_and_again(company: str) -> None:
    """20 blocks of 4: one decodes in 12 of them, the other needs 15 for its prompt."""
    with build(company, max_model_len=80) as pipe:
        first = request([5] * 30, "a", max_new_tokens=17)
        pipe.add(first)
        while first.num_output_tokens < 2:
            pipe.advance()
        second = request(list(range(5, 65)), "b", max_new_tokens=4)
        pipe.run([second])
        pipe.wait(lambda: first.is_finished)
        assert (first.num_output_tokens, second.num_output_tokens) == (17, 4)
        assert pipe.stats()["num_step_tokens"] < 2 * (30 + 17 + 60 + 4)
        assert_nothing_is_left(pipe)

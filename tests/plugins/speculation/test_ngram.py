"""Drafts from the text itself: the tokens stay the same, and there are fewer steps."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import llmopt
from llmopt import native
from llmopt.testing import scripted_model, tiny_model, tiny_prompts, tiny_tokenizer
from llmopt_plugins.speculation.ngram import Ngram
from llmopt_plugins.speculation.ngram.drafter import NgramDrafter, new_automaton
from llmopt_plugins.speculation.ngram.shared_texts import SharedTexts
from tests.llmopt.helpers import pool_bytes, request

LETTERS = [10, 11, 12, 10, 11, 12, 10, 11]
PHRASES = [4, 9, 9, 31, 7, 4, 9, 9, 31, 8, 4, 9]


def run(plugins: list[Any], prompts: list[Any], model: Any = None, **options: Any) -> tuple[list[list[int]], Any]:
    with llmopt.build(model or tiny_model(), plugins=plugins) as pipe:
        outputs = pipe.batch(prompts, progress=False, **options)
        for output in outputs:
            if output.error is not None:
                raise output.error
        return [output.token_ids for output in outputs], pipe.stats()


@pytest.mark.parametrize("num_draft", ["auto", *range(1, 9)])
def test_greedy_tokens_are_those_of_the_plain_run_for_every_number_of_drafts(num_draft: Any) -> None:
    prompts = [LETTERS, PHRASES, *tiny_prompts(2)]
    options = {"max_new_tokens": 64}
    wanted, _ = run([], prompts, **options)
    for prompt, tokens in zip(prompts, wanted, strict=True):
        found, stats = run([Ngram(num_draft)], [prompt], **options)
        assert found == [tokens]
    found, stats = run([Ngram(num_draft)], prompts, **options)
    assert found == wanted
    if num_draft != "auto":
        assert stats["propose.ngram"]["accepted"] > 0


@pytest.mark.skipif(native.core() is None, reason="no compiled core")
@pytest.mark.parametrize("company", [["native"], ["paged_kv", "prefix_cache"], ["chunked_prefill"]])
def test_greedy_tokens_are_the_same_beside_other_plugins(company: list[str]) -> None:
    prompts = [LETTERS, PHRASES, *tiny_prompts(2)]
    wanted, _ = run([], prompts, max_new_tokens=48)
    for plugins in ([Ngram(5), *company], [*company, Ngram(5)]):
        assert run(plugins, prompts, max_new_tokens=48)[0] == wanted


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"frequency_penalty": 0.8},
        {"presence_penalty": 1.0},
        {"logit_bias": {7: 4.0}},
        {"temperature": 1.0, "seed": 9},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 3, "repetition_penalty": 1.2},
        {"min_new_tokens": 20, "stop_token_ids": [12, 31]},
    ],
)
def test_penalties_bias_seeds_and_ends_see_the_right_history(options: dict[str, Any]) -> None:
    prompts = [LETTERS, PHRASES]
    wanted, _ = run([], prompts, max_new_tokens=32, **options)
    assert run([Ngram(4)], prompts, max_new_tokens=32, **options)[0] == wanted
    for prompt, tokens in zip(prompts, wanted, strict=True):
        assert run([Ngram(4)], [prompt], max_new_tokens=32, **options)[0] == [tokens]


def test_a_seed_gives_the_same_output_alone_and_beside_others() -> None:
    options = {"max_new_tokens": 24, "temperature": 1.0}
    alone, _ = run([Ngram(4)], [LETTERS], seed=9, **options)
    again, _ = run([Ngram(4)], [LETTERS], seed=9, **options)
    other, _ = run([Ngram(4)], [LETTERS], seed=10, **options)
    mixed = [{"prompt": LETTERS, "seed": 9}, *({"prompt": p, "seed": 1} for p in tiny_prompts(5))]
    loaded, _ = run([Ngram(4)], mixed, **options)
    assert alone == again
    assert loaded[0] == alone[0] != other[0]


def test_copied_text_takes_far_fewer_steps() -> None:
    tokenizer = tiny_tokenizer()
    text = "the cat sat on the mat and the cat sat on the mat and "
    model = scripted_model([(text, text * 2)], tokenizer)
    with llmopt.build(model, [Ngram(8)], tokenizer=tokenizer) as pipe:
        assert "".join(pipe.stream(text, max_new_tokens=100)) == (text * 2)[:100]
        stats = pipe.stats()
        assert stats["num_steps"] < 20
        assert stats["propose.ngram"]["tokens_per_round"] > 6


def test_text_stops_at_a_stop_string_and_nothing_after_it_is_counted() -> None:
    tokenizer = tiny_tokenizer()
    text = "foo END bar foo END bar "
    model = scripted_model([(text, text * 2)], tokenizer)
    outputs = []
    for plugins in ([], [Ngram(8)]):
        with llmopt.build(model, plugins, tokenizer=tokenizer) as pipe:
            (output,) = pipe.batch([text], max_new_tokens=60, stop=["END"], progress=False)
            outputs.append((output.text, output.token_ids, output.finish_reason))
    assert outputs[0] == outputs[1]
    assert outputs[0][0] == "foo "


def test_drafts_end_at_the_end_of_the_context() -> None:
    model = tiny_model()
    limit = 256
    prompt = (LETTERS * 40)[: limit - 9]
    wanted, _ = run([], [prompt], model, max_new_tokens=9)
    found, _ = run([Ngram(16)], [prompt], model, max_new_tokens=9)
    assert found == wanted
    assert len(found[0]) == 9


def test_aborted_and_finished_requests_leave_nothing_behind() -> None:
    with llmopt.build(tiny_model(), [Ngram(4)]) as pipe:
        pipe.batch([LETTERS, PHRASES], max_new_tokens=16, progress=False)
        assert pipe.stats()["propose.ngram"]["automata_bytes"] == 0
        handle = pipe.submit(LETTERS, max_new_tokens=200)
        handle.abort()
        assert pipe.stats()["propose.ngram"]["automata_bytes"] == 0


def test_a_preempted_request_goes_on_with_the_same_tokens() -> None:
    model = tiny_model()
    prompts = [(LETTERS * 4)[:30], (PHRASES * 4)[:30], tiny_prompts(1)[0]]
    wanted, _ = run([], prompts, model, max_new_tokens=60)
    with llmopt.build(model, ["paged_kv", Ngram(4)], block_size=4, pool_bytes=pool_bytes(40, 4)) as pipe:
        outputs = pipe.batch(prompts, max_new_tokens=60, progress=False)
        assert [output.token_ids for output in outputs] == wanted
        assert pipe.stats()["schedule.baseline"]["num_preemptions"] > 0


def test_longer_matches_are_another_kind_of_draft() -> None:
    drafter = NgramDrafter(2, None)
    short, long = request([1, 2, 3, 1, 2], "a"), request([*range(20), 50, *range(20)], "b")
    found = drafter.draft([short, long, request([1, 2, 3], "c")], [4, 4, 4])
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].token_ids == [3, 1, 2, 3]
    assert found[1].token_ids == [50, 0, 1, 2]
    assert found[0].kind < found[1].kind
    assert found[2] is None


def finished(ids: list[int], output: list[int], name: str, **options: Any) -> Any:
    made = request(ids, name, max_new_tokens=max(1, len(output)), **options)
    for token in output:
        made.append(token)
    made.finish("length")
    return made


def test_shared_texts_are_those_of_the_same_tenant_only() -> None:
    shared = SharedTexts(1000, 4, new_automaton)
    shared.add(finished([1], [5, 6, 7, 8], "a", tenant="x"))
    drafter = NgramDrafter(2, shared)
    mine, other = request([3, 5, 6], "b", tenant="x"), request([3, 5, 6], "c", tenant="y")
    found = drafter.draft([mine, other], [4, 4])
    assert found[0] is not None
    assert found[0].token_ids == [7, 8]
    assert found[1] is None


def test_shared_texts_are_bounded_and_the_oldest_go_first() -> None:
    shared = SharedTexts(100, 3, new_automaton)
    chooser = random.Random(0)
    for number in range(200):
        output = [number + 1000, *(chooser.randrange(50) for _ in range(chooser.randrange(1, 30)))]
        shared.add(finished([1], output, f"r{number}", tenant=f"t{number % 2}"))
        assert all(shelf.num_tokens <= 100 for shelf in shared._shelves.values())
    stats = shared.stats()
    assert stats["shared_evicted"] + stats["shared_texts"] == 200
    last = np.array([*range(3), 1199], dtype=np.int64)
    assert shared._shelves[("t1", None, None)].automaton.draft_for(last, 4, 1, 1, 32)[0] == 1
    for number in range(10):
        shared.add(finished([1], [1, 2, 3], f"u{number}", tenant=f"u{number}"))
    assert shared.stats()["shared_tenants"] == 3


def test_a_second_request_is_guessed_from_the_answer_to_the_first() -> None:
    prompt = tiny_prompts(1)[0] + [3, 4, 5]
    wanted, _ = run([], [prompt], max_new_tokens=40)
    with llmopt.build(tiny_model(), [Ngram(8, shared=True)]) as pipe:
        steps = []
        for _ in range(2):
            before = pipe.stats()["num_steps"]
            (output,) = pipe.batch([prompt], max_new_tokens=40, progress=False)
            assert output.token_ids == wanted[0]
            steps.append(pipe.stats()["num_steps"] - before)
        assert steps[1] <= steps[0]
        assert pipe.stats()["propose.ngram"]["shared_texts"] == 2


@pytest.mark.parametrize(
    "options", [{"num_draft": 0}, {"num_draft": 17}, {"max_num_draft": 65}, {"min_match": 0}, {"shared": 1}]
)
def test_bad_options_are_refused_with_what_was_wanted_and_found(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} is .*, found {next(iter(options.values()))}"):
        Ngram(**options)

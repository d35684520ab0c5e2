"""SmolLM2-135M-Instruct on the native decoder: the tokens of its own `generate` in fp32, certified ones in bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmopt import build
from llmopt.hub import load
from llmopt.testing import Guess, ScriptedDrafter, adversaries
from llmopt.testing.drafters import trees
from llmopt_plugins.speculation.ngram import Ngram
from tests.equivalence.test_demo_model import QUESTIONS, gaps_of, generate
from tests.equivalence.test_packed_models import assert_engine_ran

pytestmark = [pytest.mark.model, pytest.mark.native, pytest.mark.slow]


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMOPT_NUM_THREADS", "1")  # tests of many short steps: threads mostly wait for each other


MAX_GAP = 0.15  # half of what transformers' own bf16 needs: sums stay in float32 between the matrices


@pytest.fixture(scope="module")
def prompts(demo_fp32: tuple[Any, Any]) -> list[list[int]]:
    _, tokenizer = demo_fp32
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for question in QUESTIONS
    ]


def test_a_ragged_batch_of_chats_gives_the_tokens_of_generate_in_fp32(
    demo_fp32: tuple[Any, Any], prompts: list[list[int]]
) -> None:
    model, _ = demo_fp32
    wanted = generate(model, prompts)
    options = {"temperature": 0.7, "top_p": 0.9, "top_k": 40}
    wanted_sampled = generate(model, prompts, seed=7, **options)
    with build(model, ["native"], max_model_len=512) as pipe:
        assert generate(pipe, prompts) == wanted
        assert generate(pipe, prompts, seed=7, **options) == wanted_sampled
        assert_engine_ran(pipe)
    with build(model, ["native", "paged_kv"], max_model_len=512, max_tokens_per_step=16, block_size=16) as pipe:
        assert generate(pipe, prompts) == wanted
        assert generate(pipe, prompts, seed=7, **options) == wanted_sampled
        requests = pipe.batch(prompts, max_new_tokens=48, progress=False)  # the best token without logits
        for row, output in zip(wanted, requests, strict=True):
            assert output.token_ids == row[: len(output.token_ids)]
        assert_engine_ran(pipe)


def test_tokens_chosen_in_bf16_are_the_best_in_fp32_or_close_to_it(
    demo_fp32: tuple[Any, Any], demo_folder: Path, prompts: list[list[int]]
) -> None:
    exact, _ = demo_fp32
    model, _ = load(demo_folder, dtype="bfloat16")
    with build(model, ["native"], max_model_len=512) as pipe:
        outputs = generate(pipe, prompts)
        found = [gap for p, out in zip(prompts, outputs, strict=True) for gap in gaps_of(exact, p, out)]
        assert_engine_ran(pipe)
    num_flips = sum(gap > 0 for gap in found)
    print(f"{1000 * num_flips / len(found):.0f} flips per 1,000 tokens, largest gap {max(found):.3f}")
    assert max(found) <= MAX_GAP
    assert num_flips <= 0.02 * len(found)


def test_tokens_chosen_behind_trees_in_bf16_are_the_best_in_fp32_or_close_to_it(
    demo_fp32: tuple[Any, Any], demo_folder: Path, prompts: list[list[int]]
) -> None:
    """Rows of one token and of seventeen are rounded in another order; both lie as close to float32."""
    exact, _ = demo_fp32
    model, _ = load(demo_folder, dtype="bfloat16")
    with build(model, ["native"], max_model_len=512) as pipe:
        plain = [o.token_ids for o in pipe.batch(prompts, max_new_tokens=48, progress=False)]
    answers = {tuple(p): ids for p, ids in zip(prompts, plain, strict=True)}
    drafter = ScriptedDrafter(trees(answers, model.config.vocab_size, 0.8), 16)
    with build(model, ["native", drafter], max_model_len=512) as pipe:
        outputs = [o.token_ids for o in pipe.batch(prompts, max_new_tokens=48, progress=False)]
        assert pipe.stats()["num_steps"] < 48
    found = [gap for p, out in zip(prompts, outputs, strict=True) for gap in gaps_of(exact, p, out)]
    num_flips = sum(gap > 0 for gap in found)
    num_same = sum(a == b for a, b in zip(plain, outputs, strict=True))
    print(f"{1000 * num_flips / len(found):.0f} flips per 1,000 tokens, largest gap {max(found):.3f}; "
          f"{num_same} of {len(plain)} answers as without drafts")  # fmt: skip
    assert max(found) <= MAX_GAP
    assert num_flips <= 0.02 * len(found)


def test_no_drafter_changes_a_token_of_the_demo_model_in_fp32(
    demo_fp32: tuple[Any, Any], prompts: list[list[int]], one_thread: None
) -> None:
    model, _ = demo_fp32
    chosen, num_new = [prompts[0], prompts[2]], 12
    wanted = [until_end(ids) for ids in generate(model, chosen, max_new_tokens=num_new)]
    options: dict[str, Any] = {"prompt": prompts[1], "max_new_tokens": num_new}
    requests: list[Any] = [
        *({"prompt": prompt, "max_new_tokens": num_new} for prompt in chosen),
        {**options, "temperature": 0.9, "top_p": 0.9, "seed": 5},
        {**options, "repetition_penalty": 1.3},
    ]
    kinds = adversaries(answers_of(chosen, wanted), model.config.vocab_size, 6)
    drafter = ScriptedDrafter(lambda request, room: Guess(()), 6)
    with build(model, ["native", "paged_kv", drafter], max_model_len=512) as pipe:
        plain = [output.token_ids for output in pipe.batch(requests, progress=False)]
        assert plain[:2] == wanted
        for name, kind in kinds.items():
            drafter.guess, before = kind.guess, pipe.stats()["num_steps"]
            assert [output.token_ids for output in pipe.batch(requests[:2], progress=False)] == wanted, name
            num_steps = pipe.stats()["num_steps"] - before
            if name in ("right", "mostly_right", "trees"):  # a broken verifier writes right text too
                assert num_steps <= num_new // 2, name
            else:
                assert num_steps == num_new, name
        drafter.guess = trees(answers_of([prompts[1]], [plain[2]]), model.config.vocab_size, 0.9)
        assert [output.token_ids for output in pipe.batch(requests, progress=False)] == plain
        assert pipe.why_not is None


def test_copied_drafts_leave_repeated_phrases_and_their_penalties_as_generate_writes_them(
    demo_fp32: tuple[Any, Any], one_thread: None
) -> None:
    model, tokenizer = demo_fp32
    letters = tokenizer("a b c a b c a b")["input_ids"]
    phrases = tokenizer("the cat sat on the mat, the dog sat on the mat, the cat sat on")["input_ids"]
    numbers = tokenizer("one two three one two three one")["input_ids"]
    wanted = generate(model, [letters, phrases], max_new_tokens=24)
    requests: list[Any] = [
        *({"prompt": prompt, "max_new_tokens": 24} for prompt in (letters, phrases)),
        {"prompt": numbers, "max_new_tokens": 8, "repetition_penalty": 1.3},
        {"prompt": numbers, "max_new_tokens": 12, "frequency_penalty": 0.8, "logit_bias": {2976: 2.0}},
        {"prompt": letters, "max_new_tokens": 12, "logits_processors": [lambda ids, line: line.roll(len(ids) // 4)]},
    ]
    with build(model, ["native", Ngram(8)], max_model_len=512) as pipe:
        (stage,) = (o for o in pipe.registry.chains["propose"].objects if hasattr(o, "goodput"))
        stage.goodput.fixed = 0
        plain = [output.token_ids for output in pipe.batch(requests, progress=False)]
        assert plain[:2] == wanted
        assert plain[2] == [29, 11355, 2976, 1856, 282, 253, 12796, 28]
        for num_draft in range(1, 9):
            stage.goodput.fixed, before = num_draft, pipe.stats()
            outputs = [output.token_ids for output in pipe.batch(requests, progress=False)]
            assert outputs == plain, num_draft
            after = pipe.stats()
            assert after["propose.ngram"]["accepted"] - before["propose.ngram"]["accepted"] > 8, num_draft
        assert pipe.why_not is None


def until_end(ids: list[int]) -> list[int]:
    """Without the padding behind the end of the output."""
    return ids[: ids.index(2) + 1] if 2 in ids else ids


def answers_of(prompts: list[list[int]], outputs: list[list[int]]) -> dict[tuple[int, ...], list[int]]:
    return {tuple(prompt): ids for prompt, ids in zip(prompts, outputs, strict=True)}

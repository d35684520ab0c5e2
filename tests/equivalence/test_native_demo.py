"""SmolLM2-135M-Instruct on the native decoder: the tokens of its own `generate` in fp32, certified ones in bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llmopt import build
from llmopt.hub import load
from llmopt.testing import ScriptedDrafter
from llmopt.testing.drafters import trees
from tests.equivalence.test_demo_model import QUESTIONS, gaps_of, generate
from tests.equivalence.test_packed_models import assert_engine_ran

pytestmark = [pytest.mark.model, pytest.mark.native, pytest.mark.slow]

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

"""SmolLM2-135M-Instruct with its real weights gives the tokens of its own `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llmopt import build
from llmopt.hub import load
from llmopt.testing.identity import left_padded
from tests.equivalence.test_packed_models import assert_engine_ran

pytestmark = pytest.mark.model

NUM_NEW = 48
QUESTIONS = [
    "Name three rivers.",
    "Explain in two sentences why the sky is blue, for a child of ten who has just asked it.",
    "Hi!",
    "Write a short poem about a lighthouse keeper, the sea in winter and a letter that arrives too late.",
]

# Largest distance in fp32 logits between the best token and the one chosen in bf16. bf16 keeps 8 bits: logits between
# 16 and 32 are rounded to eighths, on top of the error that 30 layers collected.
MAX_GAP = 0.3


@pytest.fixture(scope="module")
def prompts(demo_fp32: tuple[Any, Any]) -> list[list[int]]:
    _, tokenizer = demo_fp32
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for question in QUESTIONS
    ]


def generate(model: Any, prompts: list[list[int]], seed: int | None = None, **options: Any) -> list[list[int]]:
    """New tokens of each row of a left-padded batch."""
    pad_id = 2
    ids, mask = left_padded(prompts, pad_id)
    if seed is not None:
        torch.manual_seed(seed)
    options = {"max_new_tokens": NUM_NEW, "do_sample": seed is not None, **options}
    out: Tensor = model.generate(ids, attention_mask=mask, **options)
    return out[:, ids.shape[1] :].tolist()


def test_known_continuations_come_out(demo_fp32: tuple[Any, Any]) -> None:
    model, tokenizer = demo_fp32
    paris = tokenizer("The capital of France is")["input_ids"]
    numbers = tokenizer("one two three one two three one")["input_ids"]
    with build(model) as pipe:
        assert generate(pipe, [paris], max_new_tokens=6) == [[7042, 30, 198, 198, 504, 2988]]
        assert generate(pipe, [numbers], max_new_tokens=8) == [[827, 29, 17891, 282, 260, 970, 1187, 260]]
        assert generate(pipe, [numbers], max_new_tokens=8, repetition_penalty=1.3) == [
            [29, 11355, 2976, 1856, 282, 253, 12796, 28]
        ]
        assert_engine_ran(pipe)


@pytest.mark.slow
def test_a_ragged_batch_of_chats_gives_the_tokens_of_generate(
    demo_fp32: tuple[Any, Any], prompts: list[list[int]]
) -> None:
    model, _ = demo_fp32
    wanted = generate(model, prompts)
    options = {"temperature": 0.7, "top_p": 0.9, "top_k": 40}
    wanted_sampled = generate(model, prompts, seed=7, **options)
    assert wanted != wanted_sampled
    for settings in ({}, {"max_tokens_per_step": 16, "block_size": 16}):
        with build(model, **settings) as pipe:
            assert generate(pipe, prompts) == wanted
            assert generate(pipe, prompts, seed=7, **options) == wanted_sampled
            assert_engine_ran(pipe)


@pytest.mark.slow
def test_tokens_chosen_in_bf16_are_the_best_in_fp32_or_close_to_it(
    demo_fp32: tuple[Any, Any], demo_folder: Path, prompts: list[list[int]]
) -> None:
    exact, _ = demo_fp32
    model, _ = load(demo_folder, dtype="bfloat16")
    gaps: dict[str, list[float]] = {}
    with build(model) as pipe:
        for name, runner in (("engine", pipe), ("transformers", model)):
            outputs = generate(runner, prompts)
            gaps[name] = [gap for p, out in zip(prompts, outputs, strict=True) for gap in gaps_of(exact, p, out)]
        assert_engine_ran(pipe)
    for name, found in gaps.items():
        flips = [gap for gap in found if gap > 0]
        print(f"{name}: {1000 * len(flips) / len(found):.0f} flips per 1,000 tokens, largest gap {max(found):.3f}")
    assert max(gaps["engine"]) <= MAX_GAP
    num_flips = sum(gap > 0 for gap in gaps["engine"])
    assert num_flips <= 0.05 * len(gaps["engine"])


@torch.no_grad()
def gaps_of(exact: Any, prompt: list[int], output: list[int]) -> list[float]:
    """For each token of an output, how far its logit is from the best one in fp32: 0 when it is the best."""
    end = output.index(2) + 1 if 2 in output else len(output)  # what follows is padding
    output = output[:end]
    logits = exact(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(-1, torch.tensor(output)[:, None])[:, 0]
    gaps: list[float] = (logits.amax(dim=-1) - chosen).tolist()
    return gaps

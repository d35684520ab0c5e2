"""Drafts that are trees, and drafters that mean no good: the tokens are those of `model.generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import llmopt
from llmopt.testing import ScriptedDrafter, adversaries, tiny_model, tiny_prompts, tiny_tokenizer
from llmopt.testing.drafters import Answers, trees
from tests.llmopt.helpers import assert_idle

VOCAB = 512
COMPANIES = [
    (),
    ("native",),
    ("chunked_prefill",),
    ("prefix_cache",),
    ("paged_kv", "prefix_cache"),
    ("native", "paged_kv", "prefix_cache", "chunked_prefill"),
]


def generated(model: Any, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    """What the model says by itself."""
    outputs = []
    for prompt in prompts:
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=-1)
        outputs.append(ids[0, len(prompt) :].tolist())
    return outputs


def answers_of(prompts: Sequence[list[int]], outputs: Sequence[list[int]]) -> Answers:
    return {tuple(p): ids for p, ids in zip(prompts, outputs, strict=True)}


@pytest.mark.parametrize("plugins", COMPANIES, ids=["+".join(c) or "plain" for c in COMPANIES])
@pytest.mark.parametrize("num_draft", [1, 4, 17])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_no_drafter_changes_a_token_whatever_it_drafts(plugins: tuple[str, ...], num_draft: int, num_rows: int) -> None:
    model, prompts = tiny_model(), tiny_prompts(num_rows, max_length=14)
    wanted = generated(model, prompts, 24)
    for name, drafter in adversaries(answers_of(prompts, wanted), VOCAB, num_draft).items():
        with llmopt.build(
            model, [*plugins, drafter], tokenizer=tiny_tokenizer(), block_size=4, max_tokens_per_step=32
        ) as pipe:
            outputs = pipe.batch(prompts, max_new_tokens=24, ignore_eos=True, progress=False)
            assert [o.token_ids for o in outputs] == wanted, name
            num_steps = pipe.stats()["num_steps"]
            if name in ("right", "mostly_right", "trees") and num_draft > 1 and num_rows == 1:
                assert num_steps < 20, name  # a broken verifier writes right text too
            assert drafter.num_drafted > 0 or name == "noise"
            assert_idle(pipe)


@pytest.mark.parametrize("plugins", [(), ("native",)])
@pytest.mark.parametrize("kind", ["gpt2", "mistral", "gemma2", "qwen3", "opt"])
def test_trees_change_no_token_with_windows_caps_and_learned_positions(kind: str, plugins: tuple[str, ...]) -> None:
    """The window of these models is 32 tokens, which drafts cross."""
    if kind in ("gpt2", "opt") and plugins:
        pytest.skip("the same attention as in the others")
    model, prompts = tiny_model(kind), tiny_prompts(3, max_length=30)
    wanted = generated(model, prompts, 40)
    answers = answers_of(prompts, wanted)
    for num_draft, share in ((3, 0.9), (9, 0.7), (33, 0.8), (64, 0.5)):
        drafter = ScriptedDrafter(trees(answers, VOCAB, share), num_draft)
        with llmopt.build(model, [*plugins, drafter], tokenizer=tiny_tokenizer(), block_size=4) as pipe:
            outputs = pipe.batch(prompts, max_new_tokens=40, ignore_eos=True, progress=False)
            assert [o.token_ids for o in outputs] == wanted
            assert pipe.stats()["num_steps"] < 36
            assert_idle(pipe)

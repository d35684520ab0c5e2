"""Sampled output of whole pipelines that draft, against the exact probabilities of a model of eight tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import llmopt
from llmopt.request import Request
from llmopt.testing import Guess, ScriptedDrafter, assert_same_distribution, tiny_model
from llmopt.testing.drafters import noise, trees
from llmopt_plugins.speculation.medusa.typical import TypicalVerify
from llmopt_plugins.speculation.ngram import Ngram
from tests.llmopt.helpers import wrap

VOCAB = 8
PROMPT = [3, 4, 5, 3, 4, 6, 3, 4]  # 3 4 came before, and was followed by two tokens


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMOPT_NUM_THREADS", "1")


def toy_model() -> Any:
    """Eight tokens, of which each may follow each, some of them far more often than others."""
    model = tiny_model(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.7)
    return model


def whole_tree(made: Request, room: int) -> Guess:
    """Three first tokens, two behind each: what comes is often among them."""
    first, second = (3, 5, 7), (4, 6)
    ids = [*first, *(second * 3)]
    return Guess(ids[:room], [-1, -1, -1, 0, 0, 1, 1, 2, 2][:room])


DRAFTERS: dict[str, Callable[[], Any]] = {
    "ngram": lambda: Ngram(4, min_match=1),
    "noise": lambda: ScriptedDrafter(noise(VOCAB), 4),
    "trees": lambda: ScriptedDrafter(trees({tuple(PROMPT): [5, 3, 4, 6]}, VOCAB, 0.5), 5),
    "whole_tree": lambda: ScriptedDrafter(whole_tree, 9),
}


@pytest.mark.parametrize("drafter", list(DRAFTERS))
def test_samples_of_a_pipeline_that_drafts_occur_as_often_as_the_model_says(drafter: str) -> None:
    model, num_accepted = toy_model(), 0

    def count(commit: Any) -> Any:
        def look(batch: Any, accepted: Any) -> Any:
            nonlocal num_accepted
            num_accepted += sum(len(ids) - 1 for ids in accepted.token_ids)
            return commit(batch, accepted)

        return look

    with llmopt.build(model, [DRAFTERS[drafter](), wrap("commit", count, "count")]) as pipe:
        assert_same_distribution(pipe, model, PROMPT, num_samples=2500, num_tokens=3, top_k=VOCAB)
    assert num_accepted > 50


def test_drafts_that_are_accepted_for_being_likely_do_not_pass_as_the_models_distribution() -> None:
    """What the test above would say of a verifier that is too kind."""
    model = toy_model()
    kind = wrap("verify", lambda verify: TypicalVerify(verify, 0.09, 0.3), "kind")
    with llmopt.build(model, [DRAFTERS["whole_tree"](), kind]) as pipe, pytest.raises(AssertionError, match="do not"):
        assert_same_distribution(pipe, model, PROMPT, num_samples=2500, num_tokens=3, top_k=VOCAB)

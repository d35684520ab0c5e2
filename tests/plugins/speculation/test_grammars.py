"""Drafts that a grammar forbids: rejected, and nothing else changes.

The grammar stands for what a matcher of JSON does: what may come next depends on all tokens before, drafts included.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import llmopt
from llmopt import PluginInfo, hookimpl
from llmopt.batch import Batch, DraftTokens
from llmopt.request import Request
from llmopt.testing import tiny_model
from llmopt.testing.drafters import Guess, ScriptedDrafter

VOCAB = 512
MARK = 7  # the first id of a prompt that asks for the grammar


def allowed(output: list[int]) -> np.ndarray:
    """Ids that may follow: three classes in turn, and none of the ending that the token before had."""
    ids = np.arange(VOCAB)
    follows: np.ndarray = ids % 3 == len(output) % 3
    if output:
        follows &= ids % 5 != output[-1] % 5
    return follows


class Forbidding:
    """The mask of a step."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = torch.from_numpy(rows)

    def apply(self, logits: Tensor) -> Tensor:
        assert logits.shape == self.rows.shape
        return logits.masked_fill(~self.rows, -torch.inf)


class Grammar:
    """Asks the matcher for every row of logits: the newest token's, and one per draft."""

    info = PluginInfo(name="grammar", layer="application", promise="exact", summary="a grammar, for tests")

    @hookimpl
    def llmopt_wrap_constrain(self) -> Any:
        return self.constrain

    def constrain(self, batch: Batch, drafts: DraftTokens | None) -> Forbidding | None:
        rows = np.ones((len(batch.logits_requests), VOCAB), dtype=bool)
        row_of = {request: row for row, request in enumerate(batch.requests)}
        seen: dict[Request, int] = {}
        for place, request in enumerate(batch.logits_requests):
            draft = seen[request] = seen.get(request, -1) + 1  # 0: the newest token
            if request.token_ids[0] != MARK:
                continue
            output = list(request.output_ids)
            if draft:
                assert drafts is not None
                row = row_of[request]
                output += [int(drafts.token_ids[row, i]) for i in path_to(drafts, row, draft - 1)]
            rows[place] = allowed(output)
        return Forbidding(rows)


def path_to(drafts: DraftTokens, row: int, draft: int) -> list[int]:
    """The drafts from the newest token to this one, itself included."""
    if drafts.parents is None:
        return list(range(draft + 1))
    path: list[int] = []
    while draft >= 0:
        path.append(draft)
        draft = int(drafts.parents[row, draft])
    return path[::-1]


def prompts() -> list[list[int]]:
    chooser = random.Random(0)
    return [[MARK if n % 2 else 8, *(chooser.randrange(9, VOCAB) for _ in range(3 + n))] for n in range(8)]


def outputs(*plugins: Any, **options: Any) -> tuple[list[list[int]], int]:
    """Tokens of each prompt, and the steps that all took."""
    with llmopt.build(tiny_model(), list(plugins), max_model_len=128, block_size=4) as pipe:
        found = pipe.batch(prompts(), max_new_tokens=24, ignore_eos=True, progress=False, **options)
        assert all(one.error is None for one in found)
        return [list(one.token_ids) for one in found], pipe.stats()["num_steps"]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("is_tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("company", [(), ("native",)], ids=["", "native"])
def test_drafts_that_break_a_grammar_are_rejected_and_change_nothing(
    is_tree: bool, company: tuple[str, ...], options: dict[str, Any]
) -> None:
    plain, num_plain_steps = outputs(*company, Grammar(), **options)
    right = dict(zip(map(tuple, prompts()), plain, strict=True))
    chooser = random.Random(1)

    def guess(request: Request, room: int) -> Guess:
        """What will come, with a wrong token here and there; of a tree, a wrong sibling before each."""
        done = request.num_output_tokens
        coming = right[tuple(request.token_ids[: request.num_prompt_tokens].tolist())][done : done + room]
        ids = [token if chooser.random() < 0.8 else chooser.randrange(VOCAB) for token in coming]
        if not is_tree:
            return Guess(ids)
        nodes, parents, last = [], [], -1
        for token in ids[: room // 2]:
            nodes += [(token + 1) % VOCAB, token]
            parents += [last, last]
            last = len(nodes) - 1
        return Guess(nodes, parents)

    drafted, num_steps = outputs(*company, Grammar(), ScriptedDrafter(guess, 6), **options)
    assert drafted == plain
    assert num_steps < 0.8 * num_plain_steps
    free, _ = outputs(*company, **options)
    for number, output in enumerate(plain):
        if number % 2:
            assert all(allowed(output[:place])[token] for place, token in enumerate(output))
        else:
            assert output == free[number]

"""Logits that came from a prefill worker: their rows are not run, and the others get what they would have got."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from llmopt.batch import Batch, BestTokens
from llmopt.cost_model import CostModel, Measurements, StepShape
from llmopt.request import Request, SamplingParams
from llmopt_plugins.scheduling.pd_separation.first_token import HandOverExecute

VOCAB, END = 8, 20
GIVEN = np.array([0, 1, 2, 9, 3, 0, 7, 0], dtype=np.float32)  # best: 3, then 6


class Inner:
    """The best token of a row is the token that it ends with."""

    takes_media = True

    def __init__(self) -> None:
        self.rows: list[list[str]] = []
        self.banned: list[tuple[int, int]] = []

    def __call__(self, batch: Batch, drafts: Any) -> torch.Tensor | BestTokens:
        self.rows.append(batch.request_ids)
        self.banned += zip(batch.banned_rows.tolist(), batch.banned_ids.tolist(), strict=True)
        best = [int(batch.token_ids[i]) for i in batch.logits_indices]
        if batch.wants_best:
            return BestTokens(best, [float(b) for b in best])
        return torch.nn.functional.one_hot(torch.tensor(best), VOCAB).float()


def batch_of(counts: list[int], **fields: Any) -> Batch:
    """Rows a, b, ... of so many tokens, each with `END` tokens afterwards; row number r ends with token r."""
    ends = np.cumsum([0, *counts]).astype(np.int32)
    tokens = np.full(ends[-1], 7, dtype=np.int64)
    tokens[ends[1:] - 1] = np.arange(len(counts))
    names = [chr(97 + row) for row in range(len(counts))]
    arrays: dict[str, Any] = {
        "num_scheduled": np.array(counts, dtype=np.int32),
        "seq_lens": np.full(len(counts), END, dtype=np.int32),
        "block_tables": np.zeros((len(counts), 1), dtype=np.int32),
        "slots": np.zeros(len(counts), dtype=np.int32),
        "num_drafts": np.zeros(len(counts), dtype=np.int32),
        "logits_indices": (ends[1:] - 1).astype(np.int64),
    }
    return Batch(
        request_ids=names,
        token_ids=tokens,
        positions=np.zeros_like(tokens),
        cu_seqlens_q=ends,
        slot_mapping=np.zeros_like(tokens),
        requests=[Request(name, [5], SamplingParams(), 30) for name in names],
        **(arrays | fields),
    )


def run(batch: Batch, *given: int, end: int = END, cost: CostModel | None = None) -> tuple[Any, Inner, int]:
    """What comes back when the logits of these rows are there, who was asked for the others, and how many were used."""
    inner = Inner()
    answers = {batch.requests[row]: (end, GIVEN) for row in given}
    over: Any = SimpleNamespace(answers=answers, counts={"num_first_tokens": 0})
    found = HandOverExecute(inner, over, cost or CostModel())(batch, None)  # type: ignore[arg-type]
    assert not answers  # each is used now or never
    return found, inner, over.counts["num_first_tokens"]


def test_rows_whose_logits_are_there_are_not_run() -> None:
    logits, inner, count = run(batch_of([1, 1, 3, 1]), 1)
    assert inner.rows == [["a", "c", "d"]]
    assert logits.argmax(dim=1).tolist() == [0, 3, 2, 3]
    assert logits[1].tolist() == GIVEN.tolist()
    assert count == 1


def test_nothing_is_run_when_all_logits_are_there() -> None:
    logits, inner, _ = run(batch_of([1, 1]), 0, 1)
    assert inner.rows == []
    assert logits.tolist() == [GIVEN.tolist()] * 2
    best, inner, _ = run(batch_of([1], wants_best=True), 0)
    assert (inner.rows, best) == ([], BestTokens([3], [9.0]))


def test_best_tokens_stay_best_tokens_without_those_that_are_banned() -> None:
    banned = {"banned_rows": np.array([0, 1, 1, 2]), "banned_ids": np.array([5, 3, 99, 6])}
    best, inner, _ = run(batch_of([1, 1, 1], wants_best=True, **banned), 1)
    assert best == BestTokens([0, 6, 2], [0.0, 7.0, 2.0])
    assert inner.banned == [(0, 5), (1, 6)]  # rows of the part that was run
    assert GIVEN[3] == 9  # what was given is left as it was


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({"num_drafts": np.array([0, 1], dtype=np.int32)}, END),
        ({"wants_hidden": True}, END),
        ({"logits_indices": np.array([0])}, END),  # nobody asks for them
        ({}, END - 1),  # those of another token
    ],
)
def test_logits_are_left_alone_where_the_forward_is_needed_all_the_same(fields: dict[str, Any], end: int) -> None:
    _, inner, count = run(batch_of([1, 1], **fields), 1, end=end)
    assert (inner.rows, count) == ([["a", "b"]], 0)


def test_a_row_that_was_not_run_teaches_the_cost_model_nothing() -> None:
    cost = CostModel()
    cost.fit(Measurements(prompts=((1, 0.010), (16, 0.014)), context_token_s=1e-4))
    batch = batch_of([1, 1])
    before = cost.batch_s(batch)
    _, inner, _ = run(batch, 1, cost=cost)
    part = batch_of([1])
    cost.observe(StepShape.of(batch), cost.batch_s(part))  # the step took as long as the row that was run
    assert inner.rows == [["a"]]
    assert cost.batch_s(batch) == pytest.approx(before)

"""The first token of a prompt that a worker has computed: its logits came with the KV, so no forward computes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from llmopt.batch import BestTokens
from llmopt.hf.rows import take_rows
from llmopt_plugins.wrapping import Wrapping

if TYPE_CHECKING:
    from torch import Tensor

    from llmopt.batch import Batch, DraftTokens
    from llmopt.cost_model import CostModel
    from llmopt.stages import Execute
    from llmopt_plugins.scheduling.pd_separation.hand_over import HandOver


class HandOverExecute(Wrapping):
    """Run the rows of a batch whose logits are not there yet, and put both together."""

    accepts_best = takes_trees = True
    inner: Execute

    def __init__(self, inner: Execute, hand_over: HandOver, cost_model: CostModel) -> None:
        super().__init__(inner)
        self.hand_over = hand_over
        self.cost_model = cost_model

    def __call__(self, batch: Batch, drafts: DraftTokens | None) -> Tensor | BestTokens:
        given = self._take_given(batch) if self.hand_over.answers and batch.requests else {}
        if not given:
            return self.inner(batch, drafts)
        owners = np.searchsorted(batch.cu_seqlens_q, batch.logits_indices, side="right") - 1
        answered = {int(place): given[row] for place, row in enumerate(owners.tolist()) if row in given}
        others = [row for row in range(batch.num_requests) if row not in given]
        found: Tensor | BestTokens | None = None
        places = np.empty(0, dtype=np.int64)
        if others:
            part, places = take_rows(batch, others)
            if batch.wants_best:
                ranks = np.full(owners.size, -1)
                ranks[places] = np.arange(places.size)
                is_left = ranks[batch.banned_rows] >= 0
                part.wants_best = True
                part.banned_rows, part.banned_ids = ranks[batch.banned_rows[is_left]], batch.banned_ids[is_left]
            found = self.inner(part, drafts)
            if self.cost_model.measured is not None:  # it will be told of the whole batch
                self.cost_model.leave_out(self.cost_model.batch_s(part) - self.cost_model.batch_s(batch))
        elif self.cost_model.measured is not None:
            self.cost_model.leave_out(-self.cost_model.batch_s(batch))
        if isinstance(found, BestTokens) or (found is None and batch.wants_best):
            return _join_best(batch, found, places, answered)
        logits = torch.empty((owners.size, next(iter(answered.values())).size), dtype=torch.float32, device="cpu")
        if found is not None:
            logits[torch.from_numpy(places)] = found
        for place, row in answered.items():
            logits[place] = torch.from_numpy(row)
        return logits

    def _take_given(self, batch: Batch) -> dict[int, np.ndarray]:
        """Rows whose logits came from a worker. Drafts or hidden states of a row need its forward all the same."""
        answers, given = self.hand_over.answers, {}
        for row, request in enumerate(batch.requests):
            answer = answers.pop(request, None)
            if answer is None or batch.wants_hidden or batch.num_scheduled[row] != 1 or batch.num_drafts[row]:
                continue
            end, logits = answer
            if batch.seq_lens[row] == end and batch.cu_seqlens_q[row] in batch.logits_indices:
                given[row] = logits
        self.hand_over.counts["num_first_tokens"] += len(given)
        return given


def _join_best(
    batch: Batch, found: BestTokens | None, places: np.ndarray, answered: dict[int, np.ndarray]
) -> BestTokens:
    """The best of all rows: of those that were run, and of those that were given."""
    joined = BestTokens([0] * batch.logits_indices.size, [0.0] * batch.logits_indices.size)
    if found is not None:
        for place, token, logit in zip(places.tolist(), found.token_ids, found.logits, strict=True):
            joined.token_ids[place], joined.logits[place] = token, logit
    for place, row in answered.items():
        banned = batch.banned_ids[batch.banned_rows == place]
        if banned.size:
            row = row.copy()
            row[banned[(banned >= 0) & (banned < row.size)]] = -np.inf
        best = int(row.argmax())  # the first NaN where there is one
        joined.token_ids[place], joined.logits[place] = best, float(row[best])
    return joined

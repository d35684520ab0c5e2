"""Typical acceptance: a sampled request takes drafts that are likely enough, instead of drawing every token. Lossy.

Source: T. Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads", 2024.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from llmopt.batch import BestTokens
from llmopt_plugins.wrapping import Wrapping

if TYPE_CHECKING:
    from torch import Tensor

    from llmopt.batch import AcceptedTokens, Batch, DraftTokens
    from llmopt.request import Request
    from llmopt.stages import LogitsMask, Verify


class TypicalVerify(Wrapping):
    """Decide for drafts whose probability is above ``min(epsilon, delta * exp(-entropy))``; the rest is drawn inside.

    Greedy requests, and those whose logits are edited, are verified as ever.
    """

    inner: Verify
    takes_trees = True
    accepts_best = True  # all rows greedy: nothing to decide here

    def __init__(self, inner: Verify, epsilon: float, delta: float) -> None:
        super().__init__(inner)
        self.epsilon, self.delta = epsilon, delta

    def __call__(
        self, batch: Batch, drafts: DraftTokens | None, logits: Tensor | BestTokens, mask: LogitsMask | None
    ) -> AcceptedTokens:
        if drafts is not None and mask is None and not isinstance(logits, BestTokens):
            logits = self._decide(batch, drafts, logits)
        return self.inner(batch, drafts, logits, mask)

    def _decide(self, batch: Batch, drafts: DraftTokens, logits: Tensor) -> Tensor:
        """Logits in which the rows before accepted drafts leave no other choice."""
        first, is_copy = 0, False
        rows = batch.logits_requests
        for b, request in enumerate(batch.requests):
            if first == len(rows):
                break
            if rows[first] is not request:
                continue
            count = int(drafts.num_draft[b])
            params = request.sampling
            if count and not params.is_greedy and not params.changes_logits and not request.logits_processors:
                ids = drafts.token_ids[b, :count].tolist()
                parents = list(range(-1, count - 1)) if drafts.parents is None else drafts.parents[b, :count].tolist()
                path = self._path(request, logits[first : first + count + 1], ids, parents)
                if path and not is_copy:
                    logits, is_copy = logits.clone(), True
                before = -1
                for draft in path:
                    logits[first + 1 + before] = -math.inf
                    logits[first + 1 + before, ids[draft]] = 0.0
                    before = draft
            first += 1 + count
        return logits

    def _path(self, request: Request, logits: Tensor, ids: list[int], parents: list[int]) -> list[int]:
        """The longest path of typical drafts; of equally long ones the likeliest."""
        with torch.inference_mode():
            logs = (logits / request.sampling.temperature).log_softmax(dim=-1)
            entropy = -(logs.exp() * logs).nan_to_num(0.0).sum(dim=-1)
            least = torch.minimum(torch.full_like(entropy, self.epsilon), self.delta * (-entropy).exp()).log().tolist()
            rows = torch.tensor([parent + 1 for parent in parents], device=logs.device)
            chances = logs[rows, torch.tensor(ids, device=logs.device)].tolist()
        totals: dict[int, tuple[int, float]] = {-1: (0, 0.0)}
        best = -1
        for draft, parent in enumerate(parents):
            if parent in totals and chances[draft] > least[parent + 1]:
                depth, total = totals[parent]
                totals[draft] = depth + 1, total + chances[draft]
                if totals[draft] > totals[best]:
                    best = draft
        path: list[int] = []
        while best >= 0:
            path.insert(0, best)
            best = parents[best]
        return path

"""Layer 3, plain: no drafts of its own, and a verifier that takes anybody's."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from llmopt.batch import AcceptedTokens, Batch, BestTokens, DraftTokens
from llmopt.ops.argmax import argmax
from llmopt.sampler import Row, not_finite, sample

if TYPE_CHECKING:
    from torch import Tensor

    from llmopt.request import Lockstep, Request
    from llmopt.stages import LogitsMask


class BaselinePropose:
    """Guess nothing."""

    def __call__(self, batch: Batch) -> DraftTokens | None:
        return None


class BaselineVerify:
    """Sample, then match: choose every row's token as if it came alone, and keep drafts as long as they agree.

    A draft is kept when it equals the token that is chosen in its place, so the output is what it would be without
    drafts, greedy or sampled (the random number of a token depends on seed and position only).
    """

    def __call__(
        self, batch: Batch, drafts: DraftTokens | None, logits: Tensor | BestTokens, mask: LogitsMask | None
    ) -> AcceptedTokens:
        if isinstance(logits, BestTokens):
            return self._take_best(batch, drafts, logits)
        if mask is not None:
            logits = mask.apply(logits)
        if drafts is None and (best := self._choose_best(batch, logits)) is not None:
            return best
        if drafts is None and all(r.lockstep is None for r in batch.logits_requests):
            requests = batch.logits_requests
            rows = [Row(r) for r in requests]
            tokens, failed = sample(rows, logits)
            if not failed:
                return AcceptedTokens(requests, [[t] for t in tokens], [None] * len(tokens))
            accepted = AcceptedTokens([], [], [])
            self._match(rows, tokens, failed, {}, accepted)
            return accepted
        return self._verify_mixed(batch, drafts, logits)

    @staticmethod
    def _choose_best(batch: Batch, logits: Tensor) -> AcceptedTokens | None:
        """The short way for plain greedy rows; None when a row is anything else, or its logits are not finite."""
        requests = batch.logits_requests
        for request in requests:
            if not request.takes_best or request.lockstep is not None:
                return None
        if batch.banned_ids.size:
            inside = (batch.banned_ids >= 0) & (batch.banned_ids < logits.shape[-1])
            rows, ids = (torch.from_numpy(a[inside]).to(logits.device) for a in (batch.banned_rows, batch.banned_ids))
            with torch.inference_mode():  # logits may have been made in this mode
                logits[rows, ids] = -math.inf
        tokens, values = argmax(logits)
        if not all(map(math.isfinite, values)):
            return None
        return AcceptedTokens(requests, [[token] for token in tokens], [None] * len(tokens))

    def _take_best(self, batch: Batch, drafts: DraftTokens | None, best: BestTokens) -> AcceptedTokens:
        """The executor has chosen: every row takes its best token."""
        requests, tokens = batch.logits_requests, best.token_ids
        is_finite = all(map(math.isfinite, best.logits))
        if drafts is None and is_finite:
            return AcceptedTokens(requests, [[token] for token in tokens], [None] * len(tokens))
        draft_of = _drafts_of(batch, drafts)
        rows: list[Row] = []
        for request in requests:
            count = len(rows[-1].drafts) + 1 if rows and rows[-1].request is request else 0
            rows.append(Row(request, draft_of[request][:count] if count else []))
        failed: dict[int, BaseException] = {
            i: not_finite(requests[i], value) for i, value in enumerate(best.logits) if not math.isfinite(value)
        }
        accepted = AcceptedTokens([], [], [])
        self._match(rows, tokens, failed, draft_of, accepted)
        return accepted

    def _verify_mixed(self, batch: Batch, drafts: DraftTokens | None, logits: Tensor) -> AcceptedTokens:
        accepted = AcceptedTokens([], [], [])
        rows: list[Row] = []
        indices: list[int] = []
        groups: dict[int, Lockstep] = {}
        draft_of = _drafts_of(batch, drafts)
        depth: dict[Request, int] = {}
        for index, request in enumerate(batch.logits_requests):
            if request.lockstep is not None:
                if request.lockstep.put(request, logits[index]):
                    groups[id(request.lockstep)] = request.lockstep
                continue
            count = depth.get(request, 0)
            depth[request] = count + 1
            rows.append(Row(request, draft_of[request][:count] if count else []))
            indices.append(index)
        if rows:
            tokens, failed = sample(rows, logits if len(rows) == logits.shape[0] else logits[indices])
            self._match(rows, tokens, failed, draft_of, accepted)
        for group in groups.values():
            chosen = group.choose()
            accepted.requests += chosen.requests
            accepted.token_ids += chosen.token_ids
            accepted.finish_reasons += chosen.finish_reasons
            accepted.errors |= chosen.errors
        return accepted

    @staticmethod
    def _match(
        rows: list[Row],
        tokens: list[int],
        failed: dict[int, BaseException],
        draft_of: dict[Request, list[int]],
        accepted: AcceptedTokens,
    ) -> None:
        """Walk each request's rows in order and stop at the first draft that disagrees."""
        done: Request | None = None
        for index, (row, token) in enumerate(zip(rows, tokens, strict=True)):
            request, depth = row.request, len(row.drafts)
            if request is done:
                continue
            if index in failed:
                if depth == 0:  # deeper rows stand on drafts; the error comes back when they are real
                    accepted.errors[request.request_id] = failed[index]
                done = request
                continue
            if depth == 0:
                accepted.requests.append(request)
                accepted.token_ids.append([])
                accepted.finish_reasons.append(None)
            accepted.token_ids[-1].append(token)
            drafts = draft_of.get(request, [])
            if depth >= len(drafts) or drafts[depth] != token:
                done = request


def _drafts_of(batch: Batch, drafts: DraftTokens | None) -> dict[Request, list[int]]:
    """The draft tokens of each request, pads included."""
    return {} if drafts is None else {r: drafts.token_ids[b].tolist() for b, r in enumerate(batch.requests)}

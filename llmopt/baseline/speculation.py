"""Layer 3, plain: no drafts of its own, and a verifier that takes anybody's."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from llmopt.batch import AcceptedTokens, Batch, BestTokens, DraftTokens
from llmopt.ops.argmax import argmax
from llmopt.sampler import Row, not_finite, sample

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from llmopt.request import Lockstep, Request
    from llmopt.stages import LogitsMask

    _Choose = Callable[["list[_Walk]", Tensor, "list[int] | None"], tuple[list[int], dict[int, BaseException]]]


class BaselinePropose:
    """Guess nothing."""

    def __call__(self, batch: Batch) -> DraftTokens | None:
        return None


class BaselineVerify:
    """Sample, then match: choose a token as if it came alone, and go on behind the draft that equals it, if any.

    So the output is what it would be without drafts, greedy or sampled (the random number of a token depends on seed
    and position only). Logits of drafts that were not reached are not looked at, except where all rows are plainly
    greedy.
    """

    def __call__(
        self, batch: Batch, drafts: DraftTokens | None, logits: Tensor | BestTokens, mask: LogitsMask | None
    ) -> AcceptedTokens:
        if isinstance(logits, BestTokens):
            return _follow(batch, drafts, logits.token_ids, logits.logits)
        if mask is not None:
            logits = mask.apply(logits)
        if all(request.takes_best and request.lockstep is None for request in batch.logits_requests):
            _ban(batch, logits)
            if drafts is None:
                return _follow(batch, drafts, *argmax(logits))
            return _step_by_step(batch, drafts, logits, _choose_best)
        return _step_by_step(batch, drafts, logits, _choose)


@dataclass(slots=True)
class _Walk:
    """The way of one request through its drafts."""

    request: Request
    first: int  # its first row of logits
    drafts: list[int]  # their token ids
    parents: list[int] | None  # None: a chain
    row: int  # of the logits, where it stands
    tokens: list[int] = field(default_factory=list)  # chosen so far
    path: list[int] = field(default_factory=list)  # the drafts among them
    is_over: bool = False

    def take(self, token: int) -> None:
        """Choose a token, and go on behind the draft that guessed it."""
        self.tokens.append(token)
        here, parents = self.row - self.first - 1, self.parents
        for draft in range(here + 1, len(self.drafts) if parents is not None else min(here + 2, len(self.drafts))):
            if self.drafts[draft] == token and (parents is None or parents[draft] == here):
                self.path.append(draft)
                self.row = self.first + 1 + draft
                return
        self.is_over = True

    def fail(self, error: BaseException, accepted: AcceptedTokens) -> None:
        """No token can be chosen here. Behind drafts the error comes back when they are real."""
        if not self.tokens:
            accepted.errors[self.request.request_id] = error
        self.is_over = True

    def deliver(self, accepted: AcceptedTokens) -> None:
        """Say what was chosen, if anything."""
        if self.tokens:
            accepted.requests.append(self.request)
            accepted.token_ids.append(self.tokens)
            accepted.finish_reasons.append(None)
            if accepted.paths is not None:
                accepted.paths.append(self.path)


def _no_paths(drafts: DraftTokens | None) -> list[list[int]] | None:
    return None if drafts is None or drafts.parents is None else []


def _walks(batch: Batch, drafts: DraftTokens | None) -> list[tuple[int, _Walk]]:
    """One walk per request that chooses tokens, at its first row of logits."""
    requests = batch.logits_requests
    if drafts is None:
        return [(row, _Walk(request, row, [], None, row)) for row, request in enumerate(requests)]
    ids, counts = drafts.token_ids.tolist(), drafts.num_draft.tolist()
    parents = None if drafts.parents is None else drafts.parents.tolist()
    walks = []
    row = 0
    for b, request in enumerate(batch.requests):
        if row == len(requests):
            break
        if requests[row] is request:
            count = counts[b]
            walk = _Walk(request, row, ids[b][:count], None if parents is None else parents[b], row)
            walks.append((row, walk))
            row += 1 + count
    return walks


def _step_by_step(batch: Batch, drafts: DraftTokens | None, logits: Tensor, choose: _Choose) -> AcceptedTokens:
    """Token after token, each of all requests together, from the rows of logits that were reached."""
    accepted = AcceptedTokens([], [], [], paths=_no_paths(drafts))
    groups: dict[int, Lockstep] = {}
    walks: list[_Walk] = []
    for row, walk in _walks(batch, drafts):
        lockstep = walk.request.lockstep
        if lockstep is None:
            walks.append(walk)
        elif lockstep.put(walk.request, logits[row]):
            groups[id(lockstep)] = lockstep
    under_way = walks
    while under_way:
        places = [walk.row for walk in under_way]
        tokens, failed = choose(under_way, logits, None if len(places) == logits.shape[0] else places)
        for index, walk in enumerate(under_way):
            if index in failed:
                walk.fail(failed[index], accepted)
            else:
                walk.take(tokens[index])
        under_way = [walk for walk in under_way if not walk.is_over]
    for walk in walks:
        walk.deliver(accepted)
    for group in groups.values():
        chosen = group.choose()
        accepted.requests += chosen.requests
        accepted.token_ids += chosen.token_ids
        accepted.finish_reasons += chosen.finish_reasons
        accepted.errors |= chosen.errors
        if accepted.paths is not None:
            accepted.paths += [[] for _ in chosen.requests]
    return accepted


def _choose(walks: list[_Walk], logits: Tensor, places: list[int] | None) -> tuple[list[int], dict[int, BaseException]]:
    """A token of each walk as its request wants it; what failed, by index."""
    return sample([Row(walk.request, walk.tokens) for walk in walks], logits, places)


def _choose_best(
    walks: list[_Walk], logits: Tensor, places: list[int] | None
) -> tuple[list[int], dict[int, BaseException]]:
    """The same where all are greedy and nothing edits the logits."""
    tokens, values = argmax(logits, places)
    if all(map(math.isfinite, values)):
        return tokens, {}
    return tokens, {i: not_finite(walks[i].request, v) for i, v in enumerate(values) if not math.isfinite(v)}


def _follow(batch: Batch, drafts: DraftTokens | None, tokens: list[int], values: list[float]) -> AcceptedTokens:
    """Every row takes its best token.

    :param tokens: the best of each row of logits.
    :param values: its logit.
    """
    requests = batch.logits_requests
    is_finite = all(map(math.isfinite, values))
    if drafts is None and is_finite:
        return AcceptedTokens(requests, [[token] for token in tokens], [None] * len(tokens))
    if drafts is not None and is_finite:
        return _follow_finite(batch, drafts, tokens)
    accepted = AcceptedTokens([], [], [], paths=_no_paths(drafts))
    for _, walk in _walks(batch, drafts):
        while not walk.is_over:
            if is_finite or math.isfinite(values[walk.row]):
                walk.take(tokens[walk.row])
            else:
                walk.fail(not_finite(walk.request, values[walk.row]), accepted)
        walk.deliver(accepted)
    return accepted


def _follow_finite(batch: Batch, drafts: DraftTokens, tokens: list[int]) -> AcceptedTokens:
    """The same where nothing can fail, as most rounds are: between two forwards every object that is made costs."""
    requests, ids, counts = batch.logits_requests, drafts.token_ids.tolist(), drafts.num_draft.tolist()
    parents = None if drafts.parents is None else drafts.parents.tolist()
    chosen: list[list[int]] = []
    paths: list[list[int]] = []
    owners: list[Request] = []
    first = 0
    for b, request in enumerate(batch.requests):
        if first == len(requests):
            break
        if requests[first] is not request:
            continue
        guesses, count = ids[b], counts[b]
        here, token = -1, tokens[first]
        taken, path = [token], []
        draft = 0
        while draft < count:
            if guesses[draft] == token and (parents is None or parents[b][draft] == here):
                here, token = draft, tokens[first + 1 + draft]
                taken.append(token)
                path.append(draft)
            elif parents is None:
                break
            draft += 1
        owners.append(request)
        chosen.append(taken)
        paths.append(path)
        first += 1 + count
    return AcceptedTokens(owners, chosen, [None] * len(owners), paths=None if parents is None else paths)


def _ban(batch: Batch, logits: Tensor) -> None:
    """Forbid what would end greedy rows before their minimum, in place."""
    if batch.banned_ids.size:
        inside = (batch.banned_ids >= 0) & (batch.banned_ids < logits.shape[-1])
        rows, ids = (torch.from_numpy(a[inside]).to(logits.device) for a in (batch.banned_rows, batch.banned_ids))
        with torch.inference_mode():  # logits may have been made in this mode
            logits[rows, ids] = -math.inf

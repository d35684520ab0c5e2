"""The stages that all drafters share: drafts before the forward, what became of them after the step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from llmopt.batch import DraftTokens
from llmopt.cost_model import StepShape
from llmopt_plugins.speculation.goodput import Row
from llmopt_plugins.wrapping import Wrapping

if TYPE_CHECKING:
    from llmopt.batch import AcceptedTokens, Batch, StepOutput
    from llmopt.request import Request
    from llmopt.stages import Allocate, Commit, Propose
    from llmopt_plugins.speculation.drafter import Draft, Drafter
    from llmopt_plugins.speculation.goodput import Goodput


class DraftPropose(Wrapping):
    """Ask a drafter for as many tokens as pay, and the stage inside for the rows that got none.

    :param drafter: who guesses.
    :param goodput: who says how much.
    :param max_num_draft: drafts that a row may have.
    :param vocab_size: ids from here on are no tokens of the model.
    """

    inner: Propose

    def __init__(self, inner: Propose, drafter: Drafter, goodput: Goodput, max_num_draft: int, vocab_size: int) -> None:
        super().__init__(inner)
        self.drafter, self.goodput = drafter, goodput
        self.max_num_draft, self.vocab_size = max_num_draft, vocab_size
        self._skip = getattr(drafter, "skip", None)

    def __call__(self, batch: Batch) -> DraftTokens | None:
        return self.for_rows(batch, ())

    def for_rows(self, batch: Batch, taken: Collection[Request]) -> DraftTokens | None:
        """Drafts for those rows that have none yet.

        :param taken: requests for which an outer stage has drafts.
        """
        if self.goodput.is_asleep():
            if self._skip is not None:
                self._skip(batch)
            return self._ask_inner(batch, taken)
        rows, places = self._rows(batch, taken)
        if not rows:
            if self._skip is not None:
                self._skip(batch)
            return self._ask_inner(batch, taken)
        self.goodput.begin(StepShape.of(batch), len(batch.logits_requests))
        drafts = self._draft(rows)
        if not any(drafts):
            return self._ask_inner(batch, taken)
        own = {row.request for row, draft in zip(rows, drafts, strict=True) if draft}
        others = self._ask_inner(batch, {*taken, *own}) if len(own) < len(rows) else None
        return _pack(batch, {place: d for place, d in zip(places, drafts, strict=True) if d}, others)

    def _rows(self, batch: Batch, taken: Collection[Request]) -> tuple[list[Row], list[int]]:
        """Rows that may have drafts: requests that decode and choose for themselves."""
        rows: list[Row] = []
        places: list[int] = []
        most = self.max_num_draft
        for place, request in enumerate(batch.requests):
            if (
                request.num_tokens - request.num_computed_tokens == 1
                and request.lockstep is None
                and (not taken or request not in taken)
            ):
                room = min(most, request.max_len - request.num_tokens - 1)
                if room > 0:
                    rows.append(Row(request, room))
                    places.append(place)
        return rows, places

    def _draft(self, rows: list[Row]) -> list[Draft | None]:
        drafter, goodput = self.drafter, self.goodput
        limits = [row.room for row in rows] if drafter.is_cheap else goodput.plan(rows)
        asked = rows if all(limits) else [row for row, limit in zip(rows, limits, strict=True) if limit]
        most = max(limits, default=0)
        found = drafter.draft([row.request for row in asked], [limit for limit in limits if limit]) if asked else []
        if len(asked) < len(rows):
            answers = iter(found)
            drafts = [next(answers) if limit else None for limit in limits]
        else:
            drafts = found
        for place, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
            if draft is not None:
                _trim(draft, row, limits[place], self.vocab_size)
        if drafter.is_cheap:
            limits = self._cut(rows, drafts)
        made = [
            (row.request, draft.kind, len(draft.token_ids), limit)
            for row, draft, limit in zip(rows, drafts, limits, strict=True)
            if draft is not None and limit
        ]
        goodput.end_draft(made, len(asked), most)
        return [draft if draft is not None and draft.token_ids else None for draft in drafts]

    def _cut(self, rows: list[Row], drafts: list[Draft | None]) -> list[int]:
        """Keep what pays, now that it is known how sure the drafter is; returns the tokens that each row keeps."""
        limits = [0] * len(rows)
        known = [
            (place, Row(row.request, len(draft.token_ids), draft.kind))
            for place, (row, draft) in enumerate(zip(rows, drafts, strict=True))
            if draft is not None and draft.token_ids
        ]
        if not known:
            return limits
        for (place, _), count in zip(known, self.goodput.plan([row for _, row in known]), strict=True):
            draft = drafts[place]
            assert draft is not None
            limits[place] = count
            del draft.token_ids[count:]
            if draft.parents is not None:
                del draft.parents[count:]
        return limits

    def _ask_inner(self, batch: Batch, taken: Collection[Request]) -> DraftTokens | None:
        if isinstance(self.inner, DraftPropose):
            return self.inner.for_rows(batch, taken)
        return self.inner(batch)

    def stats(self) -> dict[str, Any]:
        return {**self.goodput.stats(), **self.drafter.stats()}


class DraftCommit(Wrapping):
    """Tell drafter and controller what was accepted, and which requests have ended."""

    inner: Commit

    def __init__(self, inner: Commit, drafter: Drafter, goodput: Goodput) -> None:
        super().__init__(inner)
        self.drafter, self.goodput = drafter, goodput
        self._wants_all = getattr(drafter, "wants_all_steps", False)

    def __call__(self, batch: Batch, accepted: AcceptedTokens) -> StepOutput:
        output = self.inner(batch, accepted)
        goodput = self.goodput
        if goodput.is_under_way:
            num_draft = int(batch.num_drafts.sum())
            goodput.end(_accepted_places(accepted) if num_draft else {}, num_draft)
            self.drafter.observe(batch, accepted)
        elif self._wants_all:
            self.drafter.observe(batch, accepted)
        for request in output.finished:
            self.drafter.forget(request)
            goodput.forget(request)
        return output


class DraftAllocate(Wrapping):
    """Tell a drafter that a request begins again or is gone: aborted and pre-empted ones do not pass through `commit`.

    :param forget: called with the request.
    """

    inner: Allocate

    def __init__(self, inner: Allocate, forget: Callable[[Request], None]) -> None:
        super().__init__(inner)
        self.forget = forget

    def __call__(self, request: Request, num_tokens: int) -> bool:
        return self.inner(request, num_tokens)

    def free(self, request: Request) -> None:
        self.forget(request)
        self.inner.free(request)

    def num_blocks_ever(self, request: Request) -> int:
        return self.inner.num_blocks_ever(request)


def _accepted_places(accepted: AcceptedTokens) -> dict[Request, Sequence[int]]:
    """For each request, the indices of its drafts that were accepted."""
    if accepted.paths is not None:
        return dict(zip(accepted.requests, accepted.paths, strict=True))
    return {r: range(len(ids) - 1) for r, ids in zip(accepted.requests, accepted.token_ids, strict=True)}


def _trim(draft: Draft, row: Row, limit: int, vocab_size: int) -> None:
    """Cut a draft to what can be verified: its limit, real tokens, and nothing after an end of the output."""
    ids = draft.token_ids
    if draft.parents is None:
        ends = row.request.eos_token_ids
        for place, token in enumerate(ids):
            if not 0 <= token < vocab_size:
                del ids[place:]
                break
            if token in ends:
                del ids[place + 1 :]
                break
        del ids[limit:]
        return
    kept: list[int] = []  # old places
    new_place = {-1: -1}
    for place, (token, parent) in enumerate(zip(ids, draft.parents, strict=True)):
        is_dead = parent not in new_place or (parent >= 0 and ids[parent] in row.request.eos_token_ids)
        if not is_dead and 0 <= token < vocab_size and len(kept) < limit:
            new_place[place] = len(kept)
            kept.append(place)
    if len(kept) < len(ids):
        draft.parents = [new_place[draft.parents[place]] for place in kept]
        draft.token_ids = [ids[place] for place in kept]


def _pack(batch: Batch, drafts: dict[int, Draft], others: DraftTokens | None) -> DraftTokens:
    """Own drafts by row, and those of the stage inside. In lists, which cost less than arrays until all is there."""
    size = batch.num_requests
    token_ids: list[list[int]] = [[]] * size if others is None else others.token_ids.tolist()
    num_draft: list[int] = [0] * size if others is None else others.num_draft.tolist()
    parents: list[list[int]] | None = None
    if others is not None and others.parents is not None:
        parents = others.parents.tolist()
    elif any(draft.parents is not None for draft in drafts.values()):
        parents = [[]] * size
    for place, draft in drafts.items():
        token_ids[place], num_draft[place] = draft.token_ids, len(draft.token_ids)
        if parents is not None:
            parents[place] = draft.parents or []
    width = max(map(len, token_ids))
    return DraftTokens(
        np.array([row + [-1] * (width - len(row)) for row in token_ids], dtype=np.int64),
        np.array(num_draft, dtype=np.int32),
        None
        if parents is None  # those that are missing: each follows the one before it
        else np.array([[*row, *range(len(row) - 1, width - 1)] for row in parents], dtype=np.int32),
    )

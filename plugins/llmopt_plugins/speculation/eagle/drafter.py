"""The drafter: what the head has seen of each request, and the search for drafts.

The head's own keys and values lie in blocks of their own, a place for each pair it was shown::

    position of the target   0   1   2   3   4   5   6        N = 7 known tokens, x6 is not computed yet
    pair (f_t, x_(t+1))      p0  p1  -   -   p4  p5           f_t: the target's hidden states at position t
    place                    0   1           2   3            2 and 3 were found in the prefix cache: nobody saw f

A pair that is missing is a hole: the head attends to what is left, at its true positions, and guesses a little worse.
Guessed tokens lie behind the true pairs and are overwritten by the next round.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from llmopt_plugins.speculation.drafter import Draft
from llmopt_plugins.speculation.eagle.level import RunHead
from llmopt_plugins.speculation.eagle.search import Growth, Pairs

if TYPE_CHECKING:
    from llmopt.batch import AcceptedTokens, Batch
    from llmopt.block_pool import BlockPool
    from llmopt.request import Request

_MAX_PENDING = 512  # pairs that wait for the next draft; from more on they are shown to the head at once
_FIRST_ROUNDS = 3
_IDLE_STEPS = 64  # steps without a draft after which nothing is shown to the head before it drafts again


@dataclass(slots=True, eq=False)
class _Seen:
    """What the head knows of one request."""

    block_table: list[int] = field(default_factory=list)
    num_pairs: int = 0  # places with true pairs
    last: int = -1  # position of the newest pair, shown or waiting
    positions: list[int] = field(default_factory=list)  # of pairs that wait
    features: list[Any] = field(default_factory=list)  # of the same, in pieces: see `RunHead.keep`
    expected: float = 0.0  # tokens of its draft that the head's chances promise to be accepted


class EagleDrafter:
    """Drafts with one head.

    :param taps: places of the head's taps among ``Batch.hidden``.
    :param pool: blocks of the head's own cache; its tensors belong to ``head``.
    :param width: nodes that go on at each level.
    :param depth: levels at most, each one forward of the head.

    ``price``, where it is set, says what a token costs now and what a draft costs to verify, both in seconds: levels
    and nodes that would cost more than they bring are left out. 0 for the first: all are made.
    """

    num_kinds = 1
    is_cheap = False
    wants_all_steps = True

    def __init__(self, head: RunHead, taps: Sequence[int], pool: BlockPool, *, width: int, depth: int) -> None:
        self.head = head
        self.read(taps)
        self.pool = pool
        self._given_width = width
        self.depth = depth
        self.allow_trees(True)
        self._seen: dict[Request, _Seen] = {}
        self._num_idle = 0  # steps since the last draft
        # the last step, when nobody drafted in it: requests that got a token, and their hidden states while they are
        # valid, which is until the next forward
        self._late: tuple[list[Request], Tensor] | None = None
        self._level_s = 0.0  # measured time of a level, smoothed
        self._share_of_levels = 1.0  # that were made, of those that were allowed, smoothed
        # accepted tokens, and how many the head's chances promised, of late
        self._hits = self._expected = 4.0
        self.price: Callable[[], tuple[float, float]] | None = None
        self._counts = {"num_rounds": 0, "num_levels": 0, "num_pairs": 0, "num_without_blocks": 0}

    def read(self, taps: Sequence[int]) -> None:
        """Take other hidden states than so far: places among those of a batch."""
        self.taps = list(taps)

    def allow_trees(self, allowed: bool) -> None:
        """Draft chains only, or trees where the width is more than one."""
        self.width = self._given_width if allowed else 1
        self.has_trees = self.width > 1

    # -- drafting -----------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def draft(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft | None]:
        """Guess tokens for every request whose newest hidden states are there."""
        is_warm, self._num_idle = self._num_idle <= 1, 0
        self._take_late()
        drafts: list[Draft | None] = [None] * len(requests)
        ready: list[int] = []
        for place, request in enumerate(requests):
            seen = self._seen.get(request)
            if seen is not None and seen.positions and seen.last == request.num_tokens - 2:
                ready.append(place)
        if not ready:
            return drafts
        most = max(limits[place] for place in ready)
        width, depth = min(self.width, most), min(self.depth, most) if self.has_trees else most
        places = [place for place in ready if self._reserve(self._seen[requests[place]], width * (depth - 1))]
        if not places:
            return drafts
        start = time.perf_counter()
        pairs = self._waiting([requests[place] for place in places])
        growth = Growth(width, depth, [limits[place] for place in places])
        if self.price is not None:
            growth.least_gain, growth.least_chance = self._least(len(places))
        found, num_levels = self.head.search(pairs, growth)
        for place, (ids, parents, scores) in zip(places, found, strict=True):
            drafts[place] = Draft(ids, parents if self.has_trees else None)
            self._seen[requests[place]].expected = sum(map(math.exp, scores))
        self._measure(time.perf_counter() - start, num_levels, depth, is_warm)
        self._counts["num_rounds"] += 1
        self._counts["num_levels"] += num_levels
        return drafts

    def _least(self, num_rows: int) -> tuple[float, float]:
        """What a level and a node must bring to be worth their time, in the head's own chances."""
        assert self.price is not None
        token_s, row_s = self.price()
        if not token_s:
            return 0.0, 0.0
        scale = token_s * min(max(self._hits / self._expected, 0.1), 2.0)
        return self._level_s * (1.0 + 0.02 * num_rows) / scale, row_s / scale

    def _waiting(self, requests: list[Request]) -> Pairs:
        """The pairs that wait. They count as shown from now on."""
        pairs = Pairs([], [], [], [], [], [])
        for request in requests:
            seen = self._seen[request]
            pairs.block_tables.append(seen.block_table)
            pairs.num_pairs.append(seen.num_pairs)
            pairs.lengths.append(len(seen.positions))
            pairs.token_ids += [int(request.token_ids[position + 1]) for position in seen.positions]
            pairs.positions += seen.positions
            pairs.features += seen.features
            seen.num_pairs += len(seen.positions)
            seen.positions, seen.features, seen.expected = [], [], 0.0
        self._counts["num_pairs"] += len(pairs.positions)
        return pairs

    def _reserve(self, seen: _Seen, num_nodes: int) -> bool:
        """Blocks for what waits and for guesses. Without them the request starts over with what it gets from now on."""
        needed = self.pool.num_blocks_for(seen.num_pairs + len(seen.positions) + num_nodes) - len(seen.block_table)
        if needed > self.pool.num_free:
            self.pool.free(seen.block_table)
            seen.block_table, seen.num_pairs, seen.positions, seen.features = [], 0, [], []
            self._counts["num_without_blocks"] += 1
            return False
        if needed > 0:
            seen.block_table += self.pool.allocate(needed)
        return True

    # -- learning -----------------------------------------------------------------------------------------------------
    def observe(self, batch: Batch, accepted: AcceptedTokens) -> None:
        """Keep the hidden states of tokens that are there to stay."""
        hidden, self._late = batch.hidden, None
        self._num_idle += 1
        if hidden is None:
            return
        if self._num_idle > 1 and batch.num_tokens == batch.num_requests:  # nothing is done that may be in vain
            self._late = batch.requests, hidden
            return
        with torch.no_grad():
            self._keep(batch, accepted, hidden)

    def _keep(self, batch: Batch, accepted: AcceptedTokens, hidden: Tensor) -> None:
        kept = {request: place for place, request in enumerate(accepted.requests)}
        bounds, positions = batch.cu_seqlens_q.tolist(), batch.positions
        num_drafts = batch.num_drafts.tolist()
        for row, request in enumerate(batch.requests):
            if request.is_finished:
                continue
            first, end = bounds[row], bounds[row + 1] - num_drafts[row]
            start = int(positions[first])
            seen = self._seen.get(request)
            if seen is None:
                seen = self._seen[request] = _Seen()
            tokens = range(first, end)  # packed tokens whose hidden states are true, in the order of positions
            if num_drafts[row] and (place := kept.get(request)) is not None:
                count = len(accepted.token_ids[place]) - 1
                path = range(count) if accepted.paths is None else accepted.paths[place][:count]
                if seen.expected:
                    self._hits, self._expected = 0.98 * self._hits + count, 0.98 * self._expected + seen.expected
                    seen.expected = 0.0
                if path:
                    tokens = [*tokens, *(end + draft for draft in path)]  # type: ignore[assignment]
            # a pair needs the token behind it; what the head has seen before (a request that began again) is left out
            skipped = max(0, seen.last + 1 - start)
            stop = min(len(tokens), request.num_tokens - 1 - start)
            if skipped >= stop:
                continue
            self._take(seen, hidden, tokens[skipped:stop], start + skipped)
            if len(seen.positions) > _MAX_PENDING:
                self._relieve(request, seen)

    def _relieve(self, request: Request, seen: _Seen) -> None:
        """Too many pairs wait: show them, or drop the older ones while nobody drafts anyway."""
        if self._num_idle < _IDLE_STEPS:
            if self._reserve(seen, 0):
                self.head.search(self._waiting([request]), Growth(1, 0, [0]))
            return
        while len(seen.features) > 1 and len(seen.positions) - len(seen.features[0]) >= _MAX_PENDING // 4:
            del seen.positions[: len(seen.features.pop(0))]

    def _take_late(self) -> None:
        """Keep the hidden states of the last step after all."""
        if self._late is None:
            return
        (requests, hidden), self._late = self._late, None
        for row, request in enumerate(requests):
            position = request.num_computed_tokens - 1
            if not request.is_finished and position == request.num_tokens - 2:
                seen = self._seen.setdefault(request, _Seen())
                if seen.last < position:
                    self._take(seen, hidden, [row], position)

    def _take(self, seen: _Seen, hidden: Tensor, tokens: Sequence[int], position: int) -> None:
        seen.features.append(self.head.keep(hidden, list(tokens), self.taps))
        seen.positions += range(position, position + len(tokens))
        seen.last = position + len(tokens) - 1

    def forget(self, request: Request) -> None:
        """Free what is kept for a request."""
        seen = self._seen.pop(request, None)
        if seen is not None and seen.block_table:
            self.pool.free(seen.block_table)

    # -- figures ------------------------------------------------------------------------------------------------------
    def draft_s(self, num_rows: int, num_draft: int) -> float:
        """A level is bound by the head's weights, whatever the number of rows."""
        levels = min(self.depth, num_draft) if self.has_trees else num_draft
        return self._share_of_levels * levels * (self._level_s or 1e-3) * (1.0 + 0.02 * num_rows)

    def _measure(self, seconds: float, num_levels: int, depth: int, is_warm: bool) -> None:
        level_s = seconds / num_levels
        if not is_warm and self._level_s:  # after a pause the head is not in the caches any more
            level_s = min(level_s, self._level_s)
        if self._counts["num_rounds"] < _FIRST_ROUNDS:  # the first ones find nothing ready
            self._level_s = min(level_s, self._level_s or level_s)
        else:
            self._level_s += 0.1 * (min(level_s, 2.0 * self._level_s) - self._level_s)
        self._share_of_levels += 0.1 * (num_levels / depth - self._share_of_levels)

    def stats(self) -> dict[str, Any]:
        return {**self._counts, "level_ms": round(1e3 * self._level_s, 3), "num_requests": len(self._seen)}

    def close(self) -> None:
        """Forget everything."""
        for request in list(self._seen):
            self.forget(request)
        self.head.close()

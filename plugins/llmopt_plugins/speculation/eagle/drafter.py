"""The drafter: what the head has seen of each request, and the search for drafts.

The head's own keys and values lie in blocks of their own, a place for each pair it was shown::

    position of the target   0   1   2   3   4   5   6        N = 7 known tokens, x6 is not computed yet
    pair (f_t, x_(t+1))      p0  p1  -   -   p4  p5           f_t: the target's hidden states at position t
    place                    0   1           2   3            2 and 3 were found in the prefix cache: nobody saw f

A pair that is missing is a hole: the head attends to what is left, at its true positions, and guesses a little worse.
Guessed tokens lie behind the true pairs and are overwritten by the next round.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from llmopt_plugins.speculation.drafter import Draft
from llmopt_plugins.speculation.eagle.level import Guesses, Level, RunHead
from llmopt_plugins.speculation.eagle.tree import DraftTree

if TYPE_CHECKING:
    from llmopt.batch import AcceptedTokens, Batch
    from llmopt.block_pool import BlockPool
    from llmopt.request import Request

_MAX_PENDING = 512  # pairs that wait for the next draft; from more on they are shown to the head at once
_IDLE_STEPS = 64  # steps without a draft after which nothing is shown to the head before it drafts again


@dataclass(slots=True, eq=False)
class _Seen:
    """What the head knows of one request."""

    block_table: list[int] = field(default_factory=list)
    num_pairs: int = 0  # places with true pairs
    last: int = -1  # position of the newest pair, shown or waiting
    positions: list[int] = field(default_factory=list)  # of pairs that wait
    features: list[Tensor] = field(default_factory=list)  # of the same, [n, taps, hidden] each


class EagleDrafter:
    """Drafts with one head.

    :param taps: places of the head's taps among ``Batch.hidden``.
    :param pool: blocks of the head's own cache; its tensors belong to ``head``.
    :param width: nodes that go on at each level.
    :param depth: levels, each one forward of the head.
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
        self._counts = {"num_rounds": 0, "num_levels": 0, "num_pairs": 0, "num_without_blocks": 0}

    def read(self, taps: Sequence[int]) -> None:
        """Take other hidden states than so far: places among those of a batch."""
        self.taps = torch.tensor(list(taps))
        self._are_in_order = list(taps) == list(range(len(taps)))  # so that they may be all that a batch shows

    def allow_trees(self, allowed: bool) -> None:
        """Draft chains only, or trees where the width is more than one."""
        self.width = self._given_width if allowed else 1
        self.has_trees = self.width > 1

    # -- drafting -----------------------------------------------------------------------------------------------------
    @torch.no_grad()
    def draft(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Draft | None]:
        """Guess tokens for every request whose newest hidden states are there."""
        self._num_idle = 0
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
        rows = [requests[place] for place in places]
        tree = self._search(rows, width, depth)
        for place, (ids, parents, _) in zip(places, tree.best([limits[place] for place in places]), strict=True):
            drafts[place] = Draft(ids, parents if self.has_trees else None) if ids else None
        self._measure((time.perf_counter() - start) / depth)
        self._counts["num_rounds"] += 1
        self._counts["num_levels"] += depth
        return drafts

    def _search(self, requests: list[Request], width: int, depth: int) -> DraftTree:
        count = len(requests)
        tree = DraftTree(count, width)
        guesses = self._show(requests, width)
        assert guesses is not None
        tree.grow(guesses.token_ids[:, None], guesses.log_probs[:, None])
        if depth == 1:
            return tree
        seen = [self._seen[request] for request in requests]
        nodes = _Nodes(seen, self.pool.block_size, width, depth - 1)
        for number in range(1, depth):
            guesses = self.head(*nodes.level(tree, guesses.states, number), width)
            assert guesses is not None
            tree.grow(guesses.token_ids.reshape(count, width, -1), guesses.log_probs.reshape(count, width, -1))
        return tree

    def _show(self, requests: list[Request], top: int) -> Guesses | None:
        """Give the head the pairs that wait, and ask for the followers of each request's newest one."""
        seen = [self._seen[request] for request in requests]
        lengths = [len(s.positions) for s in seen]
        ends = np.cumsum(lengths)
        starts = ends - lengths
        total = int(ends[-1])
        positions = np.array([p for s in seen for p in s.positions], dtype=np.int64)
        token_ids = np.empty(total, dtype=np.int64)
        slots = np.empty(total, dtype=np.int64)
        size = self.pool.block_size
        for request, s, start, end in zip(requests, seen, starts.tolist(), ends.tolist(), strict=True):
            if end - start == 1:
                token_ids[start] = request.token_ids[s.positions[0] + 1]
                block, offset = divmod(s.num_pairs, size)
                slots[start] = s.block_table[block] * size + offset
            else:
                token_ids[start:end] = [request.token_ids[p + 1] for p in s.positions]
                blocks, offsets = np.divmod(np.arange(s.num_pairs, s.num_pairs + end - start), size)
                slots[start:end] = np.array(s.block_table, dtype=np.int64)[blocks] * size + offsets
            s.num_pairs += end - start
        parts = [part for s in seen for part in s.features]
        features = parts[0] if len(parts) == 1 else torch.cat(parts)
        level = Level(
            block_tables=_tables(seen),
            seq_lens=np.array([s.num_pairs for s in seen], dtype=np.int32),
            cu_seqlens_q=np.concatenate([[0], ends]).astype(np.int32),
            slot_mapping=slots,
            token_ids=token_ids,
            positions=positions,
            logits_indices=ends.astype(np.int64) - 1 if top else np.empty(0, dtype=np.int64),
        )
        guesses = self.head(level, features, top, are_features=True)
        for s in seen:
            s.positions, s.features = [], []
        self._counts["num_pairs"] += total
        return guesses

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
    @torch.no_grad()
    def observe(self, batch: Batch, accepted: AcceptedTokens) -> None:
        """Keep the hidden states of tokens that are there to stay."""
        hidden, self._late = batch.hidden, None
        self._num_idle += 1
        if hidden is None:
            return
        if self._num_idle > 1 and batch.num_tokens == batch.num_requests:  # nothing is done that may be in vain
            self._late = batch.requests, hidden
            return
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
                self._show([request], 0)
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
        first, count = tokens[0], len(tokens)
        rows = hidden[first : first + count] if tokens[-1] - first == count - 1 else hidden[list(tokens)]
        is_all = self._are_in_order and rows.shape[1] == len(self.taps)
        seen.features.append(rows.clone() if is_all else rows[:, self.taps])  # the step's memory is used again
        seen.positions += range(position, position + count)
        seen.last = position + count - 1

    def forget(self, request: Request) -> None:
        """Free what is kept for a request."""
        seen = self._seen.pop(request, None)
        if seen is not None and seen.block_table:
            self.pool.free(seen.block_table)

    # -- figures ------------------------------------------------------------------------------------------------------
    def draft_s(self, num_rows: int, num_draft: int) -> float:
        """A level is bound by the head's weights, whatever the number of rows."""
        levels = min(self.depth, num_draft) if self.has_trees else num_draft
        return levels * (self._level_s or 1e-3) * (1.0 + 0.02 * num_rows)

    def _measure(self, level_s: float) -> None:
        self._level_s = level_s if not self._level_s else 0.9 * self._level_s + 0.1 * level_s

    def stats(self) -> dict[str, Any]:
        return {**self._counts, "level_ms": round(1e3 * self._level_s, 3), "num_requests": len(self._seen)}

    def close(self) -> None:
        """Forget everything."""
        for request in list(self._seen):
            self.forget(request)
        self.head.close()


class _Nodes:
    """The nodes that are forwarded for some requests, level after level, and the arrays of these forwards."""

    def __init__(self, seen: list[_Seen], block_size: int, width: int, num_levels: int) -> None:
        count, most = len(seen), width * num_levels
        self.width = width
        self.tables = _tables(seen)
        self.num_pairs = np.array([s.num_pairs for s in seen], dtype=np.int32)
        self.last = np.array([s.last for s in seen], dtype=np.int64)
        blocks, offsets = np.divmod(self.num_pairs[:, None] + np.arange(most), block_size)
        self.slots = self.tables[np.arange(count)[:, None], blocks].astype(np.int64) * block_size + offsets
        self.cu_seqlens = np.arange(0, (count + 1) * width, width, dtype=np.int32)
        self.all_rows = np.arange(count * width, dtype=np.int64)
        self._rows = self.all_rows[:count, None]

    def level(self, tree: DraftTree, states: Tensor, number: int) -> tuple[Level, Tensor]:
        """The frontier of a tree as the next level, and what its nodes get as hidden states.

        :param states: ``[R * frontier before, size]``: what the level before gave.
        :param number: 1 for the first.
        """
        width, count = self.width, len(self.num_pairs)
        end = number * width
        origins = (self._rows * (states.shape[0] // count) + tree.origins).reshape(-1)
        level = Level(
            block_tables=self.tables,
            seq_lens=self.num_pairs + np.int32(end),
            cu_seqlens_q=self.cu_seqlens,
            slot_mapping=_flat(self.slots[:, end - width : end]),
            token_ids=_flat(tree.token_ids),
            positions=np.repeat(self.last + number, width),
            logits_indices=self.all_rows,
        )
        if width > 1:  # a chain sees all before it
            level.num_drafts, level.draft_masks = np.full(count, end, dtype=np.int32), _flat(tree.masks())
        return level, states[torch.from_numpy(origins).to(states.device)]


def _flat(rows: np.ndarray) -> np.ndarray:
    """``[R, n]`` -> ``[R * n]``, contiguous."""
    return np.ascontiguousarray(rows).reshape(-1)


def _tables(seen: list[_Seen]) -> np.ndarray:
    """Block tables as an array, ``[R, M]`` int32."""
    width = max(len(s.block_table) for s in seen)
    tables = np.zeros((len(seen), width), dtype=np.int32)
    for row, s in enumerate(seen):
        tables[row, : len(s.block_table)] = s.block_table
    return tables

"""The search for drafts, level by level, with any head that runs; in C++ the same is `llmopt._core.TreeSearch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from llmopt_plugins.speculation.eagle.level import Level
from llmopt_plugins.speculation.eagle.tree import DraftTree

if TYPE_CHECKING:
    from llmopt_plugins.speculation.eagle.level import RunHead

Nodes = tuple[list[int], list[int], list[float]]  # tokens, parents as indices of the same list, logs of their chances


@dataclass(slots=True)
class Pairs:
    """What the head is shown first: of each request the pairs (hidden states, next token) that it has not seen."""

    block_tables: list[list[int]]  # with room for the pairs, and for the nodes that are forwarded behind them
    num_pairs: list[int]  # that the cache holds already
    lengths: list[int]  # new pairs, at least one each
    token_ids: list[int]  # [sum of lengths]
    positions: list[int]  # [sum of lengths] of the hidden states
    features: list[Any]  # of `RunHead.keep`, for all pairs, in any number of pieces


@dataclass(slots=True)
class Growth:
    """How far trees grow.

    A further level would bring about ``m * m / n`` tokens over all requests: ``m`` the chances of the nodes that go on,
    ``n`` of those they follow, so its nodes are taken to be as likely for their parents as these are for theirs.
    """

    width: int  # nodes that go on at each level
    depth: int  # levels at most; 0: the pairs are only stored
    counts: list[int]  # nodes per request, at most
    least_gain: float = 0.0  # tokens: no level is made for less
    least_chance: float = 0.0  # nodes below it are left out


def first_level(pairs: Pairs, block_size: int, *, wants_followers: bool) -> Level:
    """The forward that shows the pairs."""
    ends = np.cumsum(pairs.lengths)
    before = np.array(pairs.num_pairs, dtype=np.int64)
    tables = padded(pairs.block_tables)
    rows = np.repeat(np.arange(len(ends)), pairs.lengths)
    places = before[rows] + np.arange(ends[-1]) - np.repeat(ends - pairs.lengths, pairs.lengths)
    blocks, offsets = np.divmod(places, block_size)
    return Level(
        block_tables=tables,
        seq_lens=(before + pairs.lengths).astype(np.int32),
        cu_seqlens_q=np.concatenate([[0], ends]).astype(np.int32),
        slot_mapping=tables[rows, blocks].astype(np.int64) * block_size + offsets,
        token_ids=np.array(pairs.token_ids, dtype=np.int64),
        positions=np.array(pairs.positions, dtype=np.int64),
        logits_indices=ends.astype(np.int64) - 1 if wants_followers else np.empty(0, dtype=np.int64),
    )


def search_levels(head: RunHead, pairs: Pairs, growth: Growth, block_size: int) -> tuple[list[Nodes], int]:
    """Grow the trees of all requests together.

    :returns: the likeliest nodes of each request, likeliest first; the number of levels that were made.
    """
    count, width = len(pairs.lengths), growth.width
    tree = DraftTree(count, width)
    level = first_level(pairs, block_size, wants_followers=growth.depth > 0)
    features: Tensor = pairs.features[0] if len(pairs.features) == 1 else torch.cat(pairs.features)
    guesses = head(level, features, width if growth.depth else 0, are_features=True)
    if guesses is None:
        return [([], [], [])] * count, 0
    tree.grow(guesses.token_ids[:, None], guesses.log_probs[:, None])
    num_levels, before = 1, float(count)
    nodes = _Nodes(level, block_size, width, growth.depth - 1) if growth.depth > 1 else None
    while num_levels < growth.depth:
        mass = tree.mass()
        if not before or not mass * mass / before >= growth.least_gain:  # no chances: the head gave no numbers
            break
        before = mass
        assert nodes is not None
        guesses = head(*nodes.level(tree, guesses.states, num_levels), width)
        assert guesses is not None
        tree.grow(guesses.token_ids.reshape(count, width, -1), guesses.log_probs.reshape(count, width, -1))
        num_levels += 1
    return tree.best(growth.counts, growth.least_chance), num_levels


class _Nodes:
    """The nodes that are forwarded for some requests, level after level, and the arrays of these forwards.

    :param first: the level that showed the pairs.
    """

    def __init__(self, first: Level, block_size: int, width: int, num_levels: int) -> None:
        count, most = len(first.seq_lens), width * num_levels
        self.width = width
        self.tables = first.block_tables
        self.num_pairs = first.seq_lens
        self.last = first.positions[first.cu_seqlens_q[1:] - 1]
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


def padded(block_tables: Sequence[Sequence[int]]) -> np.ndarray:
    """Block tables as an array, ``[R, M]`` int32."""
    tables = np.zeros((len(block_tables), max(map(len, block_tables))), dtype=np.int32)
    for row, table in enumerate(block_tables):
        tables[row, : len(table)] = table
    return tables


def _flat(rows: np.ndarray) -> np.ndarray:
    """``[R, n]`` -> ``[R * n]``, contiguous."""
    return np.ascontiguousarray(rows).reshape(-1)

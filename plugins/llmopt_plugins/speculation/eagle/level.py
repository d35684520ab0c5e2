"""One forward of a draft head, as arrays, and what comes back; the same for both ways to run it."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from llmopt_plugins.speculation.eagle.search import Growth, Nodes, Pairs


@dataclass(slots=True)
class Level:
    """Tokens of one forward over the head's own blocks, packed and ragged as in `llmopt.batch.Batch`.

    Place ``s`` of a request holds the s-th pair (hidden state, next token) that the head was shown; positions count in
    the target's sequence, so they may skip what the head never saw.
    """

    block_tables: np.ndarray  # [B, M] int32
    seq_lens: np.ndarray  # [B] int32, pairs and drafts, this forward's included
    cu_seqlens_q: np.ndarray  # [B + 1] int32
    slot_mapping: np.ndarray  # [T] int64
    token_ids: np.ndarray  # [T] int64, the token behind each hidden state
    positions: np.ndarray  # [T] int64, of the hidden states
    logits_indices: np.ndarray  # [R] int64, ascending: tokens whose followers are wanted
    num_drafts: np.ndarray | None = None  # [B] int32 and
    draft_masks: np.ndarray | None = None  # [T] uint64, as in `Batch`; None: each token sees all before it


@dataclass(slots=True)
class Guesses:
    """The best few followers of each token that was asked for."""

    token_ids: np.ndarray  # [R, top] int64, ids of the target, best first
    log_probs: np.ndarray  # [R, top] float32, within the draft vocabulary
    states: Tensor  # [R, hidden_size] what the next level gets as hidden states; valid until the next forward


class RunHead(Protocol):
    """A head that runs."""

    def __call__(self, level: Level, hidden: Tensor, top: int, *, are_features: bool = False) -> Guesses | None:
        """Run one level and write its keys and values.

        :param hidden: ``[T, state_size]`` states of the tokens' parents.
        :param are_features: ``hidden`` are hidden states of the target, ``[T, taps, target's hidden_size]``: the first
            level.
        :param top: how many followers; 0: none, the level is only stored.
        """

    def keep(self, hidden: Tensor, rows: Sequence[int], taps: Sequence[int]) -> Sized:
        """Copy what the head reads of some tokens out of a step's memory.

        :param hidden: ``[T, layers, target's hidden_size]``.
        :param rows: tokens.
        :param taps: layers.
        :returns: something for `Pairs.features`, as long as ``rows``.
        """

    def search(self, pairs: Pairs, growth: Growth) -> tuple[list[Nodes], int]:
        """Show the pairs, and grow a tree behind the newest one of each request. See `search_levels`."""

    def close(self) -> None:
        """Free what it holds."""

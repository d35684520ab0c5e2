"""Drafts behind a batch of decodes: what the step that verifies them computes."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from llmopt import draft_check
from llmopt.batch import MAX_DRAFTS, NO_MASKS, Batch, DraftTokens

if TYPE_CHECKING:
    from llmopt.draft_check import CheckedDrafts, DraftCheck


@dataclass(slots=True)
class PackedDrafts:
    """The arrays of a `Batch` whose rows are a token and its drafts."""

    counts: list[int]  # [B] drafts of each row
    token_ids: np.ndarray
    positions: np.ndarray
    slot_mapping: np.ndarray
    draft_masks: np.ndarray
    num_scheduled: np.ndarray
    seq_lens: np.ndarray
    cu_seqlens_q: np.ndarray


class DraftPacker:
    """Packs in one native call: between two forwards all code is out of the caches, and each numpy function counts.

    :param token_ids: and the others are the arrays of which the batches are views, from the first entry on.
    """

    def __init__(
        self,
        block_size: int,
        token_ids: np.ndarray,
        positions: np.ndarray,
        seq_lens: np.ndarray,
        block_tables: np.ndarray,
    ) -> None:
        self.block_size = block_size
        self._decodes = (token_ids, positions, seq_lens, block_tables)
        self._core: ModuleType | None = None

    def __call__(self, batch: Batch, drafts: DraftTokens, check: DraftCheck) -> PackedDrafts:
        """Put drafts behind the decodes of a batch, in new arrays that are valid until the next call.

        :raises WrongResultError: they do not fit.
        """
        core = draft_check.cached_core()
        if core is not None and isinstance(drafts, DraftTokens):
            packed = self._pack_natively(core, batch, drafts, check)
            if packed is not None:
                return packed
        return pack(batch, drafts, check(drafts, batch.requests, [1] * len(batch.requests)), self.block_size)

    def _pack_natively(
        self, core: ModuleType, batch: Batch, drafts: DraftTokens, check: DraftCheck
    ) -> PackedDrafts | None:
        """None: there is something about these drafts, which the plain way tells."""
        if core is not self._core:
            self._begin(core)
        most = check.max_num_draft
        rooms = [0 if r.lockstep is not None else min(most, r.max_len - 1 - r.num_tokens) for r in batch.requests]
        form, counts = self._native.pack(
            batch.block_tables.shape[1],
            rooms,
            check.vocab_size or draft_check.ANY_ID,
            check.why_no_trees is None,
            drafts.token_ids,
            drafts.num_draft,
            drafts.parents,
        )
        if form == 2:
            return None
        size = len(counts)
        total = size + sum(counts)
        token_ids, positions, slots, masks, num_scheduled, seq_lens, cu_seqlens_q = self._packed
        return PackedDrafts(
            counts,
            token_ids[:total],
            positions[:total],
            slots[:total],
            masks[:total] if form == 1 else NO_MASKS,
            num_scheduled[:size],
            seq_lens[:size],
            cu_seqlens_q[: size + 1],
        )

    def _begin(self, core: ModuleType) -> None:
        """Make the arrays of packed batches; their pages are taken as they are written."""
        size = self._decodes[2].size
        num_tokens = size * (1 + MAX_DRAFTS)
        self._packed: tuple[np.ndarray, ...] = (
            *(np.empty(num_tokens, dtype=np.int64) for _ in range(3)),
            np.empty(num_tokens, dtype=np.uint64),
            *(np.empty(count, dtype=np.int32) for count in (size, size, size + 1)),
        )
        self._native = core.DraftPacker(*self._decodes, *self._packed, self.block_size)
        self._core = core


def pack(batch: Batch, drafts: DraftTokens, checked: CheckedDrafts, block_size: int) -> PackedDrafts:
    """The plain twin: arrays ``[B, 1 + num_draft]``, from which pads are taken out at the end."""
    counts, num_draft = checked.counts, drafts.num_draft
    size, width = len(counts), 1 + drafts.token_ids.shape[1]
    computed = batch.positions[:, None]
    token_ids = np.empty((size, width), dtype=np.int64)
    token_ids[:, 0], token_ids[:, 1:] = batch.token_ids, drafts.token_ids
    columns = np.arange(width)
    places = positions = computed + columns
    table_width = batch.block_tables.shape[1]
    if table_width:
        blocks, offsets = np.divmod(places, block_size)
        np.minimum(blocks, table_width - 1, out=blocks)  # pads may lie behind the last block
        slots = batch.block_tables[np.arange(size)[:, None], blocks].astype(np.int64) * block_size + offsets
    else:
        slots = np.full((size, width), -1, dtype=np.int64)
    masks = None
    if checked.masks is not None:
        masks = np.zeros((size, width), dtype=np.uint64)
        masks[:, 1:] = checked.masks
        positions = places.copy()
        positions[:, 1:] = computed + checked.depths
    is_real = columns <= num_draft[:, None]
    cu_seqlens_q = np.zeros(size + 1, dtype=np.int32)
    np.cumsum(num_draft + 1, out=cu_seqlens_q[1:])
    return PackedDrafts(
        counts,
        token_ids[is_real],
        positions[is_real],
        slots[is_real],
        NO_MASKS if masks is None else masks[is_real],
        num_draft + 1,
        batch.seq_lens + num_draft,
        cu_seqlens_q,
    )

"""Packing of scheduled requests into the arrays of a batch, in buffers that are made once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmopt.batch import NO_IDS, NO_MASKS, Batch, DraftTokens
from llmopt.draft_check import CheckedDrafts, DraftCheck
from llmopt.draft_packer import DraftPacker

if TYPE_CHECKING:
    from llmopt.request import Request


class BatchBuilder:
    """Builds batches. A batch is a set of views into this builder's buffers, valid until the next `build`."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.may_want_best = False  # whether all that stands behind `execute` is content with `BestTokens`
        self.wants_hidden = False  # whether plugins asked for hidden states
        self.draft_check = DraftCheck()  # refuses drafts that the step could not run
        self._arange = np.arange(1024, dtype=np.int64)
        self._reserve(num_requests=8, num_tokens=512, table_width=64)
        self._last: Batch | None = None  # the last batch, when all its rows were decodes
        self._num_banning = 0  # batches that may follow it with the same `banned_ids`

    def _reserve(self, num_requests: int, num_tokens: int, table_width: int) -> None:
        self._max_requests, self._max_tokens, self._max_width = num_requests, num_tokens, table_width
        self._num_scheduled = np.empty(num_requests, dtype=np.int32)
        self._num_drafts = np.empty(num_requests, dtype=np.int32)
        self._seq_lens = np.empty(num_requests, dtype=np.int32)
        self._slots = np.empty(num_requests, dtype=np.int32)
        self._cu_seqlens_q = np.zeros(num_requests + 1, dtype=np.int32)
        self._block_tables = np.zeros((num_requests, table_width), dtype=np.int32)
        self._token_ids = np.empty(num_tokens, dtype=np.int64)
        self._positions = np.empty(num_tokens, dtype=np.int64)
        self._slot_mapping = np.empty(num_tokens, dtype=np.int64)
        self._pack = DraftPacker(self.block_size, self._token_ids, self._positions, self._seq_lens, self._block_tables)

    def build(self, requests: list[Request], num_scheduled: list[int], drafts: DraftTokens | None = None) -> Batch:
        """Pack ``num_scheduled[i]`` tokens of ``requests[i]``, and its drafts after them.

        :param num_scheduled: tokens without drafts.
        :raises WrongResultError: the drafts do not fit the requests.
        """
        size, block_size = len(requests), self.block_size
        if drafts is None and self._last is not None and self._is_next_decode(requests, num_scheduled):
            return self._advance(self._last)
        checked = None if drafts is None else self.draft_check(drafts, requests, num_scheduled)
        num_drafts = [0] * size if checked is None else checked.counts
        total = sum(num_scheduled) + sum(num_drafts)
        width = max(len(r.block_table) for r in requests)
        if size > self._max_requests or total > self._max_tokens or width > self._max_width:
            self._reserve(
                max(size, self._max_requests), max(2 * total, self._max_tokens), max(2 * width, self._max_width)
            )
        tables = self._block_tables[:size, :width]
        tables.fill(0)
        logits_indices: list[int] = []
        logits_requests: list[Request] = []
        end = 0
        for row, (request, num_new, num_draft) in enumerate(zip(requests, num_scheduled, num_drafts, strict=True)):
            start, computed = end, request.num_computed_tokens
            middle = start + num_new
            end = middle + num_draft
            known = computed + num_new
            seq_len = known + num_draft
            table = tables[row, : len(request.block_table)]
            table[:] = request.block_table
            self._num_scheduled[row] = num_new + num_draft
            self._num_drafts[row] = num_draft
            self._seq_lens[row] = seq_len
            self._slots[row] = request.slot
            self._cu_seqlens_q[row + 1] = end
            if end - start == 1:  # a decode: scalars are faster than slices
                self._token_ids[start] = request.token_ids[computed]
                self._positions[start] = computed
                block, offset = divmod(computed, block_size)
                self._slot_mapping[start] = request.block_table[block] * block_size + offset if width else -1
            else:
                self._token_ids[start:middle] = request.token_ids[computed:known]
                if num_draft and drafts is not None:
                    self._token_ids[middle:end] = drafts.token_ids[row, :num_draft]
                positions = self._positions[start:end]
                positions[:] = self._range(computed, seq_len)
                blocks, offsets = np.divmod(positions, block_size)
                if width:
                    self._slot_mapping[start:end] = table[blocks].astype(np.int64) * block_size + offsets
                else:
                    self._slot_mapping[start:end] = -1
            if known == request.num_tokens:
                logits_indices.extend(range(middle - 1, end))
                logits_requests.extend([request] * (1 + num_draft))
        wanted = np.array(logits_indices, dtype=np.int64)
        draft_masks = NO_MASKS
        if checked is not None and checked.masks is not None:
            draft_masks = self._plant(checked, end)
        take_best = all(r.takes_best and r.lockstep is None for r in logits_requests)
        banned_rows, banned_ids = NO_IDS, NO_IDS
        if take_best:
            masks = draft_masks[wanted].tolist() if draft_masks.size else None
            banned_rows, banned_ids = self._ban(logits_requests, masks)
        adapters = [r.adapter for r in requests]
        batch = Batch(
            request_ids=[r.request_id for r in requests],
            num_scheduled=self._num_scheduled[:size],
            token_ids=self._token_ids[:end],
            positions=self._positions[:end],
            cu_seqlens_q=self._cu_seqlens_q[: size + 1],
            seq_lens=self._seq_lens[:size],
            block_tables=tables,
            slot_mapping=self._slot_mapping[:end],
            logits_indices=wanted,
            slots=self._slots[:size],
            num_drafts=self._num_drafts[:size],
            draft_masks=draft_masks,
            adapters=adapters if any(adapters) else [],
            requests=requests,
            logits_requests=logits_requests,
            wants_best=self.may_want_best and take_best,
            banned_rows=banned_rows,
            banned_ids=banned_ids,
            wants_hidden=self.wants_hidden,
        )
        is_decode = end == size == len(logits_requests) and drafts is None
        self._last = batch if is_decode else None
        self._last_wants_best = batch.wants_best
        self._tables = [r.block_table for r in requests]
        self._widths = [len(table) for table in self._tables]
        return batch

    def _is_next_decode(self, requests: list[Request], num_scheduled: list[int]) -> bool:
        """Whether this is the last batch a token later, or several when drafts were kept: same rows, same blocks.

        Whoever moves a request's blocks gives it a new list.
        """
        last = self._last
        assert last is not None
        if len(requests) != len(last.requests):
            return False
        slots = last.slots.tolist()
        for row, (request, before) in enumerate(zip(requests, last.requests, strict=True)):
            if (
                request is not before
                or num_scheduled[row] != 1
                or request.num_computed_tokens != request.num_tokens - 1
                or request.block_table is not self._tables[row]
                or len(request.block_table) != self._widths[row]
                or request.slot != slots[row]
            ):
                return False
        return True

    def _advance(self, batch: Batch) -> Batch:
        """Move a batch of decodes on, in place."""
        block_size, token_ids, positions = self.block_size, self._token_ids, self._positions
        slot_mapping, seq_lens = self._slot_mapping, self._seq_lens
        for row, request in enumerate(batch.requests):  # plain numbers: array calls cost more, even for 100 rows
            computed = request.num_computed_tokens
            token_ids[row] = request.token_ids[computed]
            positions[row] = computed
            seq_lens[row] = computed + 1
            if request.block_table:
                block, offset = divmod(computed, block_size)
                slot_mapping[row] = request.block_table[block] * block_size + offset
        batch.wants_best = self._last_wants_best
        batch.wants_hidden, batch.hidden = self.wants_hidden, None
        if batch.banned_ids.size:
            self._num_banning -= 1
            if self._num_banning < 0:
                batch.banned_rows, batch.banned_ids = self._ban(batch.logits_requests)
        return batch

    def _plant(self, drafts: CheckedDrafts, num_tokens: int) -> np.ndarray:
        """Masks ``[T]`` of the batch that was just packed, and positions for its trees."""
        masks = np.zeros(num_tokens, dtype=np.uint64)
        assert drafts.masks is not None
        assert drafts.depths is not None
        for row, count in enumerate(drafts.counts):
            if count:
                end = int(self._cu_seqlens_q[row + 1])
                masks[end - count : end] = drafts.masks[row, :count]
                newest = self._positions[end - count - 1]
                self._positions[end - count : end] = newest + drafts.depths[row, :count]
        return masks

    def _ban(self, requests: list[Request], masks: list[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Rows of logits, and ids that would end these rows before their minimum.

        :param masks: the draft mask of each row; None: a row assumes as many drafts as rows of its request come before.
        """
        rows: list[int] = []
        ids: list[int] = []
        self._num_banning = 1 << 62
        before, depth = None, 0
        for row, request in enumerate(requests):
            depth = depth + 1 if request is before else 0  # drafts before the token that this row chooses
            before = request
            if masks is not None:
                depth = masks[row].bit_count()
            missing = request.sampling.min_new_tokens - request.num_output_tokens - depth
            if missing > 0 and request.eos_token_ids:
                rows += [row] * len(request.eos_token_ids)
                ids += request.eos_token_ids
                self._num_banning = min(self._num_banning, missing - 1)
        return (np.array(rows, dtype=np.int64), np.array(ids, dtype=np.int64)) if rows else (NO_IDS, NO_IDS)

    def with_drafts(self, batch: Batch, drafts: DraftTokens) -> Batch:
        """Pack a batch again with draft tokens at the end of its rows.

        :raises WrongResultError: the drafts do not fit the batch.
        """
        if batch is self._last:
            return self._behind_decodes(batch, drafts)
        packed = self.build(batch.requests, batch.num_scheduled.tolist(), drafts)
        packed.wants_hidden = batch.wants_hidden
        return packed

    def _behind_decodes(self, batch: Batch, drafts: DraftTokens) -> Batch:
        """The drafts behind a batch of decodes, whose own arrays stay as they are: they come again in the next step."""
        packed = self._pack(batch, drafts, self.draft_check)
        logits_requests: list[Request] = []
        for request, count in zip(batch.requests, packed.counts, strict=True):
            logits_requests += [request] * (1 + count)
        banned_rows, banned_ids = batch.banned_rows, batch.banned_ids
        if banned_ids.size:
            banned_rows, banned_ids = self._ban(logits_requests, packed.draft_masks.tolist() or None)
            self._num_banning = 0  # nobody knows how many tokens will be kept
        return Batch(
            request_ids=batch.request_ids,
            num_scheduled=packed.num_scheduled,
            token_ids=packed.token_ids,
            positions=packed.positions,
            cu_seqlens_q=packed.cu_seqlens_q,
            seq_lens=packed.seq_lens,
            block_tables=batch.block_tables,
            slot_mapping=packed.slot_mapping,
            logits_indices=self._range(0, len(logits_requests)),
            slots=batch.slots,
            num_drafts=drafts.num_draft,
            draft_masks=packed.draft_masks,
            adapters=batch.adapters,
            requests=batch.requests,
            logits_requests=logits_requests,
            wants_best=batch.wants_best,
            banned_rows=banned_rows,
            banned_ids=banned_ids,
            wants_hidden=batch.wants_hidden,
        )

    def _range(self, start: int, end: int) -> np.ndarray:
        if end > self._arange.size:
            self._arange = np.arange(2 * end, dtype=np.int64)
        return self._arange[start:end]

"""What a drafter returned, looked at before it is packed: a step cannot run every guess."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from llmopt import native
from llmopt.batch import MAX_DRAFTS, DraftTokens
from llmopt.recovery import WrongResultError

if TYPE_CHECKING:
    from llmopt.request import Request

ANY_ID = 1 << 62  # the end of a vocabulary that is not known


@dataclass(frozen=True, slots=True)
class CheckedDrafts:
    """Drafts that can run."""

    counts: list[int]  # per request
    masks: np.ndarray | None  # [B, num_draft] uint64, as in `Batch.draft_masks`; None when all are chains
    depths: np.ndarray | None  # [B, num_draft] int64, how far behind the newest token; with masks


class DraftCheck:
    """Refuses drafts that do not fit their requests, so that the drafter gets the blame and not who trips over them.

    :param max_num_draft: drafts of one request and step.
    :param vocab_size: ids that the model has; None: any.
    :param why_no_trees: what stands in the way of trees; None: nothing.
    """

    def __init__(
        self, max_num_draft: int = MAX_DRAFTS, vocab_size: int | None = None, why_no_trees: str | None = None
    ) -> None:
        self.max_num_draft = min(max_num_draft, MAX_DRAFTS)
        self.vocab_size = vocab_size
        self.why_no_trees = why_no_trees

    def __call__(self, drafts: DraftTokens, requests: list[Request], num_scheduled: list[int]) -> CheckedDrafts:
        """Look at the drafts of a batch.

        :param num_scheduled: tokens of each request without drafts.
        :raises WrongResultError: the step could not run them.
        """
        if not isinstance(drafts, DraftTokens):
            raise WrongResultError("propose", drafts, "DraftTokens or None")
        self._check_arrays(drafts, len(requests))
        counts: list[int] = drafts.num_draft.tolist()
        most = min(self.max_num_draft, drafts.token_ids.shape[1])
        for request, count, num_new in zip(requests, counts, num_scheduled, strict=True):
            if count == 0:
                continue
            room = request.max_len - 1 - request.num_tokens
            is_choosing = request.num_computed_tokens + num_new >= request.num_tokens and request.lockstep is None
            if not 0 < count <= most or count > room or not is_choosing:
                who = f"request {request.request_id!r}"
                if not is_choosing:
                    self._refuse(drafts, f"no drafts for {who}, which chooses no token in this step, or in lockstep")
                self._refuse(drafts, f"up to {max(0, min(most, room))} drafts for {who}, not {count}")
        masks = depths = None
        if drafts.parents is not None:
            masks, depths = np.empty(drafts.parents.shape, np.uint64), np.empty(drafts.parents.shape, np.int64)
        core = cached_core()
        parents = None if drafts.parents is None else np.ascontiguousarray(drafts.parents)
        arguments = (np.ascontiguousarray(drafts.token_ids), np.ascontiguousarray(drafts.num_draft), parents,
                     self.vocab_size or ANY_ID, masks, depths)  # fmt: skip
        form = _plant_trees(*arguments) if core is None else core.plant_trees(*arguments)
        if form == 2:
            self._explain(drafts, counts)
        if form == 1 and self.why_no_trees is not None:
            self._refuse(drafts, f"chains: trees cannot be verified, because {self.why_no_trees}")
        return CheckedDrafts(counts, masks, depths) if form == 1 else CheckedDrafts(counts, None, None)

    def _check_arrays(self, drafts: DraftTokens, num_rows: int) -> None:
        ids, counts, parents = drafts.token_ids, drafts.num_draft, drafts.parents
        shape = (num_rows, ids.shape[1] if ids.ndim == 2 else -1)
        if ids.shape != shape or counts.shape != shape[:1] or (parents is not None and parents.shape != shape):
            self._refuse(drafts, f"arrays with a row per request, {num_rows}, and parents shaped as token_ids")
        for name, array, dtype in (("token_ids", ids, np.int64), ("num_draft", counts, np.int32),
                                   ("parents", parents, np.int32)):  # fmt: skip
            if array is not None and array.dtype != dtype:
                self._refuse(drafts, f"{name} as {np.dtype(dtype).name}, not {array.dtype}")

    def _explain(self, drafts: DraftTokens, counts: list[int]) -> None:
        """Say what is wrong with drafts that cannot run."""
        for row, count in enumerate(counts):
            ids: list[int] = drafts.token_ids[row, :count].tolist()
            outside = [i for i in ids if not 0 <= i < (self.vocab_size or ANY_ID)]
            if outside:
                limit = "" if self.vocab_size is None else f", 0 to {self.vocab_size - 1}"
                self._refuse(drafts, f"ids of the vocabulary{limit}; row {row} has {outside[0]}")
            if drafts.parents is not None:
                parents: list[int] = drafts.parents[row, :count].tolist()
                for draft, parent in enumerate(parents):
                    if not -1 <= parent < draft:
                        self._refuse(drafts, f"parents before drafts; draft {draft} of row {row} follows {parent}")
                if len(set(zip(parents, ids, strict=True))) < count:
                    self._refuse(drafts, f"other ids where drafts follow the same token; in row {row} two are equal")

    @staticmethod
    def _refuse(drafts: DraftTokens, wanted: str) -> None:
        raise WrongResultError("propose", drafts, f"DraftTokens with {wanted}")


@functools.cache
def cached_core() -> ModuleType | None:
    """`llmopt.native.core`, looked up once: this runs between forwards."""
    return native.core()


def _plant_trees(
    token_ids: np.ndarray,
    num_draft: np.ndarray,
    parents: np.ndarray | None,
    vocab_size: int,
    masks: np.ndarray | None,
    depths: np.ndarray | None,
) -> int:
    """The plain twin of the native `plant_trees`: fills masks and depths, and returns 0 for chains, 1 for trees and 2
    for drafts that cannot run."""
    form = 0
    for row, count in enumerate(num_draft.tolist()):
        ids: list[int] = token_ids[row, :count].tolist()
        if not all(0 <= i < vocab_size for i in ids):
            return 2
        if parents is None or masks is None or depths is None:
            continue
        followed: list[int] = parents[row, :count].tolist()
        if not all(-1 <= parent < draft for draft, parent in enumerate(followed)):
            return 2
        if len(set(zip(followed, ids, strict=True))) < count:
            return 2
        if followed != list(range(-1, count - 1)):
            form = 1
        bits: list[int] = []
        for draft, parent in enumerate(followed):
            bits.append((bits[parent] if parent >= 0 else 0) | 1 << draft)
        masks[row], depths[row] = 0, 0
        masks[row, :count] = bits
        depths[row, :count] = [mask.bit_count() for mask in bits]
    return form

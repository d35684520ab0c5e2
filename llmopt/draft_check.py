"""What a drafter returned, looked at before it is packed: a step cannot run every guess."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmopt.batch import MAX_DRAFTS, DraftTokens
from llmopt.recovery import WrongResultError

if TYPE_CHECKING:
    from llmopt.request import Request


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

    def __call__(self, drafts: DraftTokens, requests: list[Request], num_scheduled: list[int]) -> list[int]:
        """The number of drafts per request.

        :raises WrongResultError: the step could not run them.
        """
        if not isinstance(drafts, DraftTokens):
            raise WrongResultError("propose", drafts, "DraftTokens or None")
        ids, counts, parents = drafts.token_ids, drafts.num_draft, drafts.parents
        shape = (len(requests), ids.shape[1] if ids.ndim == 2 else -1)
        if ids.shape != shape or counts.shape != shape[:1] or (parents is not None and parents.shape != shape):
            self._refuse(drafts, f"arrays with a row per request, {len(requests)}, and parents shaped as token_ids")
        if ids.dtype != np.int64 or counts.dtype != np.int32:
            self._refuse(drafts, "token_ids as int64 and num_draft as int32")
        numbers: list[int] = counts.tolist()
        for request, count, num_new in zip(requests, numbers, num_scheduled, strict=True):
            if count == 0:
                continue
            who = f"request {request.request_id!r}"
            if not 0 < count <= min(self.max_num_draft, shape[1]):
                self._refuse(drafts, f"up to {min(self.max_num_draft, shape[1])} drafts for {who}, not {count}")
            if request.num_computed_tokens + num_new < request.num_tokens or request.lockstep is not None:
                self._refuse(drafts, f"no drafts for {who}, which chooses no token in this step, or in lockstep")
            if request.num_tokens + count > request.max_len - 1:
                room = max(0, request.max_len - 1 - request.num_tokens)
                self._refuse(drafts, f"up to {room} drafts for {who}, which ends then, not {count}")
        if shape[1]:
            is_real = np.arange(shape[1]) < counts[:, None]
            low, high = ids.min(where=is_real, initial=0), ids.max(where=is_real, initial=0)
            if low < 0 or (self.vocab_size is not None and high >= self.vocab_size):
                self._refuse(drafts, f"ids of the vocabulary, 0 to {(self.vocab_size or 0) - 1}, not {min(low, high)}")
        if parents is not None:
            self._check_trees(drafts, parents, numbers)
        return numbers

    def _check_trees(self, drafts: DraftTokens, parents: np.ndarray, numbers: list[int]) -> None:
        for row, count in enumerate(numbers):
            followed: list[int] = parents[row, :count].tolist()
            if followed == list(range(-1, count - 1)):
                continue  # a chain
            if self.why_no_trees is not None:
                self._refuse(drafts, f"chains: trees cannot be verified, because {self.why_no_trees}")
            for draft, parent in enumerate(followed):
                if not -1 <= parent < draft:
                    self._refuse(drafts, f"parents that come before their drafts; draft {draft} follows {parent}")
            if len(set(zip(followed, drafts.token_ids[row, :count].tolist(), strict=True))) < count:
                self._refuse(drafts, f"drafts that differ where they follow the same token; in row {row} two do not")

    @staticmethod
    def _refuse(drafts: DraftTokens, wanted: str) -> None:
        raise WrongResultError("propose", drafts, f"DraftTokens with {wanted}")

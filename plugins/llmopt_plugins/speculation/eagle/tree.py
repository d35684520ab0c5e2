"""The search for the likeliest drafts: EAGLE-2's dynamic tree, for several requests in step.

Each level asks for the followers of a frontier of ``width`` nodes. All of them join the pool, and the likeliest become
the next frontier::

    level 1   a  b  c         width = 3: the head's best three
    level 2   aa ab ac ba ... the best three of each; of these nine the likeliest three go on
    ...
    at last   the likeliest nodes of the whole pool, in the order of their chances

A node is never likelier than its parent, so the likeliest nodes are a tree however many of them are taken.
"""

from __future__ import annotations

import math

import numpy as np


class DraftTree:
    """Trees of ``R`` requests, which grow a level at a time.

    :param width: nodes that go on at each level.
    """

    def __init__(self, num_requests: int, width: int) -> None:
        self.width = width
        self._rows = np.arange(num_requests)[:, None]
        self._ids: list[np.ndarray] = []  # per level, [R, n] tokens
        self._scores: list[np.ndarray] = []  # [R, n] log of the chance of the path
        self._parents: list[np.ndarray] = []  # [R, n] place in the pool, -1: the newest token
        self._size = 0  # of the pool
        self._frontier = np.zeros((num_requests, 0), dtype=np.int64)  # [R, width] places in the pool
        self._masks = np.zeros((num_requests, 0), dtype=np.uint64)  # [R, width] ancestors among the forwarded nodes
        self.token_ids = np.zeros((num_requests, 0), dtype=np.int64)  # [R, width] of the frontier
        self.scores = np.zeros((num_requests, 0), dtype=np.float32)  # [R, width] of the frontier
        self.origins = np.zeros((num_requests, 0), dtype=np.int64)  # [R, width] frontier before: which node led here
        self._num_forwarded = 0

    def grow(self, token_ids: np.ndarray, log_probs: np.ndarray) -> None:
        """Add the followers of the frontier, and choose the next one.

        :param token_ids: ``[R, frontier, k]``; at the first level the frontier is the newest token alone.
        :param log_probs: the same, each given what it follows.
        """
        num_requests, num_nodes, count = token_ids.shape
        is_first = not self._ids
        if np.isnan(log_probs).any():
            log_probs = np.nan_to_num(log_probs, nan=-np.inf)
        scores = log_probs.copy() if is_first else log_probs + self.scores[:, :, None]  # the head uses its memory again
        parents = np.full_like(token_ids, -1) if is_first else np.broadcast_to(self._frontier[:, :, None], scores.shape)
        flat_ids, flat_scores = token_ids.reshape(num_requests, -1), scores.reshape(num_requests, -1)
        self._ids.append(flat_ids)
        self._scores.append(flat_scores)
        self._parents.append(parents.reshape(num_requests, -1))
        width = min(self.width, num_nodes * count)
        best = np.argsort(-flat_scores, axis=1, kind="stable")[:, :width]
        self.origins = best // count
        self._frontier = self._size + best
        self.token_ids, self.scores = flat_ids[self._rows, best], flat_scores[self._rows, best]
        self._size += num_nodes * count

    def masks(self) -> np.ndarray:
        """Say that the frontier is forwarded now: which of the nodes forwarded so far each sees, ``[R, width]`` uint64.

        A node's own bit is its place among the forwarded nodes of its request, which come level after level.
        """
        width = self.token_ids.shape[1]
        own = np.left_shift(np.uint64(1), np.arange(self._num_forwarded, self._num_forwarded + width, dtype=np.uint64))
        before = self._masks[self._rows, self.origins] if self._num_forwarded else np.uint64(0)
        self._masks = np.broadcast_to(before | own, self.token_ids.shape)
        self._num_forwarded += width
        return self._masks

    def mass(self) -> float:
        """The chances of the nodes that go on, over all requests."""
        return float(np.exp(self.scores.astype(np.float64)).sum())

    def best(self, counts: list[int], least_chance: float = 0.0) -> list[tuple[list[int], list[int], list[float]]]:
        """For each request its likeliest nodes, likeliest first: tokens, parents as indices of the same list, scores.

        :param counts: how many nodes at most.
        :param least_chance: less likely ones are left out.
        """
        ids = np.concatenate(self._ids, axis=1)
        scores = np.concatenate(self._scores, axis=1)
        parents = np.concatenate(self._parents, axis=1)
        order = np.argsort(-scores, axis=1, kind="stable")[:, : max(counts)]  # of equal ones the parent comes first
        rows = self._rows
        id_rows, parent_rows, score_rows = ids[rows, order], parents[rows, order], scores[rows, order]
        found = []
        for row, count in enumerate(counts):
            index_of = {-1: -1}
            row_scores = score_rows[row, :count].tolist()
            count = sum(score > -np.inf and math.exp(score) >= least_chance for score in row_scores)
            for index, place in enumerate(order[row, :count].tolist()):
                index_of[place] = index
            linked = [index_of[parent] for parent in parent_rows[row, :count].tolist()]
            found.append((id_rows[row, :count].tolist(), linked, row_scores[:count]))
        return found

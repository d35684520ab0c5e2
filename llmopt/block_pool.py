"""Ids of the KV blocks: which are free, and how many requests hold each."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class BlockPool:
    """Reference-counted block ids. Knows nothing of tensors; `KVCache` holds those.

    Invariant: a block is in the free list exactly when its reference count is 0.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size  # tokens per block
        self.ref_counts = np.zeros(num_blocks, dtype=np.int32)
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is warm in cache

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - len(self._free)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens take."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks off the free list. The caller checks `num_free` first."""
        assert num_blocks <= len(self._free), "allocate() was called without checking num_free"
        if num_blocks == 0:
            return []
        blocks = self._free[-num_blocks:]
        del self._free[-num_blocks:]
        blocks.reverse()
        for block in blocks:
            self.ref_counts[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks once more."""
        for block in blocks:
            assert self.ref_counts[block] > 0, "a free block cannot be shared"
            self.ref_counts[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back; those that nobody else holds return to the free list."""
        for block in blocks:
            assert self.ref_counts[block] > 0, "a block was freed twice"
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self._free.append(block)

    def check(self) -> None:
        """Raise `AssertionError` when the invariant is broken."""
        assert len(set(self._free)) == len(self._free), "a block is in the free list twice"
        assert all(self.ref_counts[b] == 0 for b in self._free), "a block in the free list is held"
        assert int((self.ref_counts == 0).sum()) == len(self._free), "a block is held by nobody and not free"

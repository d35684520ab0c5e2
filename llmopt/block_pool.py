"""Ids of the KV blocks: which are free, how many requests hold each, and which are kept for their content."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from llmopt import native
from llmopt.plain_blocks import PlainBlocks

GIVEN_BACK = -1  # in a block table: the block of tokens that no layer sees any more

EvictListener = Callable[[list[int], list[bytes]], None]


class BlockPool:
    """Reference-counted block ids. Knows nothing of tensors; `KVCache` holds those.

    A block may be given a key that stands for its content. When nobody holds such a block any more, it is kept and can
    be found by its key, until `allocate` runs out of other blocks. Then it is evicted: first those that were used once,
    least recently used first; then those that were shared or found again.

    Invariant: a block is in the free list or among the kept ones exactly when its reference count is 0, and a key finds
    the one block that has it.

    :param block_size: tokens per block.
    :param is_native: whether the compiled core does the bookkeeping; None: when there is one.
    """

    def __init__(self, num_blocks: int, block_size: int, is_native: bool | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        core = native.core() if is_native is not False else None
        if is_native and core is None:
            raise ImportError(f"the pool was to be native, but {native.why_not()}")
        self._blocks: Any = PlainBlocks(num_blocks) if core is None else core.BlockPool(num_blocks)
        self.ref_counts: np.ndarray = self._blocks.ref_counts  # [num_blocks] int32
        self.on_evict: list[EvictListener] = []  # called with blocks and keys while the content is still there
        self.num_evicted = 0  # since the pool was made

    @property
    def native_pool(self) -> Any:
        """The extension's pool, for native code that looks at it; None when the bookkeeping is plain."""
        return None if isinstance(self._blocks, PlainBlocks) else self._blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds: empty ones, and kept ones that `allocate` may evict."""
        return int(self._blocks.num_unused + self._blocks.num_kept)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.num_free

    @property
    def num_kept(self) -> int:
        """Blocks that nobody holds and whose content can be found by its key."""
        return int(self._blocks.num_kept)

    @property
    def num_keys(self) -> int:
        """Blocks with a key, held or not."""
        return int(self._blocks.num_keys)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens take."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take empty blocks, and evict kept ones when those are not enough. The caller checks `num_free` first.

        Whoever is in `on_evict` is told before, and must not call the pool's `allocate`, `share` or `free`.
        """
        missing = num_blocks - self._blocks.num_unused
        if missing > 0:
            assert missing <= self._blocks.num_kept, "allocate() was called without checking num_free"
            self.evict(missing)
        blocks: list[int] = self._blocks.allocate(num_blocks)
        return blocks

    def evict(self, num_blocks: int) -> None:
        """Empty kept blocks, the least valuable first."""
        blocks, keys = self._blocks.evict(num_blocks)
        self.num_evicted += len(blocks)
        for listener in self.on_evict:
            listener(blocks, keys)

    def share(self, blocks: Sequence[int]) -> None:
        """Hold blocks once more; kept ones are held again."""
        self._blocks.share(blocks)

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back; those that nobody else holds are kept if they have a key, and free otherwise.

        Of the kept ones the last is evicted first: blocks of a sequence are given in order, and a later block is of no
        use without those before it.
        """
        self._blocks.free(blocks)

    def sort_free(self) -> None:
        """Put the empty blocks in order, so that the next ones taken are neighbours in memory."""
        self._blocks.sort_unused()

    def set_key(self, block: int, key: bytes) -> bool:
        """Give a held block a key of 16 bytes. Returns False, and changes nothing, when another block has this key."""
        return bool(self._blocks.set_key(block, key))

    def drop_key(self, block: int) -> None:
        """Take the key from a block, if it has one: its content cannot be found any more."""
        self._blocks.drop_key(block)

    def key_of(self, block: int) -> bytes | None:
        """The key of a block, if it has one."""
        key: bytes | None = self._blocks.key_of(block)
        return key

    def find(self, keys: bytes) -> list[int]:
        """The blocks of the first keys, 16 bytes each, up to the first key that no block has. Holds nothing."""
        blocks: list[int] = self._blocks.find(keys)
        return blocks

    def free_blocks(self) -> list[int]:
        """Blocks that nobody holds and that hold nothing."""
        blocks: list[int] = self._blocks.unused()
        return blocks

    def kept_blocks(self) -> list[int]:
        """Blocks that are kept, in the order in which they would be evicted."""
        blocks: list[int] = self._blocks.kept()
        return blocks

    def check(self) -> None:
        """Raise `AssertionError` when the invariant is broken."""
        wrong: str = self._blocks.error()
        assert not wrong, wrong

"""The states of KV blocks in plain Python: the reference of ``llmopt._core.BlockPool``, and its stand-in without it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

_KEY_BYTES = 16


class PlainBlocks:
    """Blocks that are held, unused, or kept for their content. The interface is that of ``llmopt._core.BlockPool``."""

    def __init__(self, num_blocks: int) -> None:
        self.ref_counts = np.zeros(num_blocks, dtype=np.int32)
        self._unused = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is warm in cache
        self._once: OrderedDict[int, None] = OrderedDict()  # kept, used once; oldest first
        self._reused: OrderedDict[int, None] = OrderedDict()  # kept, used again
        self._max_reused = num_blocks - num_blocks // 5
        self._keys: dict[int, bytes] = {}
        self._index: dict[bytes, int] = {}
        self._was_reused: set[int] = set()

    @property
    def num_unused(self) -> int:
        """Blocks that nobody holds and that hold nothing."""
        return len(self._unused)

    @property
    def num_kept(self) -> int:
        """Blocks that nobody holds, with a key."""
        return len(self._once) + len(self._reused)

    @property
    def num_keys(self) -> int:
        """Blocks with a key, held or not."""
        return len(self._keys)

    def allocate(self, count: int) -> list[int]:
        """Take unused blocks, those freed last first."""
        assert 0 <= count <= len(self._unused), "allocate() was called without checking num_free"
        if count == 0:
            return []
        blocks = self._unused[-count:]
        del self._unused[-count:]
        blocks.reverse()
        for block in blocks:
            self.ref_counts[block] = 1
        return blocks

    def evict(self, count: int) -> tuple[list[int], list[bytes]]:
        """Make the least valuable kept blocks unused; return them and the keys that they had."""
        assert 0 <= count <= self.num_kept, "more blocks were to be evicted than are kept"
        blocks = [*self._once, *self._reused][:count]
        keys = [self._keys[block] for block in blocks]
        for block in blocks:
            self.drop_key(block)
        return blocks, keys

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks once more."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                assert block in self._once or block in self._reused, "a free block cannot be shared"
                self._once.pop(block, None)
                self._reused.pop(block, None)
            self.ref_counts[block] += 1
            if block in self._keys:
                self._was_reused.add(block)

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back; of those with keys, the first of the call is evicted last."""
        kept: list[int] = []
        for block in blocks:
            assert self.ref_counts[block] > 0, "a block was freed twice"
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                (kept if block in self._keys else self._unused).append(block)
        for block in reversed(kept):
            (self._reused if block in self._was_reused else self._once)[block] = None
        while len(self._reused) > self._max_reused:
            block, _ = self._reused.popitem(last=False)
            self._was_reused.discard(block)
            self._once[block] = None

    def sort_unused(self) -> None:
        """Put unused blocks in order, so that the next ones taken are neighbours."""
        self._unused.sort(reverse=True)

    def set_key(self, block: int, key: bytes) -> bool:
        """Give a held block a key; False when another block has it."""
        if len(key) != _KEY_BYTES:
            raise ValueError(f"a key has 16 bytes, found {len(key)}.")
        assert self.ref_counts[block] > 0, "a block that nobody holds cannot be given a key"
        assert block not in self._keys, "the block has a key already"
        if key in self._index:
            return False
        self._index[key], self._keys[block] = block, key
        self._was_reused.discard(block)
        return True

    def drop_key(self, block: int) -> None:
        """Take the key from a block, if it has one."""
        key = self._keys.pop(block, None)
        if key is None:
            return
        del self._index[key]
        self._was_reused.discard(block)
        if block in self._once or block in self._reused:
            self._once.pop(block, None)
            self._reused.pop(block, None)
            self._unused.append(block)

    def key_of(self, block: int) -> bytes | None:
        """The key of a block."""
        return self._keys.get(block)

    def find(self, keys: bytes) -> list[int]:
        """The blocks of the first keys, up to the first that no block has."""
        if len(keys) % _KEY_BYTES:
            raise ValueError(f"keys have 16 bytes each, found {len(keys)} together.")
        blocks = []
        for start in range(0, len(keys), _KEY_BYTES):
            block = self._index.get(keys[start : start + _KEY_BYTES])
            if block is None:
                break
            blocks.append(block)
        return blocks

    def unused(self) -> list[int]:
        """The stack of unused blocks."""
        return list(self._unused)

    def kept(self) -> list[int]:
        """Kept blocks in the order in which they would be evicted."""
        return [*self._once, *self._reused]

    def error(self) -> str:
        """What is wrong with the state, or nothing."""
        kept = self.kept()
        places = [*self._unused, *kept]
        held = self.ref_counts > 0
        wrongs = {
            "a block is in the free list twice": len(set(self._unused)) != len(self._unused),
            "a block in the free list is held": any(held[b] for b in self._unused),
            "a block in the free list has a key": any(b in self._keys for b in self._unused),
            "a block is free and kept": len(set(places)) != len(places),
            "a kept block is held": any(held[b] for b in kept),
            "a kept block has no key": any(b not in self._keys for b in kept),
            "too many blocks are kept as used again": len(self._reused) > self._max_reused,
            "a block is held by nobody and not free": int((~held).sum()) != len(places),
            "the index does not find a block by its key": any(self._index.get(k) != b for b, k in self._keys.items()),
            "the index holds keys that no block has": len(self._index) != len(self._keys),
        }
        return next((wrong for wrong, is_so in wrongs.items() if is_so), "")

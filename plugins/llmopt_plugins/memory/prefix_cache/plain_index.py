"""What cached blocks hold, in plain Python: reference of ``llmopt._core.PrefixIndex``, and its stand-in without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmopt_plugins.memory.prefix_cache.chain import DIGEST_BYTES, KEY_BYTES, strong_hash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmopt.block_pool import BlockPool

_MAX_COMPARED = 64  # followers that are compared with the part of a block that is left


class PlainIndex:
    """Tokens of blocks, and which block each of them follows. The interface is that of ``llmopt._core.PrefixIndex``.

    Every entry has a serial number of its own and that of the entry before it; at the beginning of a sequence stands
    the number of a salt.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.tokens = np.full((pool.num_blocks, block_size), -1, dtype=np.int32)  # -1 behind the end of a part
        self.digests = np.zeros((pool.num_blocks, DIGEST_BYTES), dtype=np.uint8)  # they stay when a block is forgotten
        self.is_durable = np.zeros(pool.num_blocks, dtype=np.bool_)  # likewise
        self.serials = np.zeros(pool.num_blocks, dtype=np.int64)  # 0: not entered
        self.parents = np.zeros(pool.num_blocks, dtype=np.int64)  # serial number of what a block follows
        self.num_collisions = 0
        self._followers: dict[int, dict[int, None]] = {}  # serial number -> blocks, oldest first
        self._last_serial = 0

    def new_serial(self) -> int:
        """A number that no entry has, for a salt."""
        self._last_serial += 1
        return self._last_serial

    def hash_blocks(self, last: bytes, ids: np.ndarray) -> bytes:
        """Digests of full blocks of tokens; each is over ``last``, the one before it, and the ids as 32 bits."""
        size = 4 * self.block_size
        data = ids[: ids.size // self.block_size * self.block_size].astype(np.int32).tobytes()
        digests = bytearray()
        for place in range(0, len(data), size):
            last = strong_hash(last + data[place : place + size])
            digests += last
        return bytes(digests)

    def match(self, root: int, keys: bytes, ids: np.ndarray) -> list[int]:
        """The blocks of the first keys whose tokens are these ids, up to the first that is missing or wrong.

        Holds nothing.
        """
        size = self.block_size
        if ids.size < len(keys) // KEY_BYTES * size:
            raise ValueError("there are more keys than blocks of ids")
        blocks = []
        for place, block in enumerate(self.pool.find(keys)):
            if not (self.tokens[block] == ids[place * size : (place + 1) * size]).all():
                self.num_collisions += 1
                break
            if self.parents[block] != root:
                break
            root = int(self.serials[block])
            blocks.append(block)
        return blocks

    def match_part(self, serial: int, ids: np.ndarray) -> tuple[int, int]:
        """The block after an entry that begins with the most of these ids, the oldest of equals, and how many."""
        followers = self.followers(serial)[-_MAX_COMPARED:]
        if not followers or not ids.size:
            return -1, 0
        ids = ids[: self.block_size]
        is_other = self.tokens[followers][:, : ids.size] != ids
        lengths = np.where(is_other.any(axis=1), is_other.argmax(axis=1), ids.size)
        best = int(lengths.argmax())
        return followers[best], int(lengths[best])

    def enter(
        self, blocks: Sequence[int], ids: np.ndarray, keys: bytes, digests: bytes, serial: int, is_durable: bool
    ) -> tuple[int, int]:
        """Enter held blocks, one behind the other, after the entry ``serial``.

        For a content that was entered before, that entry stands. Stops at a block that is no block (negative), and at
        one whose key another content has: what follows could not be told from what follows that one.

        :returns: how many were entered, and the serial number of the last one.
        """
        size = self.block_size
        if min(len(keys) // KEY_BYTES, len(digests) // DIGEST_BYTES, ids.size // size) < len(blocks):
            raise ValueError("there are more blocks than keys, digests or blocks of ids")
        for count, block in enumerate(blocks):
            if block < 0:
                return count, serial
            key = keys[count * KEY_BYTES : (count + 1) * KEY_BYTES]
            entered = self._enter(block, ids[count * size : (count + 1) * size], key, serial)
            if not entered:
                return count, serial
            if self.serials[block] == entered:
                digest = digests[count * DIGEST_BYTES : (count + 1) * DIGEST_BYTES]
                self.digests[block] = np.frombuffer(digest, dtype=np.uint8)
                self.is_durable[block] = is_durable
            serial = entered
        return len(blocks), serial

    def enter_part(self, block: int, ids: np.ndarray, key: bytes, serial: int) -> None:
        """Enter a block that is not full, for `match_part` alone."""
        if ids.size > self.block_size:
            raise ValueError("a part is longer than a block")
        self._enter(block, ids, key, serial)

    def _enter(self, block: int, ids: np.ndarray, key: bytes, parent: int) -> int:
        """The serial number of this content; 0 when another content has this key."""
        padded = np.full(self.block_size, -1, dtype=np.int32)
        padded[: ids.size] = ids
        if not self.serials[block] and self.pool.set_key(block, key):
            serial = self.new_serial()
            self.tokens[block], self.serials[block], self.parents[block] = padded, serial, parent
            self._followers.setdefault(parent, {})[block] = None
            return serial
        found = self.pool.find(key)
        if not found:
            return 0
        if self.parents[found[0]] == parent and (self.tokens[found[0]] == padded).all():
            return int(self.serials[found[0]])
        self.num_collisions += 1
        return 0

    def forget(self, blocks: Sequence[int]) -> None:
        """Forget blocks; those that were not entered are left alone."""
        for block in blocks:
            parent, serial = int(self.parents[block]), int(self.serials[block])
            if not serial:
                continue
            siblings = self._followers.get(parent)
            if siblings is not None:
                siblings.pop(block, None)
                if not siblings:
                    del self._followers[parent]
            self._followers.pop(serial, None)
            self.serials[block] = 0

    def followers(self, serial: int) -> list[int]:
        """Blocks that follow an entry or a salt, oldest first."""
        return list(self._followers.get(serial, ()))

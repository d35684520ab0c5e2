"""What cached blocks hold: their tokens, and which block each of them follows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from llmopt.block_pool import GIVEN_BACK
from llmopt_plugins.memory.prefix_cache.chain import (
    DIGEST_BYTES,
    KEY_BYTES,
    NEVER,
    Chain,
    key_of,
    strong_hash,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmopt.block_pool import BlockPool
    from llmopt.request import Request

_MAX_CANDIDATES = 64  # blocks that are compared with the part of a block that is left


class BlockIndex:
    """Finds cached blocks by the chained hash of their tokens, and believes it only when the tokens are the same.

    Every entry has a serial number of its own and that of the entry before it. A block counts as found when its key is
    right, its tokens are right and it follows the block found before it. So by induction the whole prefix is right,
    whatever the hash does.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.make_key: Callable[[bytes], bytes] = key_of
        self.on_clear: list[Callable[[], None]] = []  # called when everything that was computed is wrong
        self.tokens = np.full((pool.num_blocks, pool.block_size), -1, dtype=np.int32)
        self.digests = np.zeros((pool.num_blocks, DIGEST_BYTES), dtype=np.uint8)  # they stay when a block is evicted
        self.is_durable = np.zeros(pool.num_blocks, dtype=np.bool_)
        self.serials = np.zeros(pool.num_blocks, dtype=np.int64)  # 0: not entered
        self.parents = np.zeros(pool.num_blocks, dtype=np.int64)  # serial of the block before, or of the salt
        self.children: dict[int, dict[int, None]] = {}  # serial -> blocks that follow it, oldest first
        self.roots: dict[bytes, int] = {}  # salt -> serial
        self.chains: dict[Request, Chain] = {}
        self.num_collisions = 0  # equal keys of different contents
        self._last_serial = 0
        pool.on_evict.append(self._on_evict)

    # -- chains -------------------------------------------------------------------------------------------------------
    def new_chain(self, salt: bytes) -> Chain:
        """A chain that has no keys yet."""
        root = self.roots.get(salt)
        if root is None:
            root = self.roots[salt] = self._new_serial()
        return Chain(seed=strong_hash(salt), root=root, serial=root)

    def _new_serial(self) -> int:
        self._last_serial += 1
        return self._last_serial

    # -- finding ------------------------------------------------------------------------------------------------------
    def match(self, chain: Chain, request: Request, limit: int) -> list[int]:
        """The cached blocks of a request's first tokens, in order; none of them reaches beyond ``limit`` tokens.

        Holds nothing.
        """
        size = self.pool.block_size
        chain.extend(request.token_ids[: request.num_tokens], size, self.make_key)
        blocks = self.pool.find(bytes(chain.keys[: limit // size * KEY_BYTES]))
        if not blocks:
            return blocks
        table = np.array(blocks)
        serials = self.serials[table]
        wanted = request.token_ids[: len(blocks) * size].reshape(len(blocks), size)
        is_right = (self.tokens[table] == wanted).all(axis=1)
        is_right[0] &= self.parents[table[0]] == chain.root
        is_right[1:] &= self.parents[table[1:]] == serials[:-1]
        if is_right.all():
            return blocks
        count = int(is_right.argmin())
        self.num_collisions += int(not (self.tokens[table[count]] == wanted[count]).all())
        return blocks[:count]

    def match_part(self, serial: int, wanted: np.ndarray) -> tuple[int, int]:
        """The block after ``serial`` that begins with the most of ``wanted``; its id and how many tokens are the same.

        :param wanted: ids, at most a block of them.
        """
        followers = list(self.children.get(serial, ()))[-_MAX_CANDIDATES:]
        if not followers or not wanted.size:
            return -1, 0
        is_other = self.tokens[followers][:, : wanted.size] != wanted
        lengths = np.where(is_other.any(axis=1), is_other.argmax(axis=1), wanted.size)
        best = int(lengths.argmax())
        return followers[best], int(lengths[best])

    # -- entering -----------------------------------------------------------------------------------------------------
    def enter(self, request: Request, chain: Chain) -> None:
        """Enter the full blocks that have been computed since the last call."""
        size, table = self.pool.block_size, request.block_table
        end = min(request.num_computed_tokens // size, len(table))
        chain.extend(request.token_ids[: end * size], size, self.make_key)
        while chain.num_entered < end:
            place = chain.num_entered
            ids = request.token_ids[place * size : (place + 1) * size]
            if table[place] == GIVEN_BACK or not self.enter_block(chain, table[place], ids):
                chain.next_end = NEVER
                return
        chain.next_end = (end + 1) * size

    def enter_part(self, request: Request, chain: Chain) -> None:
        """Enter the last block of a request that ends, which is not full; only `match_part` finds it."""
        size, end = self.pool.block_size, request.num_computed_tokens
        place = end // size
        if (
            end % size == 0
            or chain.num_entered != place
            or chain.next_end == NEVER
            or place >= len(request.block_table)
        ):
            return
        block = request.block_table[place]
        if self.pool.ref_counts[block] != 1 or self.serials[block]:
            return
        ids = request.token_ids[place * size : end].astype(np.int32)
        digest = strong_hash(bytes(chain.digests[: place * DIGEST_BYTES][-DIGEST_BYTES:]) + chain.seed + ids.tobytes())
        padded = np.full(size, -1, dtype=np.int32)
        padded[: ids.size] = ids
        self._enter(block, self.make_key(digest), padded, chain.serial)

    def enter_block(self, chain: Chain, block: int, ids: np.ndarray) -> bool:
        """Enter a held block as the next one of a chain, or find the one with the same content that was entered before.

        :returns: False when another content has this key: what follows could not be told from what follows that one.
        """
        place = chain.num_entered
        key = bytes(chain.keys[place * KEY_BYTES : (place + 1) * KEY_BYTES])
        serial = self._enter(block, key, ids, chain.serial)
        if not serial:
            return False
        if self.serials[block] == serial:
            digest = chain.digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES]
            self.digests[block] = np.frombuffer(digest, dtype=np.uint8)
            self.is_durable[block] = chain.is_durable
        chain.serial = serial
        chain.num_entered += 1
        return True

    def _enter(self, block: int, key: bytes, ids: np.ndarray, parent: int) -> int:
        """The serial number of this content; 0 when another content has this key."""
        if not self.serials[block] and self.pool.set_key(block, key):
            serial = self._new_serial()
            self.tokens[block], self.serials[block], self.parents[block] = ids, serial, parent
            self.children.setdefault(parent, {})[block] = None
            return serial
        found = self.pool.find(key)
        if found and self.parents[found[0]] == parent and (self.tokens[found[0]] == ids).all():
            return int(self.serials[found[0]])
        self.num_collisions += bool(found)
        return 0

    # -- forgetting ---------------------------------------------------------------------------------------------------
    def forget(self, block: int) -> None:
        """Make a block one that cannot be found."""
        if self.serials[block]:
            self.pool.drop_key(block)
            self._on_evict([block], [])

    def clear(self) -> None:
        """Forget every block. Requests that hold some keep them."""
        for block in np.flatnonzero(self.serials).tolist():
            self.forget(block)
        for listener in self.on_clear:
            listener()
        for chain in self.chains.values():
            chain.next_end = NEVER  # what they hold was computed with what is no longer true

    def _on_evict(self, blocks: list[int], keys: list[bytes]) -> None:
        children, parents, serials = self.children, self.parents, self.serials
        for block in blocks:
            parent, serial = int(parents[block]), int(serials[block])
            siblings = children.get(parent)
            if siblings is not None:
                siblings.pop(block, None)
                if not siblings:
                    del children[parent]
            children.pop(serial, None)
            serials[block] = 0

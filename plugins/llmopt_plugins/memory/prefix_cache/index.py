"""Requests' blocks among the cached ones: found again, entered, forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from llmopt import native
from llmopt_plugins.memory.prefix_cache.chain import (
    DIGEST_BYTES,
    KEY_BYTES,
    NEVER,
    Chain,
    key_of,
    strong_hash,
)
from llmopt_plugins.memory.prefix_cache.plain_index import PlainIndex

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmopt.block_pool import BlockPool
    from llmopt.request import Request


class BlockIndex:
    """Finds cached blocks by the chained hash of their tokens, and believes it only when the tokens are the same.

    Every entry has a serial number of its own and that of the entry before it. A block counts as found when its key is
    right, its tokens are right and it follows the block found before it. So by induction the whole prefix is right,
    whatever the hash does. What is noted of blocks is native where the pool is.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.make_key: Callable[[bytes], bytes] = key_of
        self.on_clear: list[Callable[[], None]] = []  # called when everything that was computed is wrong
        self.roots: dict[bytes, tuple[bytes, int]] = {}  # salt -> its hash, and its serial number
        self.chains: dict[Request, Chain] = {}
        core = None if pool.native_pool is None else native.core()
        self._contents: Any = (
            PlainIndex(pool, pool.block_size) if core is None else core.PrefixIndex(pool.native_pool, pool.block_size)
        )
        self.tokens: np.ndarray = self._contents.tokens  # [num_blocks, block_size] int32, -1 behind the end of a part
        self.digests: np.ndarray = self._contents.digests  # [num_blocks, 32]; they stay when a block is evicted
        self.is_durable: np.ndarray = self._contents.is_durable  # [num_blocks]; likewise
        self.serials: np.ndarray = self._contents.serials  # [num_blocks]; 0: not entered
        self.parents: np.ndarray = self._contents.parents  # [num_blocks] of the block before, or of the salt
        pool.on_evict.append(lambda blocks, keys: self._contents.forget(blocks))

    @property
    def num_collisions(self) -> int:
        """How often equal keys of different contents were met."""
        return int(self._contents.num_collisions)

    def followers(self, serial: int) -> list[int]:
        """Blocks that follow an entry or a salt, oldest first."""
        blocks: list[int] = self._contents.followers(serial)
        return blocks

    # -- chains -------------------------------------------------------------------------------------------------------
    def new_chain(self, salt: bytes) -> Chain:
        """A chain that has no keys yet."""
        known = self.roots.get(salt)
        if known is None:
            known = self.roots[salt] = strong_hash(salt), self._contents.new_serial()
        seed, root = known
        return Chain(seed=seed, root=root, serial=root)

    def extend(self, chain: Chain, token_ids: np.ndarray) -> None:
        """Compute digests and keys of all full blocks of these first tokens, where the chain lacks them.

        :param token_ids: int64.
        """
        start, size = len(chain.digests) // DIGEST_BYTES, self.pool.block_size
        if start >= token_ids.size // size:
            return
        last = bytes(chain.digests[-DIGEST_BYTES:]) or chain.seed
        digests: bytes = self._contents.hash_blocks(last, token_ids[start * size :])
        make_key = self.make_key
        chain.digests += digests
        chain.keys += b"".join(
            [make_key(digests[at : at + DIGEST_BYTES]) for at in range(0, len(digests), DIGEST_BYTES)]
        )

    # -- finding ------------------------------------------------------------------------------------------------------
    def match(self, chain: Chain, request: Request, limit: int) -> list[int]:
        """The cached blocks of a request's first tokens, in order; none of them reaches beyond ``limit`` tokens.

        Holds nothing.
        """
        token_ids = request.token_ids[: request.num_tokens]
        self.extend(chain, token_ids)
        keys = bytes(chain.keys[: limit // self.pool.block_size * KEY_BYTES])
        blocks: list[int] = self._contents.match(chain.root, keys, token_ids)
        return blocks

    def match_part(self, serial: int, wanted: np.ndarray) -> tuple[int, int]:
        """The block after ``serial`` that begins with the most of ``wanted``; its id and how many tokens are the same.

        :param wanted: ids, int64, at most a block of them.
        """
        found: tuple[int, int] = self._contents.match_part(serial, wanted)
        return found

    # -- entering -----------------------------------------------------------------------------------------------------
    def enter(self, request: Request, chain: Chain) -> None:
        """Enter the full blocks that have been computed since the last call."""
        size, table = self.pool.block_size, request.block_table
        end = min(request.num_computed_tokens // size, len(table))
        self.extend(chain, request.token_ids[: end * size])
        blocks = table[chain.num_entered : end]  # one that was given back is negative, and ends it
        is_whole = self.enter_blocks(chain, blocks, request.token_ids[chain.num_entered * size : end * size])
        chain.next_end = (end + 1) * size if is_whole else NEVER

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
        ids = request.token_ids[place * size : end]
        before = bytes(chain.digests[: place * DIGEST_BYTES][-DIGEST_BYTES:])
        digest = strong_hash(before + chain.seed + ids.astype(np.int32).tobytes())
        self._contents.enter_part(block, ids, self.make_key(digest), chain.serial)

    def enter_blocks(self, chain: Chain, blocks: list[int], token_ids: np.ndarray) -> bool:
        """Enter held blocks as the next ones of a chain, or find those with the same content that were entered before.

        :param token_ids: int64, those of the blocks.
        :returns: False when another content has the key of one of them: what follows it could not be told from what
            follows that one, and is not entered.
        """
        first, end = chain.num_entered, chain.num_entered + len(blocks)
        keys = bytes(chain.keys[first * KEY_BYTES : end * KEY_BYTES])
        digests = bytes(chain.digests[first * DIGEST_BYTES : end * DIGEST_BYTES])
        count, chain.serial = self._contents.enter(blocks, token_ids, keys, digests, chain.serial, chain.is_durable)
        chain.num_entered += count
        return bool(count == len(blocks))

    # -- forgetting ---------------------------------------------------------------------------------------------------
    def forget(self, block: int) -> None:
        """Make a block one that cannot be found."""
        if self.serials[block]:
            self.pool.drop_key(block)
            self._contents.forget([block])

    def clear(self) -> None:
        """Forget every block. Requests that hold some keep them."""
        for block in np.flatnonzero(self.serials).tolist():
            self.forget(block)
        for listener in self.on_clear:
            listener()
        for chain in self.chains.values():
            chain.next_end = NEVER  # what they hold was computed with what is no longer true

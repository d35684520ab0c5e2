"""The chained keys of a request's full blocks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

DIGEST_BYTES = 32
KEY_BYTES = 16
NEVER = 1 << 62


def strong_hash(data: bytes) -> bytes:
    """BLAKE2b, 256 bits."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def key_of(digest: bytes) -> bytes:
    """The part of a digest under which the pool finds a block."""
    return digest[:KEY_BYTES]


@dataclass(slots=True, eq=False)
class Chain:
    """What the cache knows of one request."""

    seed: bytes  # the hash of the salt; stands before the first block
    root: int  # serial number of the salt
    is_durable: bool = True  # whether its digests mean the same after a restart; those with an adapter do not
    digests: bytearray = field(default_factory=bytearray)  # of full blocks, in order, 32 bytes each
    keys: bytearray = field(default_factory=bytearray)  # 16 bytes each
    num_entered: int = 0  # leading blocks that stand in the index
    serial: int = 0  # of the last one that does
    next_end: int = NEVER  # tokens that must be computed until another block can be entered
    num_found: int = -1  # tokens that `lookup` found; -1: not asked
    num_foreign: int = NEVER  # leading blocks that others had entered when it was first asked
    has_failed: bool = False  # it was looked up and could not start
    awaited: tuple[object, int, int] | None = None  # whom it waits for, that one's progress, and how often in vain

    def reset(self) -> None:
        """Hold nothing any more; the keys stay true, because tokens are only added."""
        self.num_entered, self.num_found = 0, -1
        self.serial = self.root
        self.next_end = NEVER

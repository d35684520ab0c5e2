"""KV blocks in a file: records of one size, each with checksums, found again after a restart."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import zlib
from collections import OrderedDict
from pathlib import Path

import numpy as np

from llmopt.errors import LlmoptError

_MAGIC = b"llmopt kv blocks 1\n"
_HEAD = struct.Struct("<32sQII")  # digest, number of the write, checksum of the payload, checksum of the head before it
_FIRST = 4096  # bytes before the first record


class BlockFileError(LlmoptError, OSError):
    """The file cannot be used."""


class BlockFile:
    """Records in slots; the oldest one makes room for a new one.

    A record is written head last, and its head has a checksum of its own and one of tokens and KV. So a record that was
    torn by a crash, or damaged later, is not found, or found out when it is read.

    :param path: made when it is not there. Another process must not have it open.
    :param identity: stands for the model and the form of the records; a file of another one is started anew.
    :param num_ids: tokens of a block.
    :param num_bytes: KV bytes of a block.
    :param max_bytes: of the file.
    :raises BlockFileError: another process uses it, or it cannot be written.
    """

    def __init__(self, path: Path, identity: str, num_ids: int, num_bytes: int, max_bytes: int) -> None:
        self.path = path
        self.num_ids, self.num_bytes = num_ids, num_bytes
        self._record = _HEAD.size + 4 * num_ids + num_bytes
        self.num_slots = max(0, max_bytes - _FIRST) // self._record
        self.slots: OrderedDict[bytes, int] = OrderedDict()  # digest -> slot, least recently used first
        self.num_damaged = 0
        self._number = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BlockFileError(f"the file for KV blocks, {path}, cannot be opened: {error}.") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._file)
            raise BlockFileError(f"another process uses {path}. Give each process a folder of its own.") from error
        first = (_MAGIC + f"{identity} {num_ids} {num_bytes}\n".encode()).ljust(_FIRST, b"\0")
        try:
            if os.pread(self._file, _FIRST, 0) == first:
                self._find_records()
            else:
                os.ftruncate(self._file, 0)
                if os.pwrite(self._file, first, 0) < _FIRST:
                    raise OSError(errno.ENOSPC, "only a part of the first page was written")
        except OSError as error:
            self.close()
            raise BlockFileError(f"the file for KV blocks, {path}, cannot be written: {error}.") from error
        self._free = sorted(set(range(self.num_slots)) - set(self.slots.values()), reverse=True)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.slots

    def __len__(self) -> int:
        return len(self.slots)

    def put(self, digest: bytes, ids: np.ndarray, payload: np.ndarray) -> None:
        """Write one block.

        :param ids: its tokens, ``[num_ids]`` int32.
        :param payload: its KV, ``[num_bytes]`` uint8.
        """
        if digest in self.slots or not self.num_slots:
            return
        slot = self._free.pop() if self._free else self.slots.popitem(last=False)[1]
        place = _FIRST + slot * self._record
        tokens = ids.astype(np.int32).tobytes()
        self._number += 1
        head = struct.pack("<32sQI", digest, self._number, zlib.crc32(payload.data, zlib.crc32(tokens)))
        try:
            os.pwrite(self._file, bytes(_HEAD.size), place)  # the old record ends before its bytes change
            os.pwritev(self._file, [tokens, payload.data], place + _HEAD.size)
            os.pwrite(self._file, head + struct.pack("<I", zlib.crc32(head)), place)
        except OSError:  # the disk is full or gone; what is in the pool and in memory is still there
            self._free.append(slot)
            self.num_damaged += 1
            return
        self.slots[digest] = slot

    def get(self, digest: bytes, ids: np.ndarray) -> np.ndarray | None:
        """The KV of a block, ``[num_bytes]`` uint8; None when it is not there, is damaged, or has other tokens."""
        slot = self.slots.get(digest)
        if slot is None:
            return None
        place = _FIRST + slot * self._record
        try:
            data = os.pread(self._file, self._record, place)
        except OSError:
            data = b""
        found = self._head(data, len(data) == self._record)
        body = memoryview(data)[_HEAD.size :]
        if found is None or found[0] != digest or zlib.crc32(body) != found[2]:
            del self.slots[digest]
            self._free.append(slot)
            self.num_damaged += 1
            return None
        if bytes(body[: 4 * self.num_ids]) != ids.astype(np.int32).tobytes():
            return None
        self.slots.move_to_end(digest)
        return np.frombuffer(body, dtype=np.uint8, offset=4 * self.num_ids)

    def drop(self, digest: bytes) -> None:
        """Forget one record, also after a restart."""
        slot = self.slots.pop(digest, None)
        if slot is not None:
            os.pwrite(self._file, bytes(_HEAD.size), _FIRST + slot * self._record)
            self._free.append(slot)

    def close(self) -> None:
        """Let go of the file; its records stay."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _find_records(self) -> None:
        found: list[tuple[int, bytes, int]] = []
        size = os.fstat(self._file).st_size
        for slot in range(min(self.num_slots, max(0, size - _FIRST) // self._record)):
            data = os.pread(self._file, _HEAD.size, _FIRST + slot * self._record)
            head = self._head(data, True)
            if head is not None:
                found.append((head[1], head[0], slot))
        for number, digest, slot in sorted(found):
            self.slots.pop(digest, None)
            self.slots[digest] = slot
            self._number = number

    def _head(self, data: bytes, is_whole: bool) -> tuple[bytes, int, int] | None:
        if not is_whole or len(data) < _HEAD.size:
            return None
        digest, number, checksum, own = _HEAD.unpack_from(data)
        return (digest, number, checksum) if own == zlib.crc32(data[: _HEAD.size - 4]) else None

"""Memory given back to the system once the weights are packed."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

_DONT_NEED = getattr(mmap, "MADV_DONTNEED", None)


@dataclass(frozen=True, slots=True)
class Mapping:
    """One range of addresses of this process."""

    begin: int
    end: int
    file: str  # "" when it belongs to none
    resident_bytes: int
    own_bytes: int  # pages that are no longer those of the file, because somebody wrote to them


def mappings(smaps: Path = Path("/proc/self/smaps")) -> list[Mapping]:
    """All ranges, in order; none where the system does not tell."""
    try:
        lines = smaps.read_text().splitlines()
    except OSError:
        return []
    found: list[Mapping] = []
    head: tuple[int, int, str] | None = None
    sizes: dict[str, int] = {}

    def finish() -> None:
        if head is not None:
            found.append(Mapping(*head, sizes.get("Rss", 0), sizes.get("Anonymous", 0)))

    for line in lines:
        fields = line.split(maxsplit=5)
        if not fields[0].endswith(":"):
            finish()
            begin, _, end = fields[0].partition("-")
            path = fields[5] if len(fields) > 5 and fields[5].startswith("/") else ""
            head, sizes = (int(begin, 16), int(end, 16), path), {}
        elif len(fields) > 2 and fields[2] == "kB":
            sizes[fields[0][:-1]] = int(fields[1]) * 1024
    finish()
    return found


def give_back_mapped(tensors: Iterable[Tensor]) -> int:
    """Let go of the pages of files that hold these tensors; they are read again when somebody looks at them.

    A map that somebody wrote to is left alone, because its changes would be lost.

    :returns: bytes given back.
    """
    if _DONT_NEED is None:
        return 0
    addresses = sorted({t.untyped_storage().data_ptr() for t in tensors if t.device.type == "cpu"} - {0})
    given = 0
    for mapped in mappings():
        holds = any(mapped.begin <= address < mapped.end for address in addresses)
        if holds and mapped.file and not mapped.own_bytes and mapped.resident_bytes:
            libc = ctypes.CDLL(None, use_errno=True)
            size = ctypes.c_size_t(mapped.end - mapped.begin)
            if libc.madvise(ctypes.c_void_p(mapped.begin), size, _DONT_NEED) == 0:
                given += mapped.resident_bytes
    return given


def trim_heap() -> None:
    """Give free memory of the C heap back, which loading leaves behind; only glibc can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)

"""Huge pages for large tensors: fewer page faults, and fewer misses when memory is read at scattered places."""

from __future__ import annotations

import ctypes
import mmap
import sys

from torch import Tensor

MIN_BYTES = 4 << 20  # two huge pages of x86: below this hardly a whole one fits


def ask_for_huge_pages(tensor: Tensor) -> bool:
    """Ask Linux to back a tensor's memory with transparent huge pages, and return whether it agreed.

    Touches nothing: memory is taken when it is written, a huge page at a time. Elsewhere, for small tensors and for
    those of other devices nothing happens.

    :param tensor: contiguous, any dtype.
    """
    if sys.platform != "linux" or tensor.device.type != "cpu":
        return False
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // mmap.PAGESIZE * mmap.PAGESIZE
    if end - begin < MIN_BYTES:
        return False
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):  # a C library without it
        return False
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(madvise(begin, end - begin, mmap.MADV_HUGEPAGE) == 0)

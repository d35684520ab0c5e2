"""The tensors of a KV pool in memory that several processes map."""

from __future__ import annotations

import mmap
import os
from math import prod

import torch
from torch import Tensor

_ALIGNMENT = 2 << 20  # a huge page


class SharedPool:
    """Makes tensors one after the other in one memory file.

    Who makes the same tensors in the same order on the same file sees the same memory. Pages are taken when they are
    written to, and are given back when nobody has the file or a tensor any more.

    :param descriptor: of a file that another process has made; None: make one.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("llmopt-kv", os.MFD_CLOEXEC) if descriptor is None else descriptor
        self._is_owner = descriptor is None
        self._end = 0

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The next tensor.

        :raises ValueError: it is not for the CPU.
        """
        if device.type != "cpu":
            raise ValueError(f"memory of the host cannot hold a tensor on {device}")
        num_bytes = max(1, prod(shape)) * dtype.itemsize
        length = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        start, self._end = self._end, self._end + length
        if self._is_owner:
            os.ftruncate(self.descriptor, self._end)
        elif os.fstat(self.descriptor).st_size < self._end:
            raise ValueError("the shared memory is smaller than the pool: the processes disagree about its shape")
        memory = mmap.mmap(self.descriptor, length, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=start)
        return torch.frombuffer(memory, dtype=dtype, count=prod(shape)).view(shape)

    def close(self) -> None:
        """Let go of the file. Tensors live on."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

"""The tensors of a GGUF file, by memory map: names, types, shapes and where they lie.

    "GGUF" version  num_tensors num_keys | key type value ... | name dims type offset ... | padding | tensor bytes ...

Only the table is read; the bytes of a tensor are touched when it is used. Everything is checked against the size of the
file, so that a file that was cut off is refused here and not met as zeros or a bus error later.
Source: the GGUF specification in ggml's docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from llmopt.errors import ModelError

TYPE_NAMES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 8: "Q8_0", 12: "Q4_K", 14: "Q6_K", 30: "BF16"}
"""Types that the native kernels read, by their numbers in the file."""

_BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 8: (32, 34), 12: (256, 144), 14: (256, 210), 30: (1, 2)}
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a file."""

    name: str
    type: int  # as in the file
    shape: tuple[int, ...]  # outermost first, as torch writes it
    begin: int  # bytes from the start of the file
    num_bytes: int

    @property
    def type_name(self) -> str:
        """ "Q4_K" and the like."""
        return type_name(self.type)

    @property
    def is_quantized(self) -> bool:
        """Whether values share parameters in blocks."""
        return _BLOCKS[self.type][0] > 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, the values along the last dimension."""
        values, num_bytes = _BLOCKS[self.type]
        return self.shape[-1] // values * num_bytes


def type_name(number: int) -> str:
    """The name of a GGUF type; its number for one that nobody knows."""
    from gguf.constants import GGMLQuantizationType

    try:
        return str(GGMLQuantizationType(number).name)
    except ValueError:
        return f"type {number}"


class GgufFile:
    """A file, mapped.

    :raises ModelError: it is no GGUF file, cut off, or holds tensors of types that are not read; names them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}  # numbers and strings; of arrays their length
        self.tensors: dict[str, GgufTensor] = {}
        try:
            with path.open("rb") as file:
                # private pages that could be written, so that torch takes them without a warning; nobody writes
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be read: {error}.") from error
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.address: int = self._bytes.ctypes.data
        self._at = 0
        try:
            self._read()
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise ModelError(
                f"{path} is cut off or damaged: its table ends at byte {self._at} of {len(self._map)} ({error}).\n"
                "Download it again."
            ) from error

    def bytes_of(self, tensor: GgufTensor) -> np.ndarray:
        """The bytes of a tensor, ``[num_bytes]`` uint8, a view of the map."""
        return self._bytes[tensor.begin : tensor.begin + tensor.num_bytes]

    def release(self) -> None:
        """Give the pages back that were touched; they are read again when needed."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def _read(self) -> None:
        if self._map[:4] != b"GGUF":
            raise ModelError(f"{self.path} is not a GGUF file: it begins with {self._map[:4]!r}.")
        self._at = 4
        version, num_tensors, num_keys = self._take("IQQ")
        if version not in (2, 3):
            raise ModelError(f"{self.path} is GGUF version {version}; versions 2 and 3 are read.")
        for _ in range(num_keys):
            key = self._string()
            self.metadata[key] = self._value(self._take("I")[0])
        table = [self._entry() for _ in range(num_tensors)]
        self._check_types([(name, kind) for name, _, kind, _ in table])
        alignment = int(self.metadata.get("general.alignment", 32))
        data = -(-self._at // alignment) * alignment
        for name, shape, kind, offset in table:
            values, num_bytes = _BLOCKS[kind]
            if not shape or shape[-1] % values:
                raise ModelError(f"{self.path}: tensor {name} of shape {shape} does not fit blocks of {values}.")
            tensor = GgufTensor(name, kind, shape, data + offset, prod(shape) // values * num_bytes)
            if tensor.begin + tensor.num_bytes > len(self._map):
                raise ModelError(
                    f"{self.path} is cut off: tensor {name} ends at byte {tensor.begin + tensor.num_bytes}, and the "
                    f"file has {len(self._map)}.\nDownload it again."
                )
            self.tensors[name] = tensor

    def _check_types(self, table: list[tuple[str, int]]) -> None:
        unknown = {type_name(kind): name for name, kind in table if kind not in _BLOCKS}
        if unknown:
            found = ", ".join(f"{kind} ({name})" for kind, name in unknown.items())
            raise ModelError(
                f"{self.path} holds tensors of types that plugin 'native' does not read packed: {found}. It reads "
                f"{', '.join(TYPE_NAMES.values())}.\nBuild without 'native' to dequantize the file, or pass another "
                "quantization."
            )

    def _take(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{form}", self._map, self._at)
        self._at += struct.calcsize(f"<{form}")
        return found

    def _string(self) -> str:
        (length,) = self._take("Q")
        if self._at + length > len(self._map):
            raise struct.error(f"a text of {length} bytes")
        self._at += length
        return self._map[self._at - length : self._at].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._take(_NUMBERS[kind])[0]
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise struct.error(f"a value of type {kind}")
        inner, count = self._take("IQ")
        if inner in _NUMBERS:
            self._at += count * struct.calcsize(f"<{_NUMBERS[inner]}")
        else:
            self._skip_values(inner, count)
        return count

    def _skip_values(self, kind: int, count: int) -> None:
        if kind != _STRING:  # arrays of arrays: nobody writes them
            for _ in range(count):
                self._value(kind)
            return
        data, at, unpack = self._map, self._at, struct.Struct("<Q").unpack_from
        for _ in range(count):  # a vocabulary: by the hundred thousand
            at += 8 + unpack(data, at)[0]
        self._at = at

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (num_dims,) = self._take("I")
        dims = self._take(f"{num_dims}Q")
        kind, offset = self._take("IQ")
        return name, tuple(int(d) for d in reversed(dims)), int(kind), int(offset)

"""Packed weights in a file: written once, read back in a fraction of the time that packing takes.

    8 bytes: length of the header | JSON header, filled up with spaces | matrices and vectors, as they lie in memory
    ------------------------------ 4,096-byte steps -------------------+- each at a multiple of 64 bytes -----------

The file is in safetensors format: any tool can list its tensors, matrices as bytes ``[panels, bytes of a panel]`` and
vectors as float32. ``__metadata__`` says what model and options it was made for, and the shape of every matrix. The
layout is the same for every instruction set, so a file may move between machines.

A file is only used when everything fits: the files of the model (size and time of change), its config, the options,
the shapes that would be packed now, and the layout of this build. It is written beside its final name and renamed when
it is complete and on the disk, so a file that is there under its name was never cut off by a crash.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmopt.demo_models import cache_folder
from llmopt.errors import ModelError
from llmopt_plugins.kernel.native.packing import PANEL, Arena, MatrixShape, PackedWeights, extension, layout

SUFFIX = ".packed"
_FORMAT, _VERSION = "llmopt-packed", 1
_PAGE = 4096
_MAX_HEADER = 100 << 20  # as safetensors has it
_CHUNK = 64 << 20


class PackedFileError(ModelError):
    """A saved packed form that cannot be used; the message is a reason that can follow its name."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a packed form was made from, and what for."""

    files: tuple[tuple[str, int, int], ...]  # name, bytes, time of change in ns, of every file with weights
    config: str  # digest of the model's config
    options: str  # quantization and the like, in words

    @property
    def file_name(self) -> str:
        """Where it is saved. Options that differ have files that differ."""
        return f"native-{self.options}-{hashlib.sha256(self.options.encode()).hexdigest()[:6]}{SUFFIX}"


def identity_of(source: str | os.PathLike[str], config: Any, options: str) -> Identity:
    """What a model is, without reading its weights.

    :param source: a folder with config.json and weights, or a .gguf file.
    :param config: the model's config.
    :param options: how it is packed; letters, digits, ``-`` and ``_``.
    """
    path = Path(source)
    found = ([path],) if path.is_file() else (sorted(path.glob(f"*.{kind}")) for kind in ("safetensors", "bin"))
    files = next((group for group in found if group), [])
    stats = [(file.name, file.stat()) for file in files]
    fields = {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}  # where, not what
    text = json.dumps(fields, sort_keys=True, default=str)
    return Identity(
        files=tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats),
        config=hashlib.sha256(text.encode()).hexdigest()[:16],
        options=options,
    )


def places(source: str | os.PathLike[str], identity: Identity) -> list[Path]:
    """Where a packed form may lie: beside the model, or in the user's cache when that place cannot be written."""
    path = Path(source).resolve()
    folder = path.parent if path.is_file() else path
    name = f"{path.stem}-{identity.file_name}" if path.is_file() else identity.file_name
    return [folder / name, _cached(path) / name]


def _cached(path: Path) -> Path:
    return cache_folder() / "packed" / hashlib.sha256(str(path).encode()).hexdigest()[:16]


def candidates(source: str | os.PathLike[str]) -> list[Path]:
    """Files that may be packed forms of a model, with whatever options."""
    path = Path(source).resolve()
    if not path.exists():
        return []
    stem = f"{path.stem}-" if path.is_file() else ""
    folders = (path.parent if path.is_file() else path, _cached(path))
    return [file for folder in folders for file in sorted(folder.glob(f"{glob.escape(stem)}native-*{SUFFIX}"))]


def place_to_save(source: str | os.PathLike[str], identity: Identity) -> Path:
    """The first of `places` that can be written."""
    beside, cached = places(source, identity)
    return beside if os.access(beside.parent, os.W_OK) else cached


def layout_digest(shapes: Mapping[str, MatrixShape]) -> str:
    """What this build's packing makes of fixed numbers, for every form in use: another layout has another digest."""
    forms = sorted({(s.format, s.group_size, s.has_minimum) for s in shapes.values()})
    values = np.linspace(-1.0, 1.0, PANEL * 256, dtype=np.float32).reshape(PANEL, 256)
    values = np.ascontiguousarray(np.sin(values * 991.0))
    digest = hashlib.sha256()
    core = extension()
    for form, group_size, has_minimum in forms:
        shape = MatrixShape(form, PANEL, 256, group_size, has_minimum)
        memory = Arena(shape.num_bytes)
        rows = values.ctypes.data + values.strides[0] * np.arange(PANEL, dtype=np.int64)
        core.pack_panels(shape.native(), rows, 1, core.SourceType.FLOAT32, memory.address, 1)
        digest.update(f"{form} {group_size} {has_minimum}".encode())
        digest.update(memory.bytes().tobytes())
    return digest.hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------------------------------
def save(path: Path, packed: PackedWeights, identity: Identity) -> None:
    """Write a packed form, so that it is there as a whole or not at all.

    :raises OSError: the place cannot be written, or the disk is full.
    """
    header = _header(packed, identity)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(header)
            memory = memoryview(_bytes_of(packed))
            for begin in range(0, len(memory), _CHUNK):
                file.write(memory[begin : begin + _CHUNK])
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644 & ~_umask())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _header(packed: PackedWeights, identity: Identity) -> bytes:
    shapes = {name: shape for name, (shape, _) in packed.matrices.items()}
    entries: dict[str, Any] = {}
    for name, (shape, begin) in packed.matrices.items():
        panels = -(-shape.num_outputs // PANEL)
        entries[f"matrix.{name}"] = {
            "dtype": "U8",
            "shape": [panels, shape.num_bytes // panels],
            "data_offsets": [begin, begin + shape.num_bytes],
        }
    for name, (count, begin) in packed.vectors.items():
        filled = -(-count // 16) * 16
        entries[f"vector.{name}"] = {
            "dtype": "F32",
            "shape": [filled],
            "data_offsets": [begin, begin + 4 * filled],
        }
    metadata = {
        "format": _FORMAT,
        "version": str(_VERSION),
        "layout": layout_digest(shapes),
        "files": json.dumps(identity.files),
        "config": identity.config,
        "options": identity.options,
        "matrices": json.dumps({name: _shape_fields(shape) for name, shape in shapes.items()}),
        "vectors": json.dumps({name: count for name, (count, _) in packed.vectors.items()}),
    }
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _PAGE)
    return len(text).to_bytes(8, "little") + text


def _shape_fields(shape: MatrixShape) -> list[Any]:
    return [shape.format, shape.num_outputs, shape.num_inputs, shape.group_size, shape.has_minimum]


def _bytes_of(packed: PackedWeights) -> Any:
    memory: Any = packed.memory
    return memory.bytes()[: _end_of(packed)]


def _end_of(packed: PackedWeights) -> int:
    shapes = {name: shape for name, (shape, _) in packed.matrices.items()}
    return layout(shapes, {name: count for name, (count, _) in packed.vectors.items()})[2]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# ---------------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------------
def load(
    path: Path,
    identity: Identity,
    sizes: Mapping[str, tuple[int, int]],
    vectors: Mapping[str, int],
    num_threads: int = 1,
) -> PackedWeights:
    """Read a packed form into memory on huge pages.

    Reading takes longer than a map of the file, and every step is a little faster for it: pages of files are small on
    most file systems (measured with two cores: 30 GB/s from huge pages, 24 to 28 from a map).

    :param sizes: outputs and inputs of every matrix that there must be. Their forms are taken from the file: the
        options decide about them, and the options are compared.
    :param vectors: sizes of the vectors that there must be.
    :raises PackedFileError: it is damaged, or was made for something else; says for what.
    """
    try:
        with path.open("rb") as file:
            header, begin = _read_header(file)
            shapes = _check(header.get("__metadata__") or {}, identity, sizes, vectors)
            placed, placed_vectors, num_bytes = layout(shapes, vectors)
            _check_places(header, placed, placed_vectors)
            size = os.fstat(file.fileno()).st_size
            if size != begin + num_bytes:
                raise PackedFileError(f"has {size} bytes instead of {begin + num_bytes}: it was cut off or changed")
            memory = Arena(num_bytes)
            _read_into(file.fileno(), begin, memory.bytes(), num_threads)
    except OSError as error:
        raise PackedFileError(f"cannot be read: {error}") from error
    return PackedWeights(memory, placed, placed_vectors)


def _read_header(file: Any) -> tuple[dict[str, Any], int]:
    """The header, and where the tensors begin."""
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= _MAX_HEADER:
        raise PackedFileError("is not in safetensors format, or was cut off")
    try:
        header = json.loads(file.read(length))
    except ValueError as error:
        raise PackedFileError(f"has no readable header ({error}): it was cut off or changed") from error
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__", {}), dict):
        raise PackedFileError("has no readable header")
    return header, 8 + length


def _check(
    found: Mapping[str, str],
    identity: Identity,
    wanted_sizes: Mapping[str, tuple[int, int]],
    vectors: Mapping[str, int],
) -> dict[str, MatrixShape]:
    """Refuse what was made for something else; the forms of the matrices."""
    if found.get("format") != _FORMAT:
        raise PackedFileError("holds no packed form of llmopt")
    if found.get("version") != str(_VERSION):
        raise PackedFileError(f"has format version {found.get('version')}, this build reads {_VERSION}")
    if found.get("options") != identity.options:
        raise PackedFileError(f"was packed as {found.get('options')}, asked for is {identity.options}")
    try:
        files = [tuple(entry) for entry in json.loads(found.get("files", ""))]
        shapes = {name: MatrixShape(*fields) for name, fields in json.loads(found.get("matrices", "")).items()}
        sizes = json.loads(found.get("vectors", ""))
    except (ValueError, TypeError, AttributeError) as error:
        raise PackedFileError(f"has damaged metadata ({error})") from error
    if files != list(identity.files):
        raise PackedFileError(f"is stale: {_changed(files, identity)}")
    if found.get("config") != identity.config:
        raise PackedFileError("is stale: the model's config is another one now")
    found_sizes = {name: (shape.num_outputs, shape.num_inputs) for name, shape in shapes.items()}
    if list(found_sizes.items()) != list(wanted_sizes.items()) or sizes != dict(vectors):
        raise PackedFileError("holds other matrices than this version of llmopt would pack")
    try:
        digest = layout_digest(shapes)
    except (KeyError, TypeError, ValueError) as error:
        raise PackedFileError(f"has matrices in forms that are not known ({error})") from error
    if found.get("layout") != digest:
        raise PackedFileError("was packed by a version of llmopt whose kernels read another layout")
    return shapes


def _changed(files: list[tuple[Any, ...]], identity: Identity) -> str:
    before = {name: (size, time) for name, size, time in files}
    now = {name: (size, time) for name, size, time in identity.files}
    for name in sorted(before.keys() | now.keys()):
        if name not in now:
            return f"it was made from {name}, which is gone"
        if name not in before:
            return f"{name} was not there when it was made"
        if before[name][0] != now[name][0]:
            return f"{name} had {before[name][0]} bytes when it was made, and has {now[name][0]}"
        if before[name] != now[name]:
            return f"{name} was changed after it was made"
    return "the model's files are others"


def _check_places(
    header: Mapping[str, Any],
    placed: Mapping[str, tuple[MatrixShape, int]],
    vectors: Mapping[str, tuple[int, int]],
) -> None:
    wanted = {f"matrix.{name}": begin for name, (_, begin) in placed.items()}
    wanted |= {f"vector.{name}": begin for name, (_, begin) in vectors.items()}
    try:
        found = {name: entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}
    except (TypeError, KeyError, IndexError) as error:
        raise PackedFileError("has a damaged table of tensors") from error
    if found != wanted:
        raise PackedFileError("has its tensors in other places than this version of llmopt")


def _read_into(handle: int, begin: int, memory: Any, num_threads: int) -> None:
    """Fill memory from a file; several threads, because most of the time goes into taking pages."""
    from concurrent.futures import ThreadPoolExecutor

    view = memoryview(memory)

    def read(start: int) -> None:
        end = min(start + _CHUNK // 4, len(view))
        while start < end:
            count = os.preadv(handle, [view[start:end]], begin + start)
            if count == 0:
                raise PackedFileError("was cut off while it was read")
            start += count

    with ThreadPoolExecutor(max_workers=max(1, num_threads)) as pool:
        list(pool.map(read, range(0, len(view), _CHUNK // 4)))

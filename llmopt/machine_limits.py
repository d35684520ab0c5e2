"""What this machine can do at best: read bandwidth by working set, and arithmetic peak by kind.

Measured once, in a few seconds, and kept in the user's cache as JSON under a key of everything the figures depend on::

    <cache>/machine/cpu-1f0c9a3e.json      {"key": {...}, "bandwidth": {"2": [[1048576, 3.6e11], ...]}, "peaks": ...}

``LLMOPT_MACHINE_LIMITS`` names a file of this form to use as it is, instead of measuring.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmopt import container, native
from llmopt.errors import ConfigError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("llmopt")

_MIB = 1 << 20
_FORMAT = 1  # of the file; also counted up when the measurement itself changes
_LARGEST_BYTES = 1 << 30
_SHARE_OF_MEMORY = 4  # the largest working set takes a quarter of what may be used, at most

# Whose peak holds for a product with operands of this type; the first that was measured wins, or a faster later one.
_KINDS: dict[str, tuple[str, ...]] = {
    "float32": ("float32",),
    "float16": ("float16", "float32"),
    "bfloat16": ("bfloat16", "bfloat16_tile", "bfloat16_dot", "float32"),
    "int8": ("int8", "int8_tile", "int8_dot", "bfloat16", "bfloat16_tile", "bfloat16_dot", "float32"),
}
_KINDS["int4"] = _KINDS["int8"]  # kernels widen the four bits first


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Measured limits of one device."""

    key: dict[str, Any]  # device, its name, CPUs, memory, versions: what the figures hold for
    bandwidth: dict[int, list[tuple[int, float]]]  # threads -> (working set in bytes, bytes per second), ascending
    peaks: dict[str, dict[int, float]]  # kind -> threads -> operations per second; one multiply-add is two
    measured_at: str = ""  # date and time, UTC
    measured_in_s: float = 0.0  # how long it took

    @property
    def num_threads(self) -> int:
        """The most threads that were measured; figures are for so many unless asked otherwise."""
        return max(self.bandwidth)

    def bytes_per_s(self, num_bytes: float, num_threads: int | None = None) -> float:
        """Read bandwidth for a working set; between measured sizes on a straight line in logarithms.

        It never rises with the size: what a large working set reaches, a smaller one can.
        """
        points: list[tuple[int, float]] = self._threads(self.bandwidth, num_threads)
        best = 0.0
        falling: list[tuple[int, float]] = []
        for size, rate in reversed(points):
            best = max(best, rate)
            falling.append((size, best))
        falling.reverse()
        if num_bytes <= falling[0][0]:
            return falling[0][1]
        for (low, fast), (high, slow) in itertools.pairwise(falling):
            if num_bytes <= high:
                share = math.log(num_bytes / low) / math.log(high / low)
                return fast * math.exp(share * math.log(slow / fast))
        return falling[-1][1]

    def ops_per_s(self, dtype: str, num_threads: int | None = None) -> float:
        """Arithmetic peak for operands of a type: the fastest kind of instruction that can serve it."""
        found = [self.peaks[kind] for kind in _KINDS.get(dtype, ("float32",)) if kind in self.peaks]
        rates: list[float] = [self._threads(peak, num_threads) for peak in found]
        return max(rates)

    def seconds(self, num_bytes: float, num_ops: float, dtype: str) -> float:
        """The shortest time for work that must move so many bytes and do so many operations; the two overlap."""
        return max(num_bytes / self.bytes_per_s(max(1.0, num_bytes)), num_ops / self.ops_per_s(dtype))

    @staticmethod
    def _threads(by_threads: Mapping[int, Any], wanted: int | None) -> Any:
        """The figure for so many threads, or for the nearest smaller number that was measured."""
        if wanted is None:
            return by_threads[max(by_threads)]
        return by_threads[max((count for count in by_threads if count <= wanted), default=min(by_threads))]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `from_dict` reads it."""
        return {
            "key": self.key,
            "measured_at": self.measured_at,
            "measured_in_s": self.measured_in_s,
            "bandwidth": {
                str(threads): [list(point) for point in points] for threads, points in self.bandwidth.items()
            },
            "peaks": {kind: {str(t): rate for t, rate in by.items()} for kind, by in self.peaks.items()},
        }

    @classmethod
    def from_dict(cls, data: Any) -> MachineLimits:
        """Read what `to_dict` wrote.

        :raises ValueError: something is missing, of the wrong type, or no positive number.
        """
        try:
            bandwidth = {
                int(threads): sorted((int(size), float(rate)) for size, rate in points)
                for threads, points in data["bandwidth"].items()
            }
            peaks = {
                str(kind): {int(threads): float(rate) for threads, rate in by_threads.items()}
                for kind, by_threads in data["peaks"].items()
            }
            made = cls(dict(data["key"]), bandwidth, peaks, str(data["measured_at"]), float(data["measured_in_s"]))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"no limits of a machine: {type(error).__name__}: {error}") from error
        rates = [rate for points in bandwidth.values() for point in points for rate in point]
        rates += [rate for by_threads in peaks.values() for rate in by_threads.values()]
        is_whole = bandwidth and "float32" in peaks and all(bandwidth.values()) and all(peaks.values())
        if not is_whole or not all(math.isfinite(rate) and rate > 0 for rate in rates):
            raise ValueError("no limits of a machine: a figure is missing or no positive number")
        return made


def machine_limits(device: torch.device | str = "cpu", *, refresh: bool = False, seconds: float = 4.0) -> MachineLimits:
    """The limits of a device: from the cache when they were measured for the same machine, else measured and kept.

    :param refresh: measure again.
    :param seconds: about how long measuring may take.
    :raises ConfigError: the file that ``LLMOPT_MACHINE_LIMITS`` names cannot be used.
    """
    if (given := os.environ.get("LLMOPT_MACHINE_LIMITS")) and not refresh:
        try:
            return MachineLimits.from_dict(json.loads(Path(given).read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ConfigError(f"LLMOPT_MACHINE_LIMITS={given} cannot be used: {error}. Unset it to measure.") from error
    key = machine_key(device)
    path = limits_path(key)
    if not refresh and (kept := _read(path, key)) is not None:
        return kept
    started = time.perf_counter()
    found = measure(device, seconds)
    made = MachineLimits(
        key, *found, datetime.now(UTC).isoformat(timespec="seconds"), round(time.perf_counter() - started, 2)
    )
    _write(path, made)
    return made


def machine_key(device: torch.device | str = "cpu") -> dict[str, Any]:
    """What measured limits hold for."""
    import torch

    from llmopt.baseline.hardware import cpu_name
    from llmopt.version import __version__

    cpus, num_threads = container.num_cpus()
    key: dict[str, Any] = {"format": _FORMAT, "llmopt": __version__, "device": torch.device(device).type}
    if key["device"] == "cuda":
        name, total = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
        return key | {"name": name, "memory_gib": round(total / 2**30), "torch": torch.__version__}
    core = native.core()
    return key | {
        "name": cpu_name(),
        "num_cpus": len(cpus),
        "num_threads": num_threads,
        "memory_gib": round(container.memory()[1] / 2**30),
        "isa": core.isa() if core is not None else f"torch {torch.__version__}",
    }


def limits_path(key: dict[str, Any]) -> Path:
    """Where the limits for a key are kept."""
    from llmopt.demo_models import cache_folder

    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:8]
    return cache_folder() / "machine" / f"{key['device']}-{digest}.json"


def _read(path: Path, key: dict[str, Any]) -> MachineLimits | None:
    """The kept limits; None when there are none, they are damaged, or they are another machine's."""
    try:
        kept = MachineLimits.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("%s is of no use and is measured again: %s", path, error)
        return None
    return kept if kept.key == key else None


def _write(path: Path, limits: MachineLimits) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(limits.to_dict(), indent=1) + "\n", encoding="utf-8")
        partial.replace(path)  # another process sees the old file or the new one
    except OSError as error:
        logger.warning("the measured limits cannot be kept in %s: %s", path.parent, error)


Measured = tuple[dict[int, list[tuple[int, float]]], dict[str, dict[int, float]]]


def measure(device: torch.device | str, seconds: float) -> Measured:
    """Measure now: ``(bandwidth, peaks)`` as `MachineLimits` holds them."""
    import torch

    kind = torch.device(device).type
    if kind == "cpu" and native.core() is not None:
        return measure_cpu(seconds)
    available = torch.cuda.mem_get_info(device)[0] if kind == "cuda" else container.memory()[0]
    return measure_with_torch(device, working_sets(available), 4096 if kind == "cuda" else 512, seconds)


def working_sets(available_bytes: int) -> list[int]:
    """Sizes to measure: powers of two from 1 MiB to 1 GiB, none above a quarter of what is available."""
    largest = min(_LARGEST_BYTES, available_bytes // _SHARE_OF_MEMORY)
    return [size for exponent in range(11) if (size := _MIB << exponent) <= largest] or [max(4096, largest)]


def measure_cpu(seconds: float) -> Measured:
    """With the compiled core: pinned threads, huge pages, the selected instruction set; one thread and all of them."""
    core = native.core()
    assert core is not None
    cpu_ids, num_threads = container.num_cpus()
    cpus = list(cpu_ids[:num_threads])
    counts = sorted({1, num_threads})
    sizes = working_sets(container.memory()[0])
    kinds = core.peak_kinds()
    # filling the memory takes about a fifth, the peaks as much; the rest goes to the passes
    each = 0.6 * seconds / (len(sizes) * len(counts))
    probe = core.BandwidthProbe(sizes[-1], cpus)
    bandwidth = {count: [(size, float(probe.measure(size, count, each))) for size in sizes] for count in counts}
    del probe  # its memory is free again before anything else is asked for
    each = 0.2 * seconds / (len(kinds) * len(counts))
    peaks = {kind: {count: float(core.measure_peak(kind, cpus[:count], each)) for count in counts} for kind in kinds}
    return bandwidth, peaks


def measure_with_torch(device: torch.device | str, sizes: list[int], matrix_size: int, seconds: float) -> Measured:
    """Through torch's own copies and matrix products, for accelerators and where there is no compiled core.

    A copy of n bytes moves 2 n. Everything counts as one thread, which is what a caller of torch is.

    :param matrix_size: rows and columns of the matrices.
    """
    import torch

    device = torch.device(device)
    each = seconds / (2 * len(sizes))
    memory = torch.ones(sizes[-1] // 4, dtype=torch.float32, device=device)
    points = []
    for size in sizes:
        half = size // 8
        source, target = memory[:half], memory[half : 2 * half]
        points.append(
            (size, 8 * half / _best_s(lambda source=source, target=target: target.copy_(source), device, each))
        )
    del memory
    peaks: dict[str, dict[int, float]] = {}
    dtypes = [torch.float32, torch.bfloat16] + ([torch.float16] if device.type == "cuda" else [])
    each = seconds / (2 * len(dtypes) + 2)
    for dtype in dtypes:
        left = torch.ones(matrix_size, matrix_size, dtype=dtype, device=device)
        took = _best_s(lambda left=left: left @ left, device, each)
        peaks[str(dtype).removeprefix("torch.")] = {1: 2 * matrix_size**3 / took}
    if device.type == "cuda":
        try:
            bytes_ = torch.ones(matrix_size, matrix_size, dtype=torch.int8, device=device)
            took = _best_s(lambda: torch._int_mm(bytes_, bytes_), device, each)
            peaks["int8"] = {1: 2 * matrix_size**3 / took}
        except (RuntimeError, AttributeError) as error:  # an older device or an older torch
            logger.info("no int8 peak: %s", error)
    return {1: points}, peaks


def _best_s(work: Any, device: torch.device, seconds: float) -> float:
    """The fastest of at least three runs, after one that does not count."""
    import torch

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    with torch.no_grad():
        work()
        finish()
        best, started, runs = math.inf, time.perf_counter(), 0
        while runs < 3 or time.perf_counter() - started < seconds:
            begin = time.perf_counter()
            work()
            finish()
            best = min(best, time.perf_counter() - begin)
            runs += 1
    return max(best, 1e-9)

"""``llmopt probe``: what this machine can do at best."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmopt.cli.output import console, print_json

if TYPE_CHECKING:
    from rich.table import Table

    from llmopt.machine_limits import MachineLimits


def run(*, refresh: bool, seconds: float, device: str, as_json: bool) -> None:
    """Print the limits of a device; they are measured when the cache has none for this machine."""
    from llmopt.machine_limits import limits_path, machine_limits

    limits = machine_limits(device, refresh=refresh, seconds=seconds)
    if as_json:
        print_json(limits.to_dict())
        return
    out = console()
    name = limits.key.get("name", device)
    out.print(f"{name}, measured {limits.measured_at} in {limits.measured_in_s:.1f} s")
    out.print(bandwidth_table(limits))
    out.print(peak_table(limits))
    out.print(f"kept in {limits_path(limits.key)}", soft_wrap=True)


def bandwidth_table(limits: MachineLimits) -> Table:
    """Working sets down, numbers of threads across."""
    from rich.table import Table

    made = Table(title="read bandwidth, GB/s")
    made.add_column("working set", justify="right")
    for threads in limits.bandwidth:
        made.add_column(_threads(threads), justify="right")
    by_size: dict[int, list[float]] = {}
    for points in limits.bandwidth.values():
        for size, rate in points:
            by_size.setdefault(size, []).append(rate)
    for size, rates in sorted(by_size.items()):
        made.add_row(f"{size / 2**20:g} MiB", *(f"{rate / 1e9:.1f}" for rate in rates))
    return made


def peak_table(limits: MachineLimits) -> Table:
    """Kinds of arithmetic down, numbers of threads across."""
    from rich.table import Table

    made = Table(title="arithmetic peak, 10⁹ operations per second")
    made.add_column("kind")
    threads = sorted({count for by_threads in limits.peaks.values() for count in by_threads})
    for count in threads:
        made.add_column(_threads(count), justify="right")
    for kind, by_threads in limits.peaks.items():
        made.add_row(kind, *(f"{by_threads[c] / 1e9:.0f}" if c in by_threads else "" for c in threads))
    return made


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"

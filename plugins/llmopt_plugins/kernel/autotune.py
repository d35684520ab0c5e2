"""Thresholds of kernels tried once per machine and model, and kept.

Stage: none; tries the finished pipeline.   Promise: exact, it chooses between kernels that give the same tokens.
Helps: machines on which another number of rows than on ours is where tiles, or torch's products, begin to win.
Hurts: the first build with a model on a machine, by at most ``budget_s``.
Source: R. C. Whaley and J. Dongarra, "Automatically Tuned Linear Algebra Software", 1998: measure instead of model.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmopt import PluginInfo, hookimpl, native, version
from llmopt_plugins.option_checks import check_number

if TYPE_CHECKING:
    from llmopt.batch import Batch
    from llmopt.pipeline import InferencePipeline

logger = logging.getLogger("llmopt")

MARGIN = 0.03  # another value than the default must be faster by this share
_NUM_PARTS = 4  # of a measurement; in each of them


@dataclass(frozen=True, slots=True)
class Tunable:
    """One number that may be chosen.

    A threshold is the number of rows from which on ``above`` is the better value; its candidates are numbers of rows.
    """

    name: str
    default: int
    candidates: tuple[int, ...]
    apply: Callable[[int], None]
    is_threshold: bool = False


Measure = Callable[[int], Callable[[], None]]  # number of rows -> a step with so many


def tune(tunable: Tunable, measure: Measure, budget_s: float, clock: Callable[[], float] = time.perf_counter) -> int:
    """Try the candidates in turns and return the best value: the default unless another is faster by `MARGIN`.

    It has to be faster from the beginning to the end of the measurement: what only wins while something else runs on
    the machine is not kept. The value that is returned is applied.
    """
    try:
        if tunable.is_threshold:
            best = _tune_threshold(tunable, measure, budget_s, clock)
        else:
            values = (tunable.default, *(c for c in tunable.candidates if c != tunable.default))
            times = _compare(tunable, values, measure(1), budget_s, clock)
            faster = [value for value in values if _is_faster(times[value], times[tunable.default])]
            best = min(faster, key=lambda value: statistics.median(times[value]), default=tunable.default)
    except BaseException:
        tunable.apply(tunable.default)
        raise
    tunable.apply(best)
    return best


def _tune_threshold(tunable: Tunable, measure: Measure, budget_s: float, clock: Callable[[], float]) -> int:
    """The smallest candidate from which on every one is better above the threshold than below it."""
    best = max(tunable.candidates) + 1
    for rows in sorted(tunable.candidates, reverse=True):
        above, below = rows, rows + 1  # the threshold is reached, or is not
        usual = above if rows >= tunable.default else below
        times = _compare(tunable, (above, below), measure(rows), budget_s / len(tunable.candidates), clock)
        other = below if usual == above else above
        chosen = other if _is_faster(times[other], times[usual]) else usual
        if chosen == below:
            break
        best = rows
    return tunable.default if _same_side(tunable, best) else best


def _same_side(tunable: Tunable, best: int) -> bool:
    """Whether two thresholds put every candidate on the same side."""
    return all((rows >= best) == (rows >= tunable.default) for rows in tunable.candidates)


def _compare(
    tunable: Tunable, values: Sequence[int], step: Callable[[], None], budget_s: float, clock: Callable[[], float]
) -> dict[int, list[float]]:
    """Times of a step with each value, in turns, so that drift hits all of them."""
    samples: dict[int, list[float]] = {value: [] for value in values}
    end = clock() + budget_s
    while len(samples[values[0]]) < _NUM_PARTS or clock() < end:
        for value in values:
            tunable.apply(value)
            step()  # the first one finds the caches as another value left them
            start = clock()
            step()
            samples[value].append(clock() - start)
    return samples


def _is_faster(mine: Sequence[float], usual: Sequence[float]) -> bool:
    """Whether the median is clearly lower in every part of a measurement. Both have one time per turn."""
    bounds = [len(mine) * part // _NUM_PARTS for part in range(_NUM_PARTS + 1)]
    return all(
        statistics.median(mine[start:end]) < statistics.median(usual[start:end]) * (1 - MARGIN)
        for start, end in itertools.pairwise(bounds)
    )


class Steps:
    """Decode steps of a finished pipeline, without its requests.

    :param max_rows: as many as slots and blocks allow, at most.
    """

    def __init__(self, pipeline: InferencePipeline, max_rows: int) -> None:
        self.pipeline = pipeline
        self.max_rows = min(max_rows, len(pipeline.queue.free_slots), pipeline.block_pool.num_free)

    def __call__(self, num_rows: int) -> Callable[[], None]:
        from llmopt.request import Request, SamplingParams

        pipeline = self.pipeline
        blocks = pipeline.block_pool.allocate(num_rows)
        pipeline.block_pool.free(blocks)  # nobody else steps while the pipeline is built
        requests = []
        for row in range(num_rows):
            request = Request(f"autotune-{row}", [0], SamplingParams(), max_len=1, wants_text=False)
            request.slot = pipeline.queue.free_slots[-1 - row]
            request.block_table.append(blocks[row])
            requests.append(request)
        batch: Batch = pipeline.batch_builder.build(requests, [1] * num_rows)
        batch.wants_best = False

        def step() -> None:
            pipeline.execute(batch, None)

        return step


def tunables(pipeline: InferencePipeline, max_rows: int) -> list[Tunable]:
    """What the kernels of this pipeline leave to choose."""
    import torch

    found: list[Tunable] = []
    core = native.core()
    rows = tuple(n for n in (1, 2, 3, 4, 5, 6, 8, 12, 16) if n <= max_rows)
    owners = pipeline.registry.chains["execute"].owners
    if core is not None and "native" in owners and rows:
        tuning, defaults = core.linear_tuning(), core.LinearTuning()

        def setter(name: str) -> Callable[[int], None]:
            return lambda value: setattr(tuning, name, value)

        bits = pipeline.config.kernel.weight_bits
        name = {8: "tile_rows_int8", 4: "tile_rows_group"}.get(bits or 0, "tile_rows_bf16")
        if core.isa() == "amx" and (bits or pipeline.model.dtype is torch.bfloat16):
            found.append(Tunable(name, getattr(defaults, name), rows, setter(name), is_threshold=True))
        found.append(
            Tunable("prefetch_bytes", defaults.prefetch_bytes, (1024, 2048, 4096, 8192), setter("prefetch_bytes"))
        )
    return found


class Autotune:
    """Choose the kernels' thresholds by measuring."""

    info = PluginInfo(
        name="autotune",
        layer="kernel",
        promise="exact",
        summary="thresholds of the native kernels measured once per machine and model, and kept",
        requires=("native",),
        devices=("cpu",),
    )

    def __init__(self, budget_s: float = 5.0) -> None:
        """:param budget_s: seconds for measuring, when nothing is known yet."""
        check_number("budget_s", budget_s, "a number of seconds, 0 < budget_s <= 600", lambda x: 0 < x <= 600)
        self.budget_s = budget_s

    @hookimpl
    def llmopt_finish(self, pipeline: InferencePipeline) -> None:
        if pipeline.why_not is not None:
            return
        steps = Steps(pipeline, max_rows=16)
        choices = tunables(pipeline, steps.max_rows)
        if not choices:
            pipeline.notes.append("autotune found nothing to choose: the kernels in use have no thresholds here")
            return
        key = machine_key(pipeline, choices)
        path = result_file(key)
        known = read_result(path, key, choices)
        if known is None:
            start = time.perf_counter()
            known = {choice.name: tune(choice, steps, self.budget_s / len(choices)) for choice in choices}
            write_result(path, key, known)
            logger.info("autotune: %s, measured in %.1f s, kept in %s", known, time.perf_counter() - start, path)
        for choice in choices:
            choice.apply(known[choice.name])
        told = ", ".join(
            f"{choice.name} {known[choice.name]}" + ("" if known[choice.name] != choice.default else " (default)")
            for choice in choices
        )
        pipeline.notes.append(f"autotune: {told}")


def machine_key(pipeline: InferencePipeline, choices: Sequence[Tunable]) -> dict[str, Any]:
    """What a result belongs to: processor, instruction set, threads, shapes, dtype, version, candidates."""
    core = native.core()
    assert core is not None
    shapes = sorted({tuple(p.shape) for p in pipeline.model.parameters() if p.dim() == 2})
    return {
        "version": version.__version__,
        "processor": _processor(),
        "isa": core.isa(),
        "num_threads": pipeline.machine.num_threads,
        "dtype": str(pipeline.model.dtype),
        "weight_bits": pipeline.config.kernel.weight_bits,
        "shapes": [list(shape) for shape in shapes],
        "choices": [[choice.name, choice.default, list(choice.candidates)] for choice in choices],
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict.fromkeys(("vendor_id", "cpu family", "model", "model name", "stepping"), "")
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in fields and not fields[name.strip()]:
            fields[name.strip()] = value.strip()
    return " ".join(value for value in fields.values() if value)


def result_file(key: dict[str, Any]) -> Path:
    """Where the result of a key is kept."""
    from llmopt.demo_models import cache_folder

    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    return cache_folder() / "autotune" / f"{digest}.json"


def read_result(path: Path, key: dict[str, Any], choices: Sequence[Tunable]) -> dict[str, int] | None:
    """What was found before; None when there is nothing, or something that is damaged or belongs to another key."""
    try:
        kept = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(kept, dict) or kept.get("key") != key or not isinstance(kept.get("values"), dict):
        return None
    values = kept["values"]
    for choice in choices:
        allowed = {choice.default, *choice.candidates, max(choice.candidates) + 1}
        if type(values.get(choice.name)) is not int or values[choice.name] not in allowed:
            return None
    return {choice.name: values[choice.name] for choice in choices}


def write_result(path: Path, key: dict[str, Any], values: dict[str, int]) -> None:
    """Keep a result; a folder that cannot be written is a warning."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({"key": key, "values": values}, file, indent=1)
        os.replace(file.name, path)
    except OSError as error:
        logger.warning("autotune: the result cannot be kept in %s: %s", path, error)

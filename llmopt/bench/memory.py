"""Load time and resident memory, each contender in a process of its own.

Run as ``python -m llmopt.bench.memory '{"model": ..., "plugins": {...}, ...}'``, it prints one JSON line about itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmopt.errors import ModelError

_PROMPT = list(range(10, 42))  # ids that every vocabulary has
_NUM_NEW = 8


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one process needed."""

    name: str  # the contender
    import_s: float  # torch, transformers and llmopt
    load_s: float  # from the model's name to a pipeline that is ready, or to a loaded model
    first_s: float  # a first prompt of 32 ids and 8 new tokens
    imports_bytes: int  # resident after the imports
    resident_bytes: int  # resident after the first answer
    peak_bytes: int  # the most that was ever resident
    file_bytes: int  # of the resident bytes, those of mapped files
    weight_bytes: int  # weights that a step reads, as they lie in memory
    kv_bytes: int  # KV blocks that the first prompt took


def measure_footprint(
    name: str,
    model: str,
    plugins: dict[str, dict[str, Any]] | None,
    *,
    dtype: str,
    device_map: str | None = None,
    timeout_s: float = 600.0,
) -> Footprint:
    """Start a process that loads the model and answers once.

    :param plugins: None for ``model.generate`` alone; else the plugins of the pipeline with their options.
    :raises ModelError: the process failed; with its last words.
    """
    wish = {"name": name, "model": model, "plugins": plugins, "dtype": dtype, "device_map": device_map}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "llmopt.bench.memory", json.dumps(wish)],
            capture_output=True,
            text=True,
            env=environment,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"loading {model} in a process of its own took more than {timeout_s:.0f} s.") from error
    if done.returncode:
        _, _, ending = done.stderr.rpartition("\n  ")  # what follows the last line of the traceback
        _, _, message = ending.partition("\n")
        raise ModelError(f"loading {model} in a process of its own failed: {message.strip() or done.stderr[-500:]}")
    return Footprint(**json.loads(done.stdout.strip().splitlines()[-1]))


def status_bytes(names: Sequence[str], path: Path = Path("/proc/self/status")) -> list[int]:
    """Fields such as ``VmRSS`` in bytes; 0 where the system does not report one."""
    try:
        lines = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    except OSError:
        lines = {}
    return [int(lines[name].split()[0]) * 1024 if name in lines else 0 for name in names]


def measure_here(wish: dict[str, Any]) -> Footprint:
    """Load and answer in this process, which has imported nothing heavy so far."""
    start = time.perf_counter()
    import torch
    import transformers.modeling_utils  # noqa: F401

    import llmopt
    from llmopt.hub import load
    from llmopt.plugin_search import make_plugin

    import_s = time.perf_counter() - start
    (imports_bytes,) = status_bytes(["VmRSS"])
    options = {"dtype": wish["dtype"], "device_map": wish["device_map"]}
    start = time.perf_counter()
    weight_bytes = kv_bytes = 0
    if wish["plugins"] is None:
        model, _ = load(wish["model"], **options)
        load_s, start = time.perf_counter() - start, time.perf_counter()
        ids = torch.tensor([_PROMPT], device=model.device)
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=_NUM_NEW, do_sample=False)
        first_s = time.perf_counter() - start
        weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    else:
        plugins = [make_plugin(name, options_) for name, options_ in wish["plugins"].items()]
        pipe = llmopt.build(wish["model"], plugins, load_options=options, max_model_len=1024)
        load_s, start = time.perf_counter() - start, time.perf_counter()
        pipe.batch([_PROMPT], max_new_tokens=_NUM_NEW, ignore_eos=True, progress=False)
        first_s = time.perf_counter() - start
        weight_bytes = executor_weights(pipe)[0] or sum(p.numel() * p.element_size() for p in pipe.model.parameters())
        per_token = sum(shape.bytes_per_token for shape in pipe.kv_cache.shapes.values())
        kv_bytes = pipe.block_pool.num_blocks_for(len(_PROMPT) + _NUM_NEW) * pipe.block_pool.block_size * per_token
    resident, peak, file = status_bytes(["VmRSS", "VmHWM", "RssFile"])
    return Footprint(
        wish["name"], import_s, load_s, first_s, imports_bytes, resident, peak, file, weight_bytes, kv_bytes
    )


def executor_weights(pipe: Any) -> tuple[int | None, str | None]:
    """Bytes and type of the weights that a pipeline's executor brought along; None where it uses the model's own."""
    if pipe.why_not is not None:
        return None, None
    inner = pipe.registry.chains["execute"].objects[0]
    weight_bytes = getattr(inner, "weight_bytes", None)
    return (None if weight_bytes is None else int(weight_bytes)), getattr(inner, "weight_dtype", None)


def executor_format(pipe: Any) -> str | None:
    """How the weights are stored that a pipeline's executor brought along; None where it uses the model's own."""
    if pipe.why_not is not None:
        return None
    found: str | None = getattr(pipe.registry.chains["execute"].objects[0], "weight_format", None)
    return found


if __name__ == "__main__":
    from dataclasses import asdict

    print(json.dumps(asdict(measure_here(json.loads(sys.argv[1])))))

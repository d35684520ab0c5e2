"""``llmopt bench``: run the comparison, show it, write it down."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmopt.cli.output import console, load_model
from llmopt.cli.plugin_options import parse_plugin
from llmopt.errors import ConfigError, ModelError, PluginConflictError

if TYPE_CHECKING:
    from llmopt.bench.comparison import Result

DEFAULT_WORKLOADS = ("chat", "chat8", "prefix", "edit", "ragged", "host")


def run(
    model_name: str,
    plugin_texts: Sequence[str],
    workload_names: Sequence[str],
    *,
    dtype: str,
    device_map: str | None,
    rounds: int,
    quick: bool,
    max_gap: float,
    json_path: Path | None,
    json_to_stdout: bool,
) -> None:
    """Compare on every workload; exit status 1 when a contender broke its promise about the tokens."""
    plugins = read_plugins(plugin_texts)
    names = list(workload_names or DEFAULT_WORKLOADS)
    _check_names(names)

    from llmopt.bench.environment import environment
    from llmopt.bench.report import json_lines, table

    where = environment()
    passed = True
    for result in _results(model_name, plugins, names, dtype, device_map, rounds, quick, max_gap):
        passed &= result.passed
        records = [json.dumps(record) for record in json_lines(result, model_name, where)]
        if json_to_stdout:
            print("\n".join(records), flush=True)
        else:
            console().print(table(result))
        if json_path is not None:
            with json_path.open("a", encoding="utf-8") as file:
                file.write("\n".join(records) + "\n")
    if not passed:
        console(stderr=True).print(
            "At least one contender did not keep its promise about the tokens.", style="bold red"
        )
        raise SystemExit(1)


def read_plugins(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Plugin name to options, in the order of the command line.

    :raises PluginError: a text that cannot be read, or a plugin given twice.
    """
    plugins: dict[str, dict[str, Any]] = {}
    for spec in map(parse_plugin, texts):
        if spec.name in plugins:
            raise PluginConflictError(f"--plugin {spec.name} is given twice. Keep one of them.")
        plugins[spec.name] = spec.options
    return plugins


def _check_names(names: Sequence[str]) -> None:
    from llmopt.bench.workloads import WORKLOADS

    known = [*WORKLOADS, "host"]
    for name in names:
        if name not in known:
            raise ConfigError(f"no workload is called {name!r}. Workloads: {', '.join(known)}.")


def _results(
    model_name: str,
    plugins: dict[str, dict[str, Any]],
    names: Sequence[str],
    dtype: str,
    device_map: str | None,
    rounds: int,
    quick: bool,
    max_gap: float,
) -> Iterable[Result]:
    from llmopt.bench.comparison import contenders_for, float32_copy
    from llmopt.bench.workloads import WORKLOADS

    ordinary = [name for name in names if name != "host"]
    if ordinary:
        model, tokenizer = load_model(model_name, dtype=dtype, device_map=device_map)
        if tokenizer is None:
            raise ModelError(f"{model_name} has no tokenizer, and the workloads are text. Use --workload host.")
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 4096
        max_model_len = min(int(context), 8192)
        reference = float32_copy(model)
        with contenders_for(model, tokenizer, plugins, max_model_len=max_model_len) as contenders:
            for name in ordinary:
                workload = WORKLOADS[name]
                yield compare_with_progress(
                    contenders,
                    name,
                    lambda number, workload=workload: workload.batch(tokenizer, number, max_model_len, quick=quick),
                    dtype=_dtype_name(model),
                    rounds=rounds,
                    reference=reference,
                    max_gap=max_gap,
                )
    if "host" in names:
        from llmopt.bench.host import MAX_MODEL_LEN, host_batch, host_model

        small = host_model()
        with contenders_for(small, None, plugins, max_model_len=MAX_MODEL_LEN) as contenders:
            yield compare_with_progress(
                contenders,
                "host",
                lambda number: host_batch(number, small.config.vocab_size, quick=quick),
                dtype=_dtype_name(small),
                rounds=rounds,
            )


def compare_with_progress(contenders: Any, name: str, make_batch: Any, *, rounds: int, **options: Any) -> Result:
    """`llmopt.bench.comparison.compare` behind a progress bar on stderr."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from llmopt.bench.comparison import compare

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as progress:
        task = progress.add_task(name, total=len(contenders) * (rounds + 1))

        def advance(step: str) -> None:
            progress.update(task, advance=1, description=f"{name}: {step}")

        return compare(contenders, name, make_batch, rounds=rounds, on_progress=advance, **options)


def _dtype_name(model: Any) -> str:
    return str(model.dtype).removeprefix("torch.")

"""``llmopt train-drafter``: a `Session` with bars, and what came of it."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from llmopt.errors import ConfigError
from llmopt.hub import load
from llmopt_plugins.speculation.training.session import Outcome, Reporter, Session, Settings
from llmopt_plugins.speculation.training.trainer import Progress, Recipe


def run(settings: Settings, out: Path, work: Path, *, force: bool, dtype: str, device_map: str | None) -> None:
    """Train, judge, export, and say so.

    :raises ConfigError: the model has no tokenizer, the work folder is of another training, or see `Settings.check`.
    :raises CannotPayError: the break-even says that it is no use.
    """
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    settings.check(out, work)  # before the model is loaded
    model, tokenizer = load(settings.model, dtype=dtype, device_map=device_map)
    if tokenizer is None:
        raise ConfigError(f"{settings.model} has no tokenizer, and prompts are text. Save one into its folder.")
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[news]}"), TimeElapsedColumn())
    with Bars(*columns, console=console) as bars:
        outcome = Session(settings, work, model, tokenizer, _reporter(bars)).run(out, force=force)
    _tell(outcome, console)


def _reporter(bars: Bars) -> Reporter:
    tasks: dict[str, TaskID] = {}

    def show(name: str, done: float, total: float, news: str) -> None:
        if name not in tasks:
            tasks[name] = bars.add_task(name, total=total, news="")
        bars.update(tasks[name], completed=done, total=total, news=news)

    def training(progress: Progress, recipe: Recipe) -> None:
        news = f"step {progress.step}, loss {progress.loss:.2f}, first draft right {progress.first_right:.0%}"
        show("training", min(progress.seconds, recipe.budget_s), recipe.budget_s, news)

    return Reporter(
        say=bars.console.print,
        answers=lambda shards, total, tokens: show("answers", shards, total, f"{tokens} tokens"),
        training=training,
    )


def _tell(outcome: Outcome, console: Console) -> None:
    reached = outcome.score["reached"]
    console.print(
        f"held-out prompts, the model's text given: the first 1, 2, ... drafts of a chain are all right in "
        f"{', '.join(f'{p:.0%}' for p in reached)} of places; {1 + sum(reached):.2f} tokens per round"
    )
    console.print(
        f"after {outcome.progress.step} steps in {outcome.progress.epoch} epochs; written to {outcome.folder}"
    )
    plugin = "medusa:heads" if (outcome.folder / "medusa_lm_head.safetensors").is_file() else "eagle:head"
    console.print(f"try it: llmopt tune-spec MODEL --candidate {plugin}={outcome.folder}")

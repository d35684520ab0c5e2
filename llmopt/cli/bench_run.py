"""What the sections of ``llmopt bench`` share: options, the time that is left, and a line that says what goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llmopt.cli.output import console

if TYPE_CHECKING:
    from rich.table import Table

    from llmopt.bench.budget import Budget
    from llmopt.bench.rivals import Rival
    from llmopt.bench.target import Target


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What the command line asks for."""

    dtype: str
    device_map: str | None
    rounds: int  # at most
    budget_s: float
    quick: bool
    max_gap: float


@dataclass(frozen=True, slots=True)
class Section:
    """One workload, measured."""

    table: Table
    records: list[dict[str, Any]]
    passed: bool  # every contender kept its promise about the tokens
    target: Target | None = None  # what the workload was to show


class BenchRun:
    """One run of the command.

    :param plugins: name to options, in the order of the command line.
    :param names: workloads, each once.
    :param where: machine and versions, for every record.
    """

    def __init__(
        self,
        model_name: str,
        plugins: dict[str, dict[str, Any]],
        names: list[str],
        options: BenchOptions,
        budget: Budget,
        where: dict[str, Any],
        rivals: list[Rival],
    ) -> None:
        self.model_name, self.plugins, self.options = model_name, plugins, options
        self.names, self.budget, self.where, self.rivals = names, budget, where, rivals
        self.num_left = len(names)  # workloads that are not measured yet

    @property
    def load_options(self) -> dict[str, Any]:
        """For the loading of the model."""
        return {"dtype": self.options.dtype, "device_map": self.options.device_map}

    @property
    def share_s(self) -> float:
        """Seconds for the next workload."""
        return self.budget.share_s(self.num_left)


@contextmanager
def progress(name: str) -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what is being measured."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as shown:
        task = shown.add_task(name, total=None)
        yield lambda step: shown.update(task, description=f"{name}: {step}")


def dtype_name(model: Any) -> str:
    """Of the model's weights, as people write it."""
    return str(model.dtype).removeprefix("torch.")


def context_length(model: Any) -> int:
    """Tokens that a benchmark lets a sequence of this model have."""
    found = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 4096
    return min(int(found), 8192)


def vocab_size(model: Any) -> int:
    """Ids that prompts are made of."""
    return int(model.config.get_text_config().vocab_size)

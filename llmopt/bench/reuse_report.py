"""Results of `llmopt.bench.reuse` as tables for people and JSON lines for programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from llmopt.bench.reuse import ReuseResult

if TYPE_CHECKING:
    from rich.table import Table


def reuse_table(result: ReuseResult, dtype: str) -> Table:
    """One row per contender."""
    from rich.table import Table

    made = Table(title=f"{result.workload}, {dtype}: {result.title}")
    headings = list(dict.fromkeys(heading for _, figures in result.rows for heading in figures))
    made.add_column("")
    for heading in headings:
        made.add_column(heading, justify="right")
    for name, figures in result.rows:
        made.add_row(name, *(_shown(figures.get(heading, "")) for heading in headings))
    return made


def reuse_lines(result: ReuseResult, model: str, dtype: str, environment: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One record per contender, figures under their headings."""
    for name, figures in result.rows:
        yield {
            "workload": result.workload,
            "contender": name,
            "model": model,
            "dtype": dtype,
            **result.target.record(),
            **figures,
            **environment,
        }


def _shown(value: float | str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"

"""Results as a table for people and as JSON lines for programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from llmopt.bench.measurement import Spread

if TYPE_CHECKING:
    from rich.table import Table

    from llmopt.bench.comparison import Result, Verdict


def table(result: Result) -> Table:
    """One row per contender: medians, with half the range in percent where it matters."""
    from rich.table import Table

    made = Table(title=f"{result.workload}, {result.dtype}, median of {result.rounds}")
    made.add_column("")
    for heading in ("tokens/s", "ms/token", "first token ms", "speed-up", "host µs/step"):
        made.add_column(heading, justify="right", no_wrap=True)
    made.add_column("tokens")
    base = result.timings[0]
    for verdict, timing in zip(result.verdicts, result.timings, strict=True):
        speedup = timing.speedup_over(base)
        made.add_row(
            timing.name,
            f"{timing.tokens_per_s.median:.1f} ±{timing.tokens_per_s.percent:.0f}%",
            f"{timing.ms_per_token.median:.2f}",
            f"{timing.first_token_ms.median:.1f}",
            "1" if timing is base else f"{speedup.median:.2f} ({speedup.low:.2f}-{speedup.high:.2f})",
            f"{timing.outside_us.median:.0f}",
            token_text(verdict),
        )
        if verdict.note:
            made.caption = f"{made.caption or ''}{timing.name} fell back to model.generate: {verdict.note}\n"
    return made


def token_text(verdict: Verdict) -> str:
    """What the token check found, for a table."""
    if verdict.promise == "reference":
        return "reference" if verdict.replay is None else f"reference, {verdict}"
    if verdict.promise == "lossy":
        return f"lossy: {verdict}"
    return str(verdict) if verdict.passed else f"[bold red]BROKEN[/]: {verdict}"


def json_lines(result: Result, model: str, environment: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One record per contender. Times carry their unit in the name; spreads are ``{median, low, high}``."""
    base = result.timings[0]
    for verdict, timing in zip(result.verdicts, result.timings, strict=True):
        yield {
            "workload": result.workload,
            "contender": timing.name,
            "model": model,
            "dtype": result.dtype,
            "rounds": result.rounds,
            "num_tokens": timing.num_tokens,
            "tokens_per_s": _spread(timing.tokens_per_s),
            "ms_per_token": _spread(timing.ms_per_token),
            "first_token_ms": _spread(timing.first_token_ms),
            "speedup": _spread(timing.speedup_over(base)),
            "host_us_per_step": _spread(timing.outside_us),
            "total_s": timing.total_s,
            "promise": verdict.promise,
            "note": verdict.note,
            "tokens_ok": verdict.passed,
            "tokens_identical": verdict.difference is None,
            "agreement": verdict.agreement,
            "mean_kl": verdict.mean_kl,
            "replay_max_gap": None if verdict.replay is None else verdict.replay.max_gap,
            "replay_not_best": None if verdict.replay is None else verdict.replay.num_not_best,
            **environment,
        }


def _spread(spread: Spread) -> dict[str, float]:
    return {"median": spread.median, "low": spread.low, "high": spread.high}

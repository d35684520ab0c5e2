"""Results of `llmopt.bench.serving` as tables for people and JSON lines for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from llmopt.bench.serving import LoadTiming, Stall, StallTiming
from llmopt.bench.target import Target

if TYPE_CHECKING:
    from rich.table import Table

_STALL_P99, _STALL_P99_WITHOUT = 2.5, 10.0  # times the median, with the plugins of scheduling and without
_STALL_COST = 0.05  # of the tokens per second
_GOODPUT = 1.3  # times the baseline's, at the highest load


def stall_target(timings: Sequence[StallTiming], *, quick: bool) -> Target:
    """The target of the last row, which has the plugins."""
    first, last = timings[0], timings[-1]
    cost = 1.0 - max(last.tokens_per_s) / max(first.tokens_per_s)
    is_reached = last.p99_over_p50 <= _STALL_P99 and first.p99_over_p50 > _STALL_P99_WITHOUT and cost <= _STALL_COST
    return Target(
        f"P99 at most {_STALL_P99:g} times the median, without the plugin above {_STALL_P99_WITHOUT:g} times; tokens/s "
        f"within {100 * _STALL_COST:.0f} %",
        f"{last.p99_over_p50:.2f} times, without {first.p99_over_p50:.1f} times; tokens/s {-100 * cost:+.1f} %",
        None if quick else is_reached,
    )


def load_target(name: str, timings: Sequence[LoadTiming], *, quick: bool) -> Target | None:
    """The target of the highest load; the others have none."""
    base, others = timings[0], timings[1:]
    if name != "arrivals95" or not others:
        return None
    ratios = {timing.name.removeprefix("+ "): timing.goodput / max(base.goodput, 1e-9) for timing in others}
    figure = ", ".join(f"{ratio:.2f} times with {label}" for label, ratio in ratios.items())
    if not base.goodput:
        figure = "no request of the baseline is good; " + ", ".join(f"{t.goodput:.2f}/s with {t.name}" for t in others)
    reached = max(ratios.values()) >= _GOODPUT
    return Target(f"goodput at least {_GOODPUT:g} times that without plugins", figure, None if quick else reached)


def stall_table(stall: Stall, timings: Sequence[StallTiming], dtype: str) -> Table:
    """One row per contender, the best round of each figure."""
    from rich.table import Table

    rounds = len(timings[0].p99_s)
    made = Table(
        title=f"stall, {dtype}: {stall.num_streams} streams, a prompt of {stall.long_prompt:,} tokens arrives; "
        f"best of {rounds}",
        caption="ITL: ms between two tokens of a stream, around the prompt; calm: before; TTFT: of the prompt",
    )
    made.add_column("")
    for heading in (
        "calm ITL",
        "calm P99",
        "ITL P50",
        "ITL P99",
        "ITL max",
        "P99/calm",
        "P99/P50",
        "TTFT ms",
        "tokens/s",
        "",
    ):
        made.add_column(heading, justify="right", no_wrap=True)
    base = max(timings[0].tokens_per_s)
    for timing in timings:
        made.add_row(
            timing.name,
            *(_ms(min(v)) for v in (timing.calm_s, timing.calm_p99_s, timing.median_s, timing.p99_s, timing.largest_s)),
            f"{timing.ratio:.2f}",
            f"{timing.p99_over_p50:.2f}",
            f"{1e3 * min(timing.first_token_s):.0f}",
            f"{max(timing.tokens_per_s):.0f}",
            f"{100 * (max(timing.tokens_per_s) / base - 1):+.1f}%",
        )
    return made


def stall_lines(
    stall: Stall,
    timings: Sequence[StallTiming],
    target: Target,
    model: str,
    dtype: str,
    environment: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    """One record per contender; times in milliseconds, one value per round."""
    for timing in timings:
        yield {
            "workload": "stall",
            "contender": timing.name,
            "model": model,
            "dtype": dtype,
            "num_streams": stall.num_streams,
            "long_prompt": stall.long_prompt,
            "calm_itl_ms": [1e3 * s for s in timing.calm_s],
            "calm_itl_p99_ms": [1e3 * s for s in timing.calm_p99_s],
            "itl_p50_ms": [1e3 * s for s in timing.median_s],
            "itl_p99_ms": [1e3 * s for s in timing.p99_s],
            "itl_max_ms": [1e3 * s for s in timing.largest_s],
            "p99_over_calm": timing.ratio,
            "p99_over_p50": timing.p99_over_p50,
            "long_ttft_ms": [1e3 * s for s in timing.first_token_s],
            "tokens_per_s": timing.tokens_per_s,
            **target.record(),
            **environment,
        }


def load_table(name: str, load: float, rate: float, timings: Sequence[LoadTiming], dtype: str) -> Table:
    """One row per contender."""
    from rich.table import Table

    capacity = timings[0].capacity
    made = Table(
        title=f"{name}, {dtype}: {len(timings[0].traces)} requests at {rate:.2f} per s, {100 * load:.0f} % of "
        f"{capacity.requests_per_s:.2f}",
        caption=f"good: first token within {1e3 * capacity.first_token_limit_s:.0f} ms and no gap above "
        f"{1e3 * capacity.gap_limit_s:.0f} ms",
    )
    made.add_column("")
    for heading in ("tokens/s", "TTFT P50", "TTFT P99", "ITL P50", "ITL P99", "good", "goodput/s", ""):
        made.add_column(heading, justify="right", no_wrap=True)
    for timing in timings:
        made.add_row(
            timing.name,
            f"{timing.tokens_per_s:.1f}",
            *(_ms(timing.first_token_s(share)) for share in (0.5, 0.99)),
            *(_ms(timing.gap_s(share)) for share in (0.5, 0.99)),
            f"{100 * timing.num_good / len(timing.traces):.0f}%",
            f"{timing.goodput:.2f}",
            f"x{timing.goodput / timings[0].goodput:.2f}" if timings[0].goodput else "",
        )
    return made


def load_lines(
    name: str,
    load: float,
    rate: float,
    timings: Sequence[LoadTiming],
    target: Target | None,
    model: str,
    dtype: str,
    environment: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    """One record per contender; times in milliseconds."""
    for timing in timings:
        yield {
            "workload": name,
            "contender": timing.name,
            "model": model,
            "dtype": dtype,
            "load": load,
            "requests_per_s": rate,
            "capacity_per_s": timing.capacity.requests_per_s,
            "num_requests": len(timing.traces),
            "tokens_per_s": timing.tokens_per_s,
            **{f"ttft_p{round(100 * p)}_ms": 1e3 * timing.first_token_s(p) for p in (0.5, 0.99)},
            **{f"itl_p{round(100 * p)}_ms": 1e3 * timing.gap_s(p) for p in (0.5, 0.99)},
            "ttft_limit_ms": 1e3 * timing.capacity.first_token_limit_s,
            "gap_limit_ms": 1e3 * timing.capacity.gap_limit_s,
            "num_good": timing.num_good,
            "goodput_per_s": timing.goodput,
            **(target.record() if target is not None else {}),
            **environment,
        }


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"

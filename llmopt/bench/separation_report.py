"""Results of `llmopt.bench.separation` as a table for people and JSON lines for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from llmopt.bench.separation import PARTS, Agreement, Separation, SeparationTiming
from llmopt.bench.target import Target

if TYPE_CHECKING:
    from rich.table import Table


def separation_table(
    setting: Separation, timings: Sequence[SeparationTiming], agreements: Sequence[Agreement], dtype: str
) -> Table:
    """One row per pipeline."""
    from rich.table import Table

    made = Table(
        title=f"separation, {dtype}: {setting.num_streams} streams alone, then beside prompts of "
        f"{setting.long_prompt:,} tokens; {len(timings[0].tokens_per_s['alone'])} rounds",
        caption="P50, P99: ms between two tokens of a stream; TTFT: of the prompts; tok/s: of the streams",
    )
    made.add_column("")
    for heading in (
        *(f"{part} {quantile}" for part in PARTS for quantile in ("P50", "P99")),
        "ratio",
        "TTFT ms",
        "tok/s alone",
        "beside",
        "tokens",
    ):
        made.add_column(heading, justify="right", no_wrap=True)
    for timing, agreement in zip(timings, agreements, strict=True):
        made.add_row(
            timing.name,
            *(f"{1e3 * timing.gap_s(part, share):.1f}" for part in PARTS for share in (0.5, 0.99)),
            f"{timing.ratio:.2f}",
            f"{1e3 * timing.first_token_p50_s:.0f}",
            *(f"{timing.rate(part):.0f}" for part in PARTS),
            agreement.word,
        )
    return made


def separation_lines(
    setting: Separation,
    timings: Sequence[SeparationTiming],
    agreements: Sequence[Agreement],
    target: Target,
    model: str,
    dtype: str,
    environment: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    """One record per pipeline; times in milliseconds."""
    for timing, agreement in zip(timings, agreements, strict=True):
        yield {
            "workload": "separation",
            "contender": timing.name,
            "model": model,
            "dtype": dtype,
            "num_streams": setting.num_streams,
            "long_prompt": setting.long_prompt,
            **{
                f"{part}_itl_p{round(100 * share)}_ms": 1e3 * timing.gap_s(part, share)
                for part in PARTS
                for share in (0.5, 0.99)
            },
            "p99_ratio": timing.ratio,
            "ttft_p50_ms": 1e3 * timing.first_token_p50_s,
            **{f"{part}_tokens_per_s": timing.rate(part) for part in PARTS},
            "tokens": agreement.word,
            "num_outputs": agreement.num_outputs,
            "num_other_outputs": agreement.num_others,
            "replay_max_gap": agreement.gap,
            **target.record(),
            **environment,
        }

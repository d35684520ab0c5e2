"""Streams beside prompts of other processes: what is counted, and what reaches the target."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from rich.console import Console

from llmopt.bench.separation import Separation, SeparationTiming, run_separation, separation_target
from llmopt.bench.separation_report import separation_lines, separation_table
from tests.llmopt.helpers import build_tiny

SMALL = Separation(num_streams=2, stream_prompt=4, long_prompt=40, part_s=0.1, max_model_len=4096)


def timing(name: str, alone: float, beside: float, ids: list[int]) -> SeparationTiming:
    return SeparationTiming(
        name, {"alone": [alone], "beside": [beside]}, {"alone": [9.0], "beside": [8.0]}, [0.5], [ids], [[7]]
    )


def test_every_pipeline_decodes_alone_and_beside_prompts_with_the_same_tokens() -> None:
    options: dict[str, Any] = {"max_model_len": 4096, "changes": {"max_position_embeddings": 4096}}
    builders = [
        (name, partial(build_tiny, plugins=plugins, **options))
        for name, plugins in (("llmopt", []), ("+ chunked_prefill", ["chunked_prefill:chunk_size=16"]))
    ]
    found = run_separation(builders, SMALL, 0.0)
    assert [one.name for one in found] == ["llmopt", "+ chunked_prefill"]
    for one in found:
        assert all(one.gaps_s[part] and one.rate(part) > 0 for part in ("alone", "beside"))
        assert len(one.stream_ids) == 2
        assert one.long_ids
        assert one.first_token_p50_s > 0
        assert one.has_tokens_of(found[0])
    target = separation_target(found, quick=True)
    assert target.reached is None
    records = list(separation_lines(SMALL, found, target, "tiny", "float32", {"commit": "c"}))
    assert json.loads(json.dumps(records)) == records
    console = Console(width=220, record=True)
    console.print(separation_table(SMALL, found, "float32"))
    assert "+ chunked_prefill" in console.export_text()


@pytest.mark.parametrize(
    ("last", "reached"),
    [
        (timing("b", 1.0, 1.1, [1, 2, 3]), True),
        (timing("b", 1.0, 1.2, [1, 2, 3]), False),
        (timing("b", 1.0, 1.0, [1, 2, 4]), False),  # another token
        (timing("b", 1.0, 1.0, [1, 2]), True),  # fewer, which is a matter of time
    ],
)
def test_the_target_wants_the_same_tokens_and_gaps_as_without_prompts(last: SeparationTiming, reached: bool) -> None:
    assert separation_target([timing("a", 1.0, 20.0, [1, 2, 3]), last], quick=False).reached is reached


def test_the_setting_fits_the_model() -> None:
    assert Separation().fitted(8192, quick=False) == Separation()
    small = Separation().fitted(256, quick=True)
    assert small.long_prompt + 2 < small.max_model_len == 256

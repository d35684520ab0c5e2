"""Streams beside prompts of other processes: what is counted, and what reaches the target."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
from rich.console import Console

from llmopt.bench.separation import (
    Agreement,
    Separation,
    SeparationTiming,
    compare_tokens,
    run_separation,
    separation_target,
)
from llmopt.bench.separation_report import separation_lines, separation_table
from llmopt.testing import tiny_model
from tests.llmopt.helpers import build_tiny

SMALL = Separation(num_streams=2, stream_prompt=4, long_prompt=40, part_s=0.1, max_model_len=4096)


PROMPT = [5, 6]


def timing(name: str, alone: float, beside: float, ids: list[int]) -> SeparationTiming:
    gaps, rates = {"alone": [alone], "beside": [beside]}, {"alone": [9.0], "beside": [8.0]}
    return SeparationTiming(name, gaps, rates, [0.5], [(PROMPT, ids)], [(PROMPT, [7])])


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
        assert len(one.streams) == 2
        assert [len(ids) for _, ids in one.prompts[:3]] == [8, 8, 1]
        assert one.first_token_p50_s > 0
    agreements = [compare_tokens(found[0], one, lambda: None, 0.0) for one in found]
    assert all(one.passed and one.num_outputs >= 5 and one.word == "same" for one in agreements)
    target = separation_target(found, agreements[-1], quick=True)
    assert target.reached is None
    records = list(separation_lines(SMALL, found, agreements, target, "tiny", "float32", {"commit": "c"}))
    assert json.loads(json.dumps(records)) == records
    console = Console(width=220, record=True)
    console.print(separation_table(SMALL, found, agreements, "float32"))
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
    first = timing("a", 1.0, 20.0, [1, 2, 3])
    agreement = compare_tokens(first, last, lambda: None, 0.5)
    assert separation_target([first, last], agreement, quick=False).reached is reached


def test_outputs_that_part_are_replayed_and_near_ties_are_told_from_other_tokens() -> None:
    model = tiny_model()
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0, -1]
    ranked = logits.argsort(descending=True).tolist()
    gaps = (logits.max() - logits).tolist()
    first = timing("a", 1.0, 1.0, [ranked[0]])
    near = compare_tokens(first, timing("b", 1.0, 1.0, [ranked[1]]), lambda: model, gaps[ranked[1]] + 1e-3)
    assert (near.passed, near.word, near.num_others, near.num_outputs) == (True, "near-ties", 1, 2)
    assert near.gap == pytest.approx(gaps[ranked[1]], abs=1e-4)
    far = compare_tokens(first, timing("b", 1.0, 1.0, [ranked[-1]]), lambda: model, gaps[ranked[1]] + 1e-3)
    assert (far.passed, far.word) == (False, "others")
    assert "other tokens (1 of 2 outputs part" in str(far)
    # what the baseline itself needs, twice, is allowed whatever the bound
    rough = compare_tokens(timing("a", 1.0, 1.0, [ranked[2]]), timing("b", 1.0, 1.0, [ranked[1]]), lambda: model, 0.0)
    assert rough.passed
    assert str(Agreement(5, 0)) == "same tokens"


def test_the_setting_fits_the_model() -> None:
    assert Separation().fitted(8192, quick=False) == Separation()
    small = Separation().fitted(256, quick=True)
    assert small.long_prompt + 2 < small.max_model_len == 256

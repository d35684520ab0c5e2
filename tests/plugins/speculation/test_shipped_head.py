"""The head that ships for the demo model: found, whole, worth having. A broken drafter still writes correct text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import llmopt
from llmopt.testing import tiny_model
from llmopt_plugins.speculation import eagle
from llmopt_plugins.speculation.eagle import Eagle
from llmopt_plugins.speculation.eagle.checkpoint import shipped_head
from llmopt_plugins.speculation.training.prompts import builtin_prompts

HEADS = Path(eagle.__file__).parent / "heads"


def test_no_head_ships_for_a_model_that_nobody_knows() -> None:
    assert shipped_head(tiny_model()) is None


def test_shipped_heads_are_small() -> None:
    folders = [path.parent for path in HEADS.glob("*/config.json")]
    assert folders
    for folder in folders:
        assert sum(file.stat().st_size for file in folder.iterdir()) < 12e6


@pytest.mark.model
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_demo_model_has_a_head_whatever_its_dtype(dtype: str) -> None:
    model, _ = llmopt.load("demo", dtype=dtype)
    assert shipped_head(model) == HEADS / "smollm2-135m-instruct"


@pytest.mark.model
@pytest.mark.native
def test_the_shipped_head_gives_enough_tokens_per_round_on_topics_that_it_never_saw() -> None:
    prompts: Any = builtin_prompts().held_out[300:308]
    with llmopt.build("demo", ["native", Eagle(fixed=12)], load_options={"dtype": "bfloat16"}) as pipe:
        pipe.batch(prompts, max_new_tokens=64, progress=False)
        found = pipe.stats()["propose.eagle"]
    assert found["rounds"] > 50
    assert found["tokens_per_round"] >= 1.9

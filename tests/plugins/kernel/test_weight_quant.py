"""weight_quant: fewer bits, a small loss, and options that are checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import llmopt
from llmopt.bench.quality import Quality, pipeline_logits, plain_logits, text_ids
from llmopt.errors import PluginOptionError, PluginRequirementError
from llmopt.plugin_search import make_plugin
from llmopt_plugins.kernel.weight_quant import WeightQuant
from tests.equivalence.packed_configs import tiny_packed_model
from tests.equivalence.test_packed_models import PROMPTS
from tests.plugins.kernel.native.test_families import last_logits


@pytest.mark.parametrize(
    "options",
    [{"bits": 3}, {"bits": "8"}, {"group": 16}, {"bits": 4, "group": 0}, {"head_bits": 16}, {"minimum": 1}],
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    with pytest.raises(PluginOptionError, match=next(iter(set(options) - {"bits"} or {"bits"}))):
        make_plugin("weight_quant", options)


def test_it_needs_the_native_decoder() -> None:
    with pytest.raises(PluginRequirementError, match="'native'"):
        llmopt.build(tiny_packed_model("llama"), ["weight_quant"])


def loss(model: Any, plugin: WeightQuant) -> tuple[float, str]:
    """Mean relative error of the logits over some prompts, and what the pipeline says of itself."""
    with torch.no_grad(), llmopt.build(model, ["native", plugin]) as pipe:
        errors = []
        for prompt in PROMPTS:
            wanted = model(torch.tensor([prompt])).logits[0, -1]
            errors.append(float((last_logits(pipe, prompt) - wanted).norm() / wanted.norm()))
        return sum(errors) / len(errors), pipe.describe().details["native"]


@pytest.mark.native
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt2", "mixtral"])
def test_eight_bits_lose_little_and_four_bits_more(model_type: str) -> None:
    model = tiny_packed_model(model_type)
    eight, told = loss(model, WeightQuant(bits=8))
    assert " int8" in told
    assert "group" not in told
    grouped, told = loss(model, WeightQuant(bits=8, group=32))
    assert " int8_group (groups of 32)" in told
    four, told = loss(model, WeightQuant(bits=4))
    assert "int4_group (groups of 32" in told
    assert 0 < eight < 0.03
    assert 0 < grouped < 0.03
    assert eight < four < 0.5


@pytest.mark.native
def test_a_minimum_takes_away_error_and_larger_groups_add_some() -> None:
    model = tiny_packed_model("qwen3", hidden_size=128, intermediate_size=256)
    small = loss(model, WeightQuant(bits=4, group=32, minimum=False))[0]
    better, told = loss(model, WeightQuant(bits=4, group=32, minimum=True))
    assert "with minimum" in told
    assert better < small
    assert loss(model, WeightQuant(bits=4, group=128, minimum=False))[0] > small


@pytest.mark.native
def test_the_head_has_bits_of_its_own() -> None:
    model = tiny_packed_model("llama")
    told = loss(model, WeightQuant(bits=4, head_bits=4, minimum=False))[1]
    assert "int8" not in told
    told = loss(model, WeightQuant(bits=8, head_bits=4, minimum=False))[1]
    assert "int4_group" in told
    assert "int8" in told


@pytest.mark.native
@pytest.mark.model
@pytest.mark.slow
def test_eight_bits_stay_close_to_the_float32_model(demo_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_folder, dtype=torch.float32)
    ids = text_ids(AutoTokenizer.from_pretrained(demo_folder), 256)
    quality = Quality()
    with llmopt.build(model, ["native", WeightQuant(bits=8)]) as pipe:
        quality.add(plain_logits(model, ids), pipeline_logits(pipe, ids), ids)
    assert 0 < quality.mean_kl < 0.005

"""Every family that the native decoder knows gives the tokens of its own `generate`, with each of its options."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from llmopt import build
from llmopt.pipeline import InferencePipeline
from llmopt.request import Request, SamplingParams
from tests.equivalence.packed_configs import tiny_packed_model
from tests.equivalence.test_packed_models import (
    IDS,
    PROMPTS,
    SAMPLING,
    assert_engine_ran,
    generate,
    sample,
)
from tests.plugins.kernel.native.native_configs import FAMILY_CONFIGS, REPEATING

pytestmark = pytest.mark.native


def family_model(name: str) -> Any:
    model_type, changes = FAMILY_CONFIGS[name]
    return tiny_packed_model(model_type, **changes)


def assert_ran_natively(pipeline: InferencePipeline) -> None:
    assert_engine_ran(pipeline)
    counts = pipeline.stats()["execute.native"]
    assert counts["num_steps"] > 0
    assert counts["num_fallback_rows"] == 0


@pytest.mark.parametrize("name", FAMILY_CONFIGS)
def test_a_family_gives_the_tokens_of_its_own_generate(name: str) -> None:
    model = family_model(name)
    wanted = generate(model)
    if name not in REPEATING:
        assert len(wanted.unique()) >= 8, "the model repeats itself, which proves little"
    with build(model, ["native"]) as pipe:
        assert torch.equal(generate(pipe), wanted)
        for seed, options in enumerate(SAMPLING):
            assert torch.equal(sample(pipe, seed, options), sample(model, seed, options))
        assert_ran_natively(pipe)
    # chunks of 5 tokens, mixed with decodes; blocks of 4, so that rows span several and windows begin inside one
    with build(model, ["native", "paged_kv"], max_tokens_per_step=5, block_size=4) as pipe:
        assert torch.equal(generate(pipe), wanted)
        assert torch.equal(sample(pipe, 3, SAMPLING[0]), sample(model, 3, SAMPLING[0]))
        assert_ran_natively(pipe)


@torch.no_grad()
def last_logits(pipe: InferencePipeline, prompt: list[int]) -> Tensor:
    """Logits after a prompt, ``[vocab]``."""
    request = Request("r", prompt, SamplingParams(max_new_tokens=1), max_len=len(prompt) + 1)
    request.slot = 0
    request.block_table = pipe.block_pool.allocate(pipe.block_pool.num_blocks_for(len(prompt)))
    batch = pipe.batch_builder.build([request], [len(prompt)])
    batch.wants_best = False
    logits = pipe.execute(batch, None)
    assert isinstance(logits, Tensor)
    pipe.block_pool.free(request.block_table)
    return logits[0].clone()


@pytest.mark.parametrize("name", FAMILY_CONFIGS)
@torch.no_grad()
def test_logits_equal_those_of_the_models_forward_up_to_rounding(name: str) -> None:
    model = family_model(name)
    with build(model, ["native"]) as pipe:
        for prompt in PROMPTS:
            wanted = model(torch.tensor([prompt])).logits[0, -1]
            distance = (last_logits(pipe, prompt) - wanted).norm() / wanted.norm()
            assert distance < 1e-5


@pytest.mark.parametrize("name", [name for name in FAMILY_CONFIGS if "-" not in name])
@torch.no_grad()
def test_bfloat16_logits_lie_as_close_to_float32_as_those_of_transformers(name: str) -> None:
    exact = family_model(name)
    model = family_model(name).to(torch.bfloat16)
    exact.load_state_dict(model.state_dict())  # the same rounded weights
    exact.float()
    mine, theirs = [], []
    with build(model, ["native"]) as pipe:
        for prompt in PROMPTS:
            wanted = exact(torch.tensor([prompt])).logits[0, -1]
            mine.append(float((last_logits(pipe, prompt) - wanted).norm() / wanted.norm()))
            theirs.append(float((model(torch.tensor([prompt])).logits[0, -1] - wanted).norm() / wanted.norm()))
    assert sum(mine) <= 1.2 * sum(theirs) + 1e-3
    assert IDS.shape[0] == len(mine)

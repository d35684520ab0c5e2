"""Models that run packed give the tokens of `model.generate`, whatever the batch, the chunks and the blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from llmopt import build
from llmopt.pipeline import InferencePipeline
from llmopt.testing import ScriptedDrafter
from llmopt.testing.drafters import trees
from llmopt.testing.identity import left_padded
from tests.equivalence.packed_configs import PACKED_CONFIGS, tiny_packed_model

NUM_NEW = 14
PROMPTS = [  # ragged; longer and shorter than a window, a block and a chunk
    [5, 9, 33, 7, 21, 60, 11, 12, 13, 4, 8],
    [17, 3, 44, 25],
    [70, 71, 9, 8, 3, 55, 23, 44, 6, 19, 20, 31, 8, 90, 14],
    [42],
]
IDS, MASK = left_padded(PROMPTS)
SAMPLING = ({"temperature": 0.8, "top_p": 0.9, "top_k": 20}, {"temperature": 1.3, "top_p": 0.7, "top_k": 0})


def generate(model: Any, **options: Any) -> Tensor:
    """New tokens ``[B, NUM_NEW]`` of a model or a pipeline."""
    out = model.generate(IDS, attention_mask=MASK, **{"max_new_tokens": NUM_NEW, "do_sample": False, **options})
    new: Tensor = out[:, IDS.shape[1] :]
    return new


def sample(model: Any, seed: int, options: dict[str, Any]) -> Tensor:
    """Same, sampled from a seed."""
    torch.manual_seed(seed)
    return generate(model, do_sample=True, **options)


def assert_engine_ran(pipeline: InferencePipeline) -> None:
    """Nothing fell back, so the tokens are the engine's."""
    assert pipeline.why_not is None
    assert not pipeline.generate.fall_backs
    assert sum(pipeline.generate.calls.values()) > 0


@pytest.mark.parametrize("model_type", PACKED_CONFIGS)
def test_a_packed_model_gives_the_tokens_of_its_own_generate(model_type: str) -> None:
    model = tiny_packed_model(model_type)
    wanted = generate(model)
    assert len(wanted.unique()) >= 8, "the model repeats itself, which proves little"

    with build(model) as pipe:
        assert torch.equal(generate(pipe), wanted)
        for seed, options in enumerate(SAMPLING):
            assert torch.equal(sample(pipe, seed, options), sample(model, seed, options))
        assert_engine_ran(pipe)
        assert pipe.capabilities.layout == "packed"

    # chunks of 5 tokens, mixed with decodes; blocks of 4, so that rows span several and windows begin inside one
    with build(model, max_tokens_per_step=5, block_size=4) as pipe:
        assert torch.equal(generate(pipe), wanted)
        seed, options = len(SAMPLING), SAMPLING[0]
        assert torch.equal(sample(pipe, seed, options), sample(model, seed, options))
        assert_engine_ran(pipe)


@pytest.mark.parametrize("model_type", PACKED_CONFIGS)
def test_drafts_that_are_trees_change_no_token_of_a_packed_model(model_type: str) -> None:
    """Windows, caps, learned positions, and latent attention, which is handed the whole history."""
    model = tiny_packed_model(model_type)
    with build(model, block_size=4) as pipe:
        wanted = [o.token_ids for o in pipe.batch(PROMPTS, max_new_tokens=NUM_NEW, ignore_eos=True, progress=False)]
    answers = {tuple(p): ids for p, ids in zip(PROMPTS, wanted, strict=True)}
    drafter = ScriptedDrafter(trees(answers, 96, 0.9), 9)
    with build(model, [drafter], block_size=4) as pipe:
        outputs = pipe.batch(PROMPTS, max_new_tokens=NUM_NEW, ignore_eos=True, progress=False)
        assert [o.token_ids for o in outputs] == wanted
        assert pipe.stats()["num_steps"] < NUM_NEW

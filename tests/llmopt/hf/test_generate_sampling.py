"""Sampling: the random numbers of torch's global generator, used exactly as `model.generate` uses them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.llmopt.hf.tiny import EOS, PAD, Pair, left_padded, prompts, tiny_gpt2, tiny_llama

FINISH_EARLY = {"eos_token_id": [16, 31, 45, 53, 89], "pad_token_id": PAD}


@pytest.fixture(scope="module", params=[tiny_llama, tiny_gpt2], ids=["llama", "gpt2"])
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param())


@pytest.mark.parametrize("seed", [0, 1, 2**40 + 7])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_seeded_call_draws_the_tokens_of_transformers(pair: Pair, seed: int, rows: int) -> None:
    result, way = pair.same(**left_padded(rows), do_sample=True, max_new_tokens=15, eos_token_id=None, seed=seed)
    assert way == "lockstep"
    assert result.shape == (rows, 22)


def test_logits_keep_their_dtype_whatever_torchs_default_is(pair: Pair) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        _, way = pair.same(**left_padded(3), do_sample=True, max_new_tokens=15, eos_token_id=None, seed=1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert way == "lockstep"


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_finish_early_still_take_their_random_numbers(pair: Pair, seed: int) -> None:
    options = {"do_sample": True, "max_new_tokens": 25, "temperature": 1.5, "top_k": 0}
    result, _ = pair.same(**left_padded(), **options, **FINISH_EARLY, seed=seed)
    ends = [next((i for i, t in enumerate(row) if t in FINISH_EARLY["eos_token_id"]), 99) for row in result[:, 7:]]
    assert len(set(ends)) > 1


@pytest.mark.parametrize("copies", [2, 4])
@pytest.mark.parametrize("options", [{}, FINISH_EARLY, {"repetition_penalty": 1.3, "top_p": 0.8}], ids=str)
def test_several_sequences_per_prompt_are_those_of_transformers(
    pair: Pair, copies: int, options: dict[str, Any]
) -> None:
    kwargs = {"do_sample": True, "num_return_sequences": copies, "max_new_tokens": 12, "temperature": 1.5}
    result, way = pair.same(**left_padded(2), **kwargs, **options, seed=copies)
    assert way == "lockstep"
    assert result.shape[0] == 2 * copies
    assert len({tuple(row) for row in result.tolist()}) > 2


def test_several_sequences_with_scores_and_a_cache_are_those_of_transformers(pair: Pair) -> None:
    pair.same(
        **left_padded(2),
        do_sample=True,
        num_return_sequences=3,
        max_new_tokens=12,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **FINISH_EARLY,
    )


def test_a_second_call_goes_on_in_the_random_stream(pair: Pair) -> None:
    torch.manual_seed(3)
    expected = [type(pair.model).generate(pair.model, prompts(), do_sample=True, max_new_tokens=6) for _ in range(3)]
    torch.manual_seed(3)
    actual = [pair.pipe.generate(prompts(), do_sample=True, max_new_tokens=6) for _ in range(3)]
    assert all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))
    assert not torch.equal(expected[0], expected[1])


def test_a_greedy_call_takes_no_random_numbers(pair: Pair) -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    pair.pipe.generate(prompts(), max_new_tokens=6)
    assert torch.equal(torch.get_rng_state(), before)


def test_building_a_pipeline_takes_no_random_numbers() -> None:
    model = tiny_llama()
    torch.manual_seed(11)
    before = torch.get_rng_state()
    Pair(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_many_rows_in_small_steps_are_the_same(pair: Pair) -> None:
    small = Pair(pair.model, max_tokens_per_step=5)  # prompts in chunks, rows in several steps
    ids = prompts(9, 11)
    for options in ({}, {"do_sample": True}, {"return_dict_in_generate": True, "output_logits": True}):
        small.same(ids, max_new_tokens=9, eos_token_id=EOS, **options)

"""Every form of prompt: the pipeline answers as `model.generate` does, errors and warnings included."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationMixin, StaticCache

from llmopt.errors import InvalidPromptError
from tests.llmopt.hf.tiny import PAD, VOCAB, Pair, left_padded, prompts, tiny_gpt2, tiny_llama

NEW = {"max_new_tokens": 12, "eos_token_id": None}


@pytest.fixture(scope="module", params=[tiny_llama, tiny_gpt2], ids=["llama", "gpt2"])
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param())


def _right_padded() -> dict[str, Any]:
    ids = prompts()
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    return {"input_ids": ids.masked_fill(mask == 0, PAD), "attention_mask": mask}


def _with_holes() -> dict[str, Any]:
    ids = prompts()
    mask = torch.ones_like(ids)
    mask[2, 3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _pads_without_mask(place: slice) -> dict[str, Any]:
    ids = prompts()
    ids[1, place] = PAD
    return {"input_ids": ids}


def _positions(shift: int) -> dict[str, Any]:
    inputs = left_padded()
    mask = inputs["attention_mask"]
    return {**inputs, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0) + shift}


HOLES = "the attention mask has holes or right padding"

FORMS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "left padding and mask": (left_padded, "native"),
    "mask of bool": (lambda: {**left_padded(), "attention_mask": left_padded()["attention_mask"].bool()}, "native"),
    "mask of float": (lambda: {**left_padded(), "attention_mask": left_padded()["attention_mask"].float()}, "native"),
    "ids of int32": (lambda: {"input_ids": prompts().int()}, "native"),
    "one row": (lambda: {"input_ids": prompts(rows=1)}, "native"),
    "one token": (lambda: {"input_ids": prompts(rows=2, width=1)}, "native"),
    "equal rows": (lambda: {"input_ids": prompts(rows=1).repeat(3, 1)}, "native"),
    "common left padding": (
        lambda: {"input_ids": prompts(2, 5), "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]])},
        "native",
    ),
    "no mask, pads on the left": (lambda: _pads_without_mask(slice(0, 2)), "native"),
    "no mask, pad inside": (lambda: _pads_without_mask(slice(3, 4)), HOLES),
    "no mask, pad is eos": (lambda: {**_pads_without_mask(slice(0, 2)), "eos_token_id": PAD}, "native"),
    "no mask, pad is one of the eos": (lambda: {**_pads_without_mask(slice(0, 2)), "eos_token_id": [9, PAD]}, "native"),
    "right padding": (_right_padded, HOLES),
    "mask with holes": (_with_holes, HOLES),
    "mask values above one": (lambda: {**left_padded(), "attention_mask": 2 * left_padded()["attention_mask"]}, HOLES),
    "a row of pads": (
        lambda: {"input_ids": prompts(), "attention_mask": (torch.arange(3) != 1).long()[:, None].repeat(1, 7)},
        "a row is padding only",
    ),
    "nothing": (dict, "native"),
    "position_ids from the mask": (lambda: _positions(0), "native"),
    "position_ids with an offset": (lambda: _positions(3), "native"),
    "position_ids of one row for all": (
        lambda: {"input_ids": prompts(), "position_ids": torch.arange(7)[None]},
        "native",
    ),
    "token_type_ids": (
        lambda: {"input_ids": prompts(), "token_type_ids": torch.ones(3, 7, dtype=torch.long)},
        "native",
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_a_prompt_of_this_form_gives_the_tokens_of_model_generate(pair: Pair, form: str, sampled: bool) -> None:
    make, expected_way = FORMS[form]
    if form == "token_type_ids" and pair.model.config.model_type != "gpt2":
        with pytest.raises(ValueError, match="token_type_ids"):
            pair.pipe.generate(**make(), **NEW)
        return
    result, way = pair.same(**{**NEW, **make()}, do_sample=sampled)
    assert not isinstance(result, Exception)
    assert way == ("lockstep" if sampled and expected_way == "native" else expected_way)


def test_inputs_and_other_arguments_may_be_positional(pair: Pair) -> None:
    config = pair.model.generation_config.__class__(max_new_tokens=5)
    _, way = pair.same(prompts(), config, None, None, lambda row, ids: [5, 6, 7 + row])
    assert way == "lockstep"
    _, way = pair.same(prompts(), config)
    assert way == "native"


def test_inputs_and_input_ids_together_are_an_error(pair: Pair) -> None:
    result, _ = pair.same(prompts(), input_ids=prompts())
    assert isinstance(result, ValueError)


def test_a_batch_without_ids_takes_its_size_from_the_mask(pair: Pair) -> None:
    result, way = pair.same(attention_mask=torch.ones(2, 1, dtype=torch.long), **NEW)
    assert result.shape[0] == 2
    assert way == "native"


def test_no_prompt_and_no_bos_is_transformers_error() -> None:
    pair = Pair(tiny_llama(bos_token_id=None))
    result, _ = pair.same(max_new_tokens=3)
    assert "bos_token_id" in str(result)


def test_an_empty_prompt_is_transformers_error(pair: Pair) -> None:
    result, way = pair.same(torch.empty(1, 0, dtype=torch.long), max_new_tokens=4)
    assert isinstance(result, (RuntimeError, IndexError))
    assert way == "the prompt is empty"


def test_an_empty_batch_is_transformers_error(pair: Pair) -> None:
    result, way = pair.same(torch.empty(0, 5, dtype=torch.long), max_new_tokens=4)
    assert isinstance(result, RuntimeError)
    assert way == "the batch is empty"


@pytest.mark.parametrize(
    ("num_hidden", "way"),
    [(0, "position_ids do not follow the prompt"), (1, "the attention mask is longer than the prompt")],
)
def test_a_mask_that_is_longer_than_the_prompt_does_what_transformers_does(
    pair: Pair, num_hidden: int, way: str
) -> None:
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[0, :num_hidden] = 0
    result, found = pair.same(input_ids=prompts(), attention_mask=mask, **NEW)
    assert found == way
    assert result.shape == (3, 19)


@pytest.mark.parametrize("dims", [3, 4])
def test_a_mask_of_more_than_two_dimensions_is_an_error(pair: Pair, dims: int) -> None:
    result, _ = pair.same(prompts(), attention_mask=torch.ones((3,) + (7,) * (dims - 1), dtype=torch.long))
    assert isinstance(result, ValueError)
    assert "2D" in str(result)


def test_a_mask_per_pair_of_tokens_falls_back_with_its_shape(pair: Pair) -> None:
    mask = torch.ones(3, 1, 7, 7, dtype=torch.bool).tril()
    embeddings = pair.model.get_input_embeddings()(prompts()).detach()
    positions = torch.arange(7).expand(3, 7)
    _, way = pair.same(inputs_embeds=embeddings, attention_mask=mask, position_ids=positions, max_new_tokens=1)
    assert way == "the attention mask has shape [3, 1, 7, 7], and [3, 7] goes with the prompt"


def test_unknown_arguments_are_transformers_error(pair: Pair) -> None:
    result, _ = pair.same(prompts(), max_new_token=3, tempature=0.5)
    assert isinstance(result, ValueError)
    assert "tempature" in str(result)


@pytest.mark.parametrize("limits", [{"max_new_tokens": 0}, {"max_length": 7}, {"max_length": 3}])
def test_no_room_for_a_token_is_transformers_error(pair: Pair, limits: dict[str, int]) -> None:
    result, _ = pair.same(prompts(), **limits)
    assert isinstance(result, ValueError)
    assert next(iter(limits)) in str(result)


@pytest.mark.parametrize("bad", [VOCAB, VOCAB + 1000, -1])
def test_ids_outside_the_vocabulary_are_an_error_that_names_them(pair: Pair, bad: int) -> None:
    ids = prompts()
    ids[1, 2] = bad
    for options in ({}, {"do_sample": True}):
        with pytest.raises(InvalidPromptError, match=f"token id {bad}; the vocabulary of the model is 0 to 127"):
            pair.pipe.generate(ids, max_new_tokens=3, **options)
    assert pair.pipe.block_pool.num_used == 0
    pair.same(prompts(), **NEW)


def test_right_padding_gives_transformers_warning(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    library = logging.getLogger("transformers")
    library.addHandler(caplog.handler)
    try:
        pair.pipe.generate(**_right_padded(), **NEW, pad_token_id=PAD)
    finally:
        library.removeHandler(caplog.handler)
    assert "right-padding was detected" in caplog.text


def test_pads_that_no_vocabulary_holds_are_fine_where_the_mask_hides_them(pair: Pair) -> None:
    inputs = left_padded()
    wanted = pair.pipe.generate(**inputs, **NEW)[:, 7:]
    inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    got = pair.pipe.generate(**inputs, **NEW)
    assert torch.equal(got[:, 7:], wanted)
    assert torch.equal(got[:, :7], inputs["input_ids"])


# ---------------------------------------------------------------------------------------------------------------------
# lengths
# ---------------------------------------------------------------------------------------------------------------------
def test_without_a_limit_twenty_tokens_come(pair: Pair) -> None:
    result, way = pair.same(**left_padded(), eos_token_id=None)
    assert result.shape == (3, 27)
    assert way == "native"


def test_beyond_the_engines_length_the_models_own_loop_runs() -> None:
    pair = Pair(tiny_llama(), max_model_len=16)
    _, way = pair.same(**left_padded(), max_new_tokens=9, eos_token_id=None)
    assert way == "native"
    result, way = pair.same(**left_padded(), max_new_tokens=10, eos_token_id=None)
    assert way == "prompt and new tokens are longer than the engine's limit of 16"
    assert result.shape == (3, 17)


def test_the_limit_counts_tokens_and_not_pads() -> None:
    pair = Pair(tiny_llama(), max_model_len=16)
    inputs = {"input_ids": prompts(2), "attention_mask": torch.tensor([[0] * 4 + [1] * 3, [0] * 5 + [1] * 2])}
    result, way = pair.same(**inputs, max_new_tokens=13, eos_token_id=None)
    assert way == "native"
    assert result.shape == (2, 20)


def test_rows_that_must_advance_together_and_do_not_fit_go_to_the_models_own_loop() -> None:
    model = tiny_llama()
    per_block = 2 * 2 * 12 * 4 * 4 * 2  # keys and values, heads, head size, tokens, bytes, layers
    pair = Pair(model, max_model_len=16, pool_bytes=6 * per_block)
    _, way = pair.same(prompts(4), do_sample=True, max_new_tokens=6)
    assert way == "rows that advance together need more than the pool's 6 blocks"
    _, way = pair.same(prompts(4), max_new_tokens=6)
    assert way == "native"
    pair = Pair(model, max_num_requests=2)
    _, way = pair.same(prompts(4), do_sample=True, max_new_tokens=6)
    assert way == "more rows must advance together than max_num_requests=2"
    _, way = pair.same(prompts(4), max_new_tokens=6)
    assert way == "native"


# ---------------------------------------------------------------------------------------------------------------------
# caches of the caller
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_cache_of_the_caller_is_extended_in_place_and_can_be_used_again(pair: Pair, name: str) -> None:
    results = {}
    for who in (lambda *a, **k: GenerationMixin.generate(pair.model, *a, **k), pair.pipe.generate):
        cache = DynamicCache(config=pair.model.config)
        first = who(prompts(2), **{name: cache}, **NEW)
        assert cache.get_seq_length() == first.shape[1] - 1
        more = torch.cat([first, prompts(2, 3, seed=5)], dim=-1)
        second = who(more, **{name: cache}, **NEW)
        assert cache.get_seq_length() == second.shape[1] - 1
        results[who] = (first, second, cache.layers[1].keys.clone())
    (first, second, keys), (own_first, own_second, own_keys) = results.values()
    assert torch.equal(first, own_first)
    assert torch.equal(second, own_second)
    torch.testing.assert_close(keys, own_keys)
    assert f"{name} is given" in pair.pipe.stats()["fall_backs"]


def test_a_static_cache_of_the_caller_works(pair: Pair) -> None:
    pair.same_from(lambda: ((prompts(2),), {"cache": StaticCache(config=pair.model.config, max_cache_len=32), **NEW}))


def test_a_tuple_as_cache_is_transformers_error(pair: Pair) -> None:
    result, _ = pair.same(prompts(), cache=((torch.zeros(1), torch.zeros(1)),), **NEW)
    assert isinstance(result, ValueError)


# ---------------------------------------------------------------------------------------------------------------------
# models
# ---------------------------------------------------------------------------------------------------------------------
def test_a_bfloat16_model_gives_the_same_tokens_and_float32_scores() -> None:
    pair = Pair(tiny_llama().to(torch.bfloat16))
    with torch.no_grad():
        result, way = pair.serve(
            prompts(2), max_new_tokens=8, return_dict_in_generate=True, output_scores=True, eos_token_id=None
        )
    assert way == "lockstep"
    assert result.error is None
    assert {s.dtype for s in result.value.scores} == {torch.float32}
    # Teacher forcing: each chosen token is the model's own best, or within rounding of it.
    logits = pair.model(result.value.sequences).logits.float()[:, 6:-1]
    chosen = logits.gather(-1, result.value.sequences[:, 7:, None])[..., 0]
    assert bool((chosen >= logits.amax(-1) - 0.05 * logits.std()).all())


def test_a_model_in_training_mode_goes_through_its_own_loop() -> None:
    pair = Pair(tiny_gpt2(resid_pdrop=0.5))
    pair.model.train()
    _, way = pair.same(prompts(), **NEW)
    assert way == "the model is in training mode"
    assert pair.model.training


def test_generate_works_in_inference_mode_and_under_autocast(pair: Pair) -> None:
    with torch.inference_mode():
        _, way = pair.same(**left_padded(), **NEW, do_sample=True, repetition_penalty=1.2)
        assert way == "lockstep"
    with torch.autocast("cpu", torch.bfloat16):
        _, way = pair.same(prompts(1), max_new_tokens=3)
        assert way == "autocast is on, and the KV pool has the model's own dtype"
    _, way = pair.same(**left_padded(), **NEW)
    assert way == "native"


def test_eos_is_the_models_own_where_none_is_given(pair: Pair) -> None:
    endless = pair.pipe.generate(**left_padded(), **{**NEW, "max_new_tokens": 40})
    chosen = int(endless[1, 10])
    kept = pair.model.generation_config.eos_token_id
    pair.model.generation_config.eos_token_id = chosen
    try:
        result, way = pair.same(**left_padded(), max_new_tokens=40)
    finally:
        pair.model.generation_config.eos_token_id = kept
    assert way == "native"
    first = endless[1, 7:].tolist().index(chosen)
    assert result[1, 7 + first :].tolist() == [chosen] + [PAD] * (result.shape[1] - 8 - first)

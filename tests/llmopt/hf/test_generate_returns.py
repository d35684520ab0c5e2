"""What `generate` returns: types, fields, devices, and a cache that can be used again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationMixin, MistralConfig, MistralForCausalLM
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.utils import ModelOutput

from tests.llmopt.hf.tiny import Pair, left_padded, prompts, tiny_gpt2, tiny_llama

FINISH_EARLY = {"eos_token_id": [16, 31, 45, 53, 89]}
NEW = {"max_new_tokens": 10}


def tiny_mistral() -> Any:
    """A sliding window that is shorter than the sequences."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=128, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, sliding_window=6, initializer_range=0.3,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return MistralForCausalLM(config).eval()


@pytest.fixture(scope="module", params=[tiny_llama, tiny_gpt2, tiny_mistral], ids=["llama", "gpt2", "mistral"])
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param())


def test_plain_results_are_long_tensors_with_the_prompt_in_front(pair: Pair) -> None:
    for ids in (prompts(), prompts().int()):
        result, _ = pair.same(ids, **NEW)
        assert type(result) is Tensor
        assert result.dtype == torch.long
        assert result.device == ids.device
        assert not result.requires_grad
        assert torch.equal(result[:, :7], ids.long())


def test_results_do_not_share_memory_with_the_prompt_or_each_other(pair: Pair) -> None:
    ids = prompts()
    kept = ids.clone()
    first = pair.pipe.generate(ids, **NEW)
    second = pair.pipe.generate(ids, **NEW)
    wanted = second.clone()
    first.zero_()
    assert torch.equal(ids, kept)
    assert torch.equal(second, wanted)


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_a_dict_holds_what_was_asked_for_and_none_elsewhere(
    pair: Pair, scores: bool, logits: bool, sampled: bool
) -> None:
    result, way = pair.same(
        **left_padded(),
        **NEW,
        return_dict_in_generate=True,
        output_scores=scores,
        output_logits=logits,
        do_sample=sampled,
        repetition_penalty=1.3,
    )
    assert way == "lockstep"
    assert type(result) is GenerateDecoderOnlyOutput
    assert isinstance(result, ModelOutput)
    assert isinstance(result.scores, tuple) is scores
    assert isinstance(result.logits, tuple) is logits
    assert result.attentions is None
    assert result.hidden_states is None
    assert isinstance(result.cache, DynamicCache)
    assert result.past_key_values is result.cache
    assert result["sequences"] is result.sequences is result[0]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_scores_of_finished_rows_are_those_of_transformers(pair: Pair, sampled: bool) -> None:
    result, _ = pair.same(
        **left_padded(),
        max_new_tokens=30,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        do_sample=sampled,
        **FINISH_EARLY,
    )
    assert len(result.scores) == len(result.logits) == result.sequences.shape[1] - 7


def test_attentions_and_hidden_states_come_from_the_models_own_loop(pair: Pair) -> None:
    model = pair.model
    kept = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        result, way = pair.same(
            **left_padded(), **NEW, return_dict_in_generate=True, output_attentions=True, output_hidden_states=True
        )
    finally:
        model.set_attn_implementation(kept)
    assert way == "output_attentions=True is asked for"
    assert len(result.attentions) == len(result.hidden_states) == 10


def test_transition_scores_are_those_of_transformers(pair: Pair) -> None:
    options = {**left_padded(), **NEW, "return_dict_in_generate": True, "output_scores": True}
    expected = GenerationMixin.generate(pair.model, **options)
    actual = pair.pipe.generate(**options)
    wanted = pair.model.compute_transition_scores(expected.sequences, expected.scores, normalize_logits=True)
    found = pair.model.compute_transition_scores(actual.sequences, actual.scores, normalize_logits=True)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [{}, FINISH_EARLY, {"do_sample": True}], ids=["greedy", "early", "sampled"])
def test_a_returned_cache_can_be_continued_by_transformers(pair: Pair, options: dict[str, Any]) -> None:
    """Pads, of the prompt and of finished rows, are masked as a caller would mask them."""
    inputs = left_padded()
    results = []
    for who in (lambda **k: GenerationMixin.generate(pair.model, **k), pair.pipe.generate):
        torch.manual_seed(0)
        first = who(**inputs, **NEW, **options, pad_token_id=0, return_dict_in_generate=True)
        length = first.sequences.shape[1]
        assert first.cache.get_seq_length() == length - 1
        ids = torch.cat([first.sequences, prompts(3, 4, seed=8)], dim=-1)
        mask = torch.cat([inputs["attention_mask"], torch.ones(3, ids.shape[1] - 7, dtype=torch.long)], dim=-1)
        second = GenerationMixin.generate(
            pair.model, ids, attention_mask=mask, cache=first.cache, max_new_tokens=12, eos_token_id=None
        )
        results.append((first.sequences, second))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert len(set(results[0][1][:, length + 4 :].flatten().tolist())) > 5


def test_a_returned_cache_holds_the_keys_of_transformers_where_the_prompt_is_not_padding(pair: Pair) -> None:
    options = {**left_padded(), **NEW, "return_dict_in_generate": True, "eos_token_id": None}
    expected = GenerationMixin.generate(pair.model, **options).cache
    actual = pair.pipe.generate(**options).cache
    assert type(actual) is type(expected)
    assert len(actual.layers) == len(expected.layers)
    for one, other in zip(expected.layers, actual.layers, strict=True):
        assert type(one) is type(other)
        assert one.keys.shape == other.keys.shape
        for row in range(3):
            real = min(16 - 2 * row, one.keys.shape[2])
            torch.testing.assert_close(other.keys[row, :, -real:], one.keys[row, :, -real:], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(other.values[row, :, -real:], one.values[row, :, -real:], rtol=1e-4, atol=1e-4)


def test_a_returned_cache_belongs_to_the_caller(pair: Pair) -> None:
    options = {**left_padded(), **NEW, "return_dict_in_generate": True}
    cache = pair.pipe.generate(**options).cache
    kept = cache.layers[0].keys.clone()
    pair.pipe.generate(prompts(5, 9, seed=4), max_new_tokens=20)
    assert torch.equal(cache.layers[0].keys, kept)


def test_common_left_padding_stays_in_the_returned_cache(pair: Pair) -> None:
    ids, mask = prompts(2, 6), torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]])
    result, _ = pair.same(ids, attention_mask=mask, **NEW, return_dict_in_generate=True, eos_token_id=None)
    assert result.cache.get_seq_length() == 15

"""Prompts that are more than ids: the same tokens as `model.generate`, in float32, without its loop."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import llmopt
from llmopt.hf.padded import PaddedCall, PaddedPrompt
from llmopt.request import Request, SamplingParams
from tests.equivalence.media_models import MEDIA_TYPES, left_padded, media_model, varied
from tests.equivalence.test_hybrid_models import hybrid_model

NUM_NEW = 14
PROMPTS = [[5, 9, 33, 7, 21, 60, 11], [17, 3, 44, 25], [70], [71, 9, 8, 3, 55, 23, 44, 6, 19]]
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "penalty": {"do_sample": False, "repetition_penalty": 1.3},
    "sampled": {"do_sample": True, "temperature": 0.9},
    "copies": {"do_sample": True, "num_return_sequences": 2},
}


def tiny_llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    return varied(LlamaForCausalLM(config))


def tiny_gpt2() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3)
    return varied(GPT2LMHeadModel(config))


def embedded(model: Any, prompts: list[list[int]] = PROMPTS) -> dict[str, Tensor]:
    """The prompts as embeddings that belong to no ids."""
    inputs = left_padded(prompts)
    with torch.no_grad():
        embeddings = model.get_input_embeddings()(inputs.pop("input_ids"))
    return {"inputs_embeds": embeddings + 0.01, **inputs}


def assert_same(model: Any, pipe: Any, inputs: dict[str, Any], **settings: Any) -> Tensor:
    """Compare a call, and see that the engine served it."""
    settings = {"max_new_tokens": NUM_NEW, **settings}
    torch.manual_seed(3)
    expected = model.generate(**inputs, **settings)
    torch.manual_seed(3)
    got = pipe.generate(**inputs, **settings)
    assert torch.equal(got, expected)
    assert not pipe.generate.fall_backs
    assert pipe.block_pool.num_used == 0
    assert len(set(got[:, -NUM_NEW:].flatten().tolist())) >= 8, "the output is too uniform to prove anything"
    return expected


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("model_type", MEDIA_TYPES)
def test_images_give_the_tokens_of_generate(model_type: str, settings: dict[str, Any]) -> None:
    model, inputs = media_model(model_type)
    pipe = llmopt.build(model, block_size=4)
    expected = assert_same(model, pipe, inputs, **settings)
    torch.manual_seed(3)
    others = {**inputs, "pixel_values": inputs["pixel_values"].flip(-1) * 2}
    assert not torch.equal(model.generate(**others, max_new_tokens=NUM_NEW, **settings), expected), "nobody looks"


def test_tokens_of_an_image_see_each_other() -> None:
    model, inputs = media_model("gemma3")
    causal = {**inputs, "token_type_ids": torch.zeros_like(inputs["input_ids"])}
    settings = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    pipe = llmopt.build(model, block_size=4)
    theirs, ours, other = (
        generate(**given, **settings).logits[0]
        for generate, given in ((model.generate, inputs), (pipe.generate, inputs), (model.generate, causal))
    )
    torch.testing.assert_close(ours, theirs)
    assert float((other - theirs).norm() / theirs.norm()) > 0.01
    assert not pipe.generate.fall_backs


@pytest.mark.parametrize("model_type", MEDIA_TYPES)
def test_text_alone_goes_the_usual_way(model_type: str) -> None:
    model, _ = media_model(model_type)
    pipe = llmopt.build(model, block_size=4)
    assert_same(model, pipe, left_padded(PROMPTS), do_sample=False)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_embeddings_give_the_tokens_of_generate(settings: dict[str, Any]) -> None:
    model = tiny_llama()
    pipe = llmopt.build(model, block_size=4)
    inputs = embedded(model)
    expected = assert_same(model, pipe, inputs, **settings)
    assert expected.shape[1] == NUM_NEW  # new ids only
    both = {**inputs, **left_padded(PROMPTS)}
    assert_same(model, pipe, both, **settings)


@pytest.mark.parametrize("lengths", [{"max_length": 20}, {"max_length": 20, "min_length": 12}, {"min_new_tokens": 3}])
def test_lengths_beside_embeddings_count_as_in_generate(lengths: dict[str, int]) -> None:
    model = tiny_llama()
    pipe = llmopt.build(model, block_size=4)
    settings = {"do_sample": False, "eos_token_id": [9, 33, 50], "max_new_tokens": None, **lengths}
    inputs = embedded(model)
    torch.manual_seed(0)
    assert torch.equal(pipe.generate(**inputs, **settings), model.generate(**inputs, **settings))
    assert not pipe.generate.fall_backs


@pytest.mark.parametrize("model_type", ["lfm2", "mamba2", "qwen3_next", "recurrent_gemma"])
def test_embeddings_of_models_with_states(model_type: str) -> None:
    model = hybrid_model(model_type)
    assert_same(model, llmopt.build(model, block_size=4), embedded(model), do_sample=False)


def test_cache_after_embeddings_holds_the_prompt_too() -> None:
    model = tiny_llama()
    pipe = llmopt.build(model, block_size=4)
    settings = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
    inputs = embedded(model)
    expected, got = model.generate(**inputs, **settings), pipe.generate(**inputs, **settings)
    mask = inputs["attention_mask"].bool()
    for theirs, ours in zip(expected.cache.layers, got.cache.layers, strict=True):
        assert theirs.keys.shape == ours.keys.shape
        new = torch.ones(len(PROMPTS), 4, dtype=torch.bool)
        real = torch.cat([mask, new], dim=1)
        torch.testing.assert_close(ours.keys.transpose(1, 2)[real], theirs.keys.transpose(1, 2)[real])


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_token_types_are_embedded_in_decodes_too(settings: dict[str, Any]) -> None:
    model = tiny_gpt2()
    pipe = llmopt.build(model, block_size=4)
    inputs = left_padded(PROMPTS)
    types = (inputs["input_ids"] * 7 + 3) % 96
    expected = assert_same(model, pipe, {**inputs, "token_type_ids": types}, **settings)
    last_only = types.clone()
    last_only[:, -1] = 1
    torch.manual_seed(3)
    other = model.generate(**inputs, token_type_ids=last_only, max_new_tokens=NUM_NEW, **settings)
    assert not torch.equal(other, expected)


def test_positions_of_the_caller_go_on_where_they_end() -> None:
    model = tiny_llama()
    pipe = llmopt.build(model, block_size=4)
    inputs = left_padded(PROMPTS)
    positions = torch.arange(9) * torch.tensor([[2], [1], [5], [3]])
    assert_same(model, pipe, {**inputs, "position_ids": positions}, do_sample=False)


@pytest.mark.parametrize("make", [tiny_llama, lambda: hybrid_model("lfm2")], ids=["packed", "rows"])
def test_rows_that_cannot_start_together_are_prefilled_again(make: Any) -> None:
    model = make()
    pipe = llmopt.build(model, block_size=4, max_num_requests=3)
    assert_same(model, pipe, embedded(model), do_sample=False)


@pytest.mark.parametrize("make", [tiny_llama, lambda: hybrid_model("lfm2")], ids=["packed", "rows"])
def test_a_preempted_row_is_prefilled_again(make: Any) -> None:
    model = make()
    inputs = embedded(model)
    expected = model.generate(**inputs, max_new_tokens=NUM_NEW, do_sample=False).tolist()
    pipe = llmopt.build(model, block_size=4)
    requests = _requests(inputs)
    for request in requests:
        pipe.add(request)
    for _ in range(5):
        pipe.advance()
    for victim in requests[1:3]:
        assert victim.num_output_tokens == 5
        pipe.allocate.free(victim)
        pipe.queue.preempt(victim)
    pipe.wait(lambda: all(r.is_finished for r in requests))
    assert [r.output_ids for r in requests] == expected


def test_rows_start_in_one_step_whatever_the_budget_and_beside_others() -> None:
    model = tiny_llama()
    inputs = embedded(model)
    pipe = llmopt.build(model, block_size=4, max_tokens_per_step=8)
    plain = Request("plain", PROMPTS[0], SamplingParams(max_new_tokens=9), max_len=16, wants_text=False)
    requests = _requests(inputs)
    for request in (plain, *requests):
        pipe.add(request)
    num_forwards = itertools.count()
    call = requests[0].media.call
    forward = PaddedCall.forward

    def counted(self: PaddedCall, *args: Any) -> Tensor:
        next(num_forwards)
        return forward(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PaddedCall, "forward", counted)
        pipe.wait(lambda: all(r.is_finished for r in (plain, *requests)))
    assert next(num_forwards) == 1
    assert call.lengths == [7, 4, 1, 9]
    ids = torch.tensor(PROMPTS[:1])
    alone = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
    assert plain.output_ids == alone[0, 7:].tolist()
    assert [r.output_ids for r in requests] == model.generate(
        **inputs, max_new_tokens=NUM_NEW, do_sample=False
    ).tolist()


class _MovedPositions(LlamaForCausalLM):
    """Counts from 1."""

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(*args, **kwargs)
        return {**inputs, "position_ids": inputs["position_ids"] + 1}


class _OtherIds(LlamaForCausalLM):
    """Reads the prompt backwards."""

    def prepare_inputs_for_generation(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        ids = input_ids.flip(-1) if kwargs.get("is_first_iteration") else input_ids
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(ids, *args, **kwargs)
        return inputs


class _OtherDecodes(LlamaForCausalLM):
    """Decodes from the token after the last one."""

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(*args, **kwargs)
        return inputs if kwargs.get("is_first_iteration") else {**inputs, "input_ids": inputs["input_ids"] + 1}


class _VirtualTokens(LlamaForCausalLM):
    """Puts embeddings in the place of ids, as prompt learning does."""

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(*args, **kwargs)
        if kwargs.get("is_first_iteration"):
            embeddings = self.get_input_embeddings()(inputs.pop("input_ids"))
            inputs["inputs_embeds"] = embeddings + 0.5
        return inputs


class _MoreInputs(LlamaForCausalLM):
    """Gives its forward a tensor of its own."""

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(*args, **kwargs)
        return {**inputs, "bias": torch.ones(1)}

    def forward(self, *args: Any, bias: Tensor | None = None, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if bias is not None:
            output.logits = -output.logits
        return output


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (_OtherIds, "changes the ids"),
        (_OtherDecodes, "changes the ids"),
        (_VirtualTokens, "changes the ids"),
        (_MoreInputs, "adds bias"),
    ],
)
def test_a_model_that_prepares_other_inputs_is_left_to_its_own_loop(cls: type, reason: str) -> None:
    model = tiny_llama()
    model.__class__ = cls
    ids = torch.tensor([[5, 9, 33, 7], [17, 3, 44, 25]])
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    with llmopt.build(model, block_size=4) as pipe:
        assert torch.equal(pipe.generate(ids, max_new_tokens=6, do_sample=False), expected)
        assert reason in str(pipe.why_not)


class _OwnPositions(LlamaForCausalLM):
    """Counts columns, pads included."""

    def prepare_inputs_for_generation(
        self, *args: Any, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(*args, inputs_embeds=inputs_embeds, **kwargs)
        return {**inputs, "position_ids": None}


def test_a_model_that_moves_the_positions_is_left_to_its_own_loop() -> None:
    model = tiny_llama()
    model.__class__ = _MovedPositions
    pipe = llmopt.build(model, block_size=4)
    assert "changes the positions" in str(pipe.why_not)


def test_positions_that_count_pads_go_on_after_them() -> None:
    model = tiny_llama()
    model.__class__ = _OwnPositions
    pipe = llmopt.build(model, block_size=4)
    assert_same(model, pipe, embedded(model), do_sample=False)
    requests = _requests(embedded(model))
    for request in requests:
        pipe.add(request)
    pipe.advance()
    assert requests[0].media.call.offsets.tolist() == [[2, 5, 8, 0]]
    for request in requests:
        pipe.abort(request)


def test_a_wrong_prompt_raises_what_generate_raises() -> None:
    model, inputs = media_model("llava")
    pipe = llmopt.build(model, block_size=4)
    inputs["pixel_values"] = inputs["pixel_values"][:2]
    with pytest.raises(ValueError) as expected:
        model.generate(**inputs, max_new_tokens=3)
    with pytest.raises(ValueError) as got:
        pipe.generate(**inputs, max_new_tokens=3)
    assert str(got.value) == str(expected.value)
    assert pipe.block_pool.num_used == 0


def _requests(inputs: dict[str, Tensor]) -> list[Request]:
    """Rows of one padded call without `generate` around them."""
    lengths = inputs["attention_mask"].sum(dim=1).tolist()
    width = inputs["attention_mask"].shape[1]
    positions = (inputs["attention_mask"].cumsum(dim=1) - 1).clamp_min(0)
    call = PaddedCall(
        torch.empty((len(lengths), 0), dtype=torch.long),
        {**inputs, "position_ids": positions, "use_cache": True},
        lengths,
        width,
        has_token_types=False,
    )
    sampling = SamplingParams(max_new_tokens=NUM_NEW)
    return [
        Request(
            f"row-{row}",
            [0] * length,
            sampling,
            max_len=length + NUM_NEW,
            media=PaddedPrompt(call, row),
            companions=call,
            wants_text=False,
        )
        for row, length in enumerate(lengths)
    ]

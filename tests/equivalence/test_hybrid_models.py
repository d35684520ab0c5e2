"""Models with recurrent states: the same tokens as `model.generate`, in float32, for ragged batches."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import llmopt
from llmopt.errors import UnsupportedModelError
from llmopt.request import Request, SamplingParams
from tests.equivalence.hybrid_configs import HYBRID_CONFIGS

NUM_NEW = 16
PROMPTS = [
    [5, 9, 33, 7, 21, 60, 11, 12, 13, 4, 8],
    [17, 3, 44, 25],
    [70],
    [71, 9, 8, 3, 55, 23, 44, 6, 19, 20, 31, 8, 90],
]


@cache
def hybrid_model(model_type: str) -> Any:
    """A seeded model whose weights are large enough for varied output."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(model_type, **HYBRID_CONFIGS[model_type])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2 and parameter.std() < 0.05:
                parameter.mul_(4)
    model.generation_config.eos_token_id = None  # every row has the full length
    model.generation_config.pad_token_id = 0
    return model


def left_padded() -> dict[str, Tensor]:
    width = max(map(len, PROMPTS))
    return {
        "input_ids": torch.tensor([[0] * (width - len(p)) + p for p in PROMPTS]),
        "attention_mask": torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS]),
    }


def solo(model: Any, prompt: list[int], num_new: int = NUM_NEW) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    tokens: list[int] = model.generate(ids, attention_mask=mask, max_new_tokens=num_new, do_sample=False)[0].tolist()
    return tokens[len(prompt) :]


def request(name: str, prompt: list[int], num_new: int = NUM_NEW) -> Request:
    sampling = SamplingParams(max_new_tokens=num_new)
    return Request(name, prompt, sampling, max_len=len(prompt) + num_new, wants_text=False)


@pytest.mark.parametrize("model_type", sorted(HYBRID_CONFIGS))
def test_tokens_are_those_of_generate_and_of_each_row_alone(model_type: str) -> None:
    model = hybrid_model(model_type)
    inputs = left_padded()
    expected = model.generate(**inputs, max_new_tokens=NUM_NEW, do_sample=False)
    pipe = llmopt.build(model, block_size=4)
    assert pipe.why_not is None
    assert pipe.capabilities.layout == "rows"
    got = pipe.generate(**inputs, max_new_tokens=NUM_NEW, do_sample=False)
    assert torch.equal(got, expected)
    rows = got[:, inputs["input_ids"].shape[1] :].tolist()
    assert rows == [solo(model, prompt) for prompt in PROMPTS]
    assert len({token for row in rows for token in row}) >= 8, "the output is too uniform to prove anything"
    torch.manual_seed(5)
    expected = model.generate(**inputs, max_new_tokens=NUM_NEW, do_sample=True, temperature=0.8)
    torch.manual_seed(5)
    assert torch.equal(pipe.generate(**inputs, max_new_tokens=NUM_NEW, do_sample=True, temperature=0.8), expected)
    assert not pipe.generate.fall_backs


# One of each kind: state and attention layers, both in one layer, convolutions, states alone, states in the modules.
_KINDS = ("qwen3_next", "falcon_h1", "lfm2", "mamba2", "recurrent_gemma")


@pytest.mark.parametrize("model_type", _KINDS)
def test_requests_that_come_and_go_keep_their_own_states(model_type: str) -> None:
    model = hybrid_model(model_type)
    pipe = llmopt.build(model, block_size=4, max_num_requests=2)
    requests = [
        request(str(i), p, n) for i, (p, n) in enumerate(zip(PROMPTS * 2, [3, 9, 1, 5, 7, 2, 12, 4], strict=True))
    ]
    for number, one in enumerate(requests):
        pipe.add(one)
        for _ in range(number % 3):
            pipe.advance()
    pipe.wait(lambda: all(r.is_finished for r in requests))
    for one in requests:
        assert one.error is None
        assert one.output_ids == solo(model, one.prompt_ids, one.num_output_tokens)


@pytest.mark.parametrize("model_type", _KINDS)
def test_a_preempted_request_computes_its_states_again(model_type: str) -> None:
    model = hybrid_model(model_type)
    pipe = llmopt.build(model, block_size=4)
    requests = [request(str(i), p) for i, p in enumerate(PROMPTS)]
    for one in requests:
        pipe.add(one)
    for _ in range(4):
        pipe.advance()
    for victim in (requests[1], requests[3]):
        pipe.allocate.free(victim)
        pipe.queue.preempt(victim)
    pipe.wait(lambda: all(r.is_finished for r in requests))
    assert [r.output_ids for r in requests] == [solo(model, p) for p in PROMPTS]


@pytest.mark.parametrize("model_type", _KINDS)
def test_states_of_a_failed_forward_are_not_used(model_type: str) -> None:
    model = hybrid_model(model_type)
    pipe = llmopt.build(model, block_size=4)
    requests = [request(str(i), p) for i, p in enumerate(PROMPTS)]
    for one in requests:
        pipe.add(one)
    for _ in range(3):
        pipe.advance()
    layer = model.get_decoder().layers[-1] if hasattr(model.get_decoder(), "layers") else model.backbone.layers[-1]
    calls = []

    def fail_once(*_: object) -> None:
        if not calls:
            calls.append(1)
            raise RuntimeError("no memory")

    hook = layer.register_forward_pre_hook(fail_once)  # the layers before have advanced their states by then
    try:
        pipe.wait(lambda: all(r.is_finished for r in requests))
    finally:
        hook.remove()
    assert calls
    assert [r.output_ids for r in requests] == [solo(model, p) for p in PROMPTS]


@pytest.mark.parametrize("model_type", ["bamba", "falcon_h1", "lfm2", "mamba", "mamba2", "qwen3_next", "zaya"])
def test_returned_cache_continues_in_generate(model_type: str) -> None:
    model = hybrid_model(model_type)
    inputs = left_padded()
    settings = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    expected = model.generate(**inputs, **settings)
    pipe = llmopt.build(model, block_size=4)
    got = pipe.generate(**inputs, **settings)
    assert not pipe.generate.fall_backs
    assert len(pipe.queue.free_slots) == pipe.config.scheduling.max_num_requests
    outputs = []
    for result in (expected, got):
        mask = torch.cat([inputs["attention_mask"], torch.ones(len(PROMPTS), 6, dtype=torch.long)], dim=1)
        outputs.append(
            model.generate(result.sequences, attention_mask=mask, cache=result.cache, max_new_tokens=6, do_sample=False)
        )
    assert torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("model_type", _KINDS)
def test_calls_in_and_out_of_inference_mode_follow_each_other(model_type: str) -> None:
    model = hybrid_model(model_type)
    inputs = left_padded()
    expected = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    with torch.inference_mode():
        pipe = llmopt.build(model, block_size=4)
    for is_on in (True, True, False, True, False):
        with torch.inference_mode(is_on):
            assert torch.equal(pipe.generate(**inputs, max_new_tokens=5, do_sample=False), expected)
            states_are_kept = model_type != "recurrent_gemma"
            settings = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": states_are_kept}
            pipe.generate(**inputs, **settings)


def test_module_states_are_left_as_they_were() -> None:
    model = hybrid_model("recurrent_gemma")
    pipe = llmopt.build(model, block_size=4)
    solo(model, PROMPTS[0], 3)
    blocks = [m for m in model.modules() if "conv1d_state" in vars(m)]
    before = [m.conv1d_state for m in blocks]
    pipe.generate(**left_padded(), max_new_tokens=3, do_sample=False)
    assert before[0] is not None
    assert all(m.conv1d_state is state for m, state in zip(blocks, before, strict=True))


def test_a_scheduler_that_splits_prompts_is_told() -> None:
    pipe = llmopt.build(hybrid_model("lfm2"), block_size=4, max_tokens_per_step=8)
    pipe.schedule.can_chunk = True
    one = request("long", PROMPTS[0])
    pipe.add(one)
    while not one.is_finished:
        pipe.advance()
    assert isinstance(one.error, UnsupportedModelError)
    assert "in one piece" in str(one.error)

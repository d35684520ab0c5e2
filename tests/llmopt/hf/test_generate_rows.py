"""Rows of one call of generate: each is what it would be alone, from its first token to what fills it at the end."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import llmopt
from llmopt.testing import scripted_model, tiny_model, tiny_prompts
from llmopt.testing.identity import left_padded
from tests.llmopt.helpers import alone


@pytest.mark.parametrize("kind", ["gpt2", "llama", "opt"])
@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.2}])
def test_rows_of_a_left_padded_batch_have_the_tokens_of_their_single_runs(kind: str, settings: dict[str, Any]) -> None:
    model = tiny_model(kind)
    prompts = [p[:n] for p, n in zip(tiny_prompts(3, min_length=17, max_length=17), (3, 9, 17), strict=True)]
    ids, mask = left_padded(prompts)
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": -1, **settings}
    with llmopt.build(model, block_size=4) as pipe:
        batch = pipe.generate(ids, attention_mask=mask, **options)
        for row, prompt in zip(batch, prompts, strict=True):
            single = pipe.generate(torch.tensor([prompt]), **options)[0, len(prompt) :]
            assert torch.equal(row[17:], single)
            assert torch.equal(single, model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :])
        assert not pipe.generate.fall_backs


@pytest.mark.parametrize("pad", [0, 2])
def test_a_row_that_has_ended_is_filled_with_the_pad_id(pad: int) -> None:
    model = scripted_model([([7, 8], [11, 12]), ([9], list(range(20, 30)))])
    model.generation_config.pad_token_id = pad
    ids, mask = left_padded([[7, 8], [9]])
    with llmopt.build(model, block_size=4) as pipe:
        out = pipe.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False)
        assert out[0, 2:].tolist() == [11, 12, 2] + [pad] * 7
        assert out[1, 2:].tolist() == list(range(20, 30))
        assert torch.equal(out, model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False))
        assert alone(pipe, [7, 8], max_new_tokens=10) == [11, 12, 2]  # the end counts, what fills does not


def test_an_end_of_minus_one_never_comes_and_is_no_index_from_the_end() -> None:
    model = tiny_model("gpt2")
    ids = torch.tensor([[5, 6, 7]])
    with llmopt.build(model, block_size=4) as pipe:
        out = pipe.generate(ids, min_new_tokens=4, max_new_tokens=8, eos_token_id=-1, do_sample=False)
        assert out.shape == (1, 11)
        model.generation_config.eos_token_id = None
        assert torch.equal(out, pipe.generate(ids, max_new_tokens=8, do_sample=False))


def test_embeddings_return_new_tokens_only_and_a_penalty_over_them_warns(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model()
    ids = torch.tensor([tiny_prompts(1, min_length=9)[0]])
    embeds = model.get_input_embeddings()(ids).detach()
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    with llmopt.build(model, block_size=4) as pipe:
        plain = pipe.generate(ids, **options)
        assert torch.equal(pipe.generate(inputs_embeds=embeds, **options), plain[:, ids.shape[1] :])
        penalty = {**options, "repetition_penalty": 1.3}
        with caplog.at_level(logging.WARNING), pytest.warns(UserWarning, match="inputs_embeds"):
            got = pipe.generate(inputs_embeds=embeds, **penalty)
        assert torch.equal(got, model.generate(inputs_embeds=embeds, **penalty))


# -- the real model -------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def demo(demo_fp32: Any) -> Any:
    model, tokenizer = demo_fp32
    with llmopt.build(model, tokenizer=tokenizer, max_model_len=512, max_num_requests=8) as pipe:
        yield pipe


FRANCE = [504, 3575, 282, 4649, 314]
ANSWER = [7042, 30, 198, 198, 504, 2988]


@pytest.mark.model
@pytest.mark.parametrize(("strings", "count"), [(["zq"], 6), (["Par"], 1), ([".\n\nThe"], 5)])
def test_stop_strings_end_a_row_with_the_token_that_completes_them(demo: Any, strings: list[str], count: int) -> None:
    ids = torch.tensor([FRANCE] * 3)
    out = demo.generate(ids, max_new_tokens=6, stop_strings=strings, tokenizer=demo.tokenizer, do_sample=False)
    assert out[:, 5:].tolist() == [ANSWER[:count]] * 3


@pytest.mark.model
def test_an_empty_list_of_stop_strings_is_transformers_error_and_means_none_elsewhere(demo: Any) -> None:
    ids = torch.tensor([FRANCE])
    for call in (demo.model.generate, demo.generate):
        with pytest.raises(ValueError, match="Stop string preprocessing"):
            call(ids, max_new_tokens=6, stop_strings=[], tokenizer=demo.tokenizer, do_sample=False)
    assert alone(demo, FRANCE, stop=[], max_new_tokens=6) == ANSWER


@pytest.mark.model
def test_stop_strings_without_a_tokenizer_are_an_error_that_says_so(demo: Any) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        demo.generate(torch.tensor([FRANCE]), max_new_tokens=6, stop_strings=["zq"])


@pytest.mark.model
def test_right_padding_gives_transformers_tokens_and_its_warning_and_lists_need_none(
    demo: Any, caplog: pytest.LogCaptureFixture
) -> None:
    talks = [[{"role": "user", "content": t}] for t in ("Hi.", "Name three colours of the rainbow, please.")]
    prompts = [demo.tokenize(talk) for talk in talks]
    width = max(map(len, prompts))
    ids = torch.tensor([p + [2] * (width - len(p)) for p in prompts])
    mask = torch.tensor([[1] * len(p) + [0] * (width - len(p)) for p in prompts])
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    with caplog.at_level(logging.WARNING):
        got = demo.generate(ids, **options)
    assert "right-padding was detected" in caplog.text
    assert torch.equal(got, demo.model.generate(ids, **options))
    outputs = demo.batch(prompts, max_new_tokens=6, ignore_eos=True, progress=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        row = torch.tensor([prompt])  # a mask, else the end of each turn passes for padding
        single = demo.model.generate(
            row, attention_mask=torch.ones_like(row), max_new_tokens=6, eos_token_id=-1, do_sample=False
        )
        assert output.token_ids == single[0, len(prompt) :].tolist()

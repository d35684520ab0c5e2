from __future__ import annotations

import re
from typing import Any

import pytest

from llmopt.bench.workloads import WORKLOADS


class WordTokenizer:
    """One id per word or run of spaces; just enough of a tokenizer for the workloads."""

    chat_template = None

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [self.ids.setdefault(word, len(self.ids)) for word in re.findall(r"\s+|\S+", text)]}

    def decode(self, ids: list[int]) -> str:
        words = list(self.ids)
        return "".join(words[token] for token in ids)


class ChatTokenizer(WordTokenizer):
    """The same with a template that marks who speaks."""

    chat_template = "marks"

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> dict[str, list[int]]:
        return self(" ".join(f"<{message['role']}> {message['content']}" for message in messages))


@pytest.fixture(params=[WordTokenizer, ChatTokenizer])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return request.param()


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("max_model_len", [64, 512, 8192])
def test_every_request_fits_the_model(name: str, quick: bool, max_model_len: int, tokenizer: Any) -> None:
    size = WORKLOADS[name].quick if quick else WORKLOADS[name].size
    batch = WORKLOADS[name].batch(tokenizer, 3, max_model_len, quick=quick)
    assert len(batch) == size.num_requests
    for request in batch:
        assert request.prompt_ids
        assert 1 <= request.max_new_tokens <= size.max_new_tokens
        assert len(request.prompt_ids) <= size.max_prompt_tokens
        assert len(request.prompt_ids) + request.max_new_tokens <= max_model_len


@pytest.mark.parametrize("name", WORKLOADS)
def test_two_rounds_share_no_prompt(name: str, tokenizer: Any) -> None:
    prompts = [
        tuple(request.prompt_ids) for turn in range(6) for request in WORKLOADS[name].batch(tokenizer, turn, 8192)
    ]
    assert len(set(prompts)) == len(prompts)


def shared_start(rows: list[list[int]]) -> int:
    return next(
        (index for index, column in enumerate(zip(*rows, strict=False)) if len(set(column)) > 1), min(map(len, rows))
    )


def test_prefix_requests_share_most_of_their_prompt_between_rounds(tokenizer: Any) -> None:
    rows = [request.prompt_ids for turn in (1, 2) for request in WORKLOADS["prefix"].batch(tokenizer, turn, 8192)]
    assert shared_start(rows) > 0.9 * max(map(len, rows))


def test_document_requests_part_early_so_that_a_cache_cannot_help(tokenizer: Any) -> None:
    rows = [WORKLOADS["document"].batch(tokenizer, turn, 8192)[0].prompt_ids for turn in (1, 2)]
    assert shared_start(rows) < 16 < len(rows[0])


def test_a_cut_document_keeps_its_question(tokenizer: Any) -> None:
    (request,) = WORKLOADS["document"].batch(tokenizer, 0, 8192, quick=True)
    assert len(request.prompt_ids) <= 512
    assert tokenizer.decode(request.prompt_ids).rstrip().endswith("why was it dearer than planned?")


def test_ragged_prompts_and_outputs_differ_widely(tokenizer: Any) -> None:
    batch = WORKLOADS["ragged"].batch(tokenizer, 0, 8192)
    prompts = [len(request.prompt_ids) for request in batch]
    outputs = [request.max_new_tokens for request in batch]
    assert max(prompts) > 10 * min(prompts)
    assert sorted(outputs) == [8, 16, 24, 32, 40, 48, 56, 64]
    assert outputs != sorted(outputs)


def test_edit_prompts_contain_the_text_to_repeat(tokenizer: Any) -> None:
    texts = [tokenizer.decode(WORKLOADS["edit"].batch(tokenizer, turn, 8192)[0].prompt_ids) for turn in range(4)]
    assert [word in text for text, word in zip(texts, ["market", "garden", "def ", "harbour"], strict=True)] == [
        True
    ] * 4

"""The workloads that benchmarks run on: real text, one batch of requests each.

    chat        short questions of different kinds
    document    one long document, then a question about it
    prefix      many questions behind one long system prompt, as a service sees them
    edit        texts to be repeated with a small change: the output copies the input
    ragged      prompts and outputs of very different length in one batch

A workload makes a fresh batch for every round: a number in the text keeps rounds apart, so that a cache cannot answer a
round with what it kept from the one before. In ``prefix`` the number stands in the question and not in the system
prompt, because there the shared text is what stays the same in real life.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TAIL_TOKENS = 48  # of a message that is cut, so many last tokens are kept


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One prompt, as ids, and how many tokens to generate."""

    prompt_ids: list[int]
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class Size:
    """How large a workload is made."""

    num_requests: int  # rows of the batch
    max_prompt_tokens: int  # long texts are cut to this
    max_new_tokens: int  # per request; the longest one in `ragged`


@dataclass(frozen=True, slots=True)
class Workload:
    """A named source of batches."""

    name: str
    summary: str  # one line for tables
    size: Size  # at full size
    quick: Size  # with --quick
    prompts: Callable[[int, int], list[list[dict[str, str]]]]  # (round, num_requests) -> chat messages per request
    lengths: Callable[[int, int], list[int]]  # (num_requests, max_new_tokens) -> new tokens per request

    def batch(
        self, tokenizer: PreTrainedTokenizerBase, round_number: int, max_model_len: int, *, quick: bool = False
    ) -> list[BenchRequest]:
        """The requests of one round.

        :param max_model_len: the longest sequence the model takes; prompts and outputs are scaled to stay below it.
        """
        size = self.quick if quick else self.size
        lengths = self.lengths(size.num_requests, min(size.max_new_tokens, max(1, max_model_len // 4)))
        room = min(size.max_prompt_tokens, max_model_len - max(lengths) - 1)
        return [
            BenchRequest(_encode(tokenizer, messages, room), length)
            for messages, length in zip(self.prompts(round_number, size.num_requests), lengths, strict=True)
        ]


def _encode(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], max_tokens: int) -> list[int]:
    """Chat messages as ids, through the tokenizer's template when it has one.

    What is too long loses the middle of its longest message: the question at its end stays.
    """
    ids = _template(tokenizer, messages)
    if len(ids) <= max_tokens:
        return ids
    longest = max(range(len(messages)), key=lambda index: len(messages[index]["content"]))
    content = _plain(tokenizer, messages[longest]["content"])
    keep = max(1, len(content) - (len(ids) - max_tokens))
    shorter = [dict(message) for message in messages]
    tail = min(_TAIL_TOKENS, keep // 2)
    shorter[longest]["content"] = str(tokenizer.decode(content[: keep - tail] + content[len(content) - tail :]))
    return _template(tokenizer, shorter)[-max_tokens:]  # cutting inside a word may leave a token too many


def _template(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    if getattr(tokenizer, "chat_template", None):
        encoded: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])
    return _plain(tokenizer, "\n\n".join(message["content"] for message in messages))


def _plain(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text)["input_ids"])


@cache
def _text(name: str) -> str:
    return files("llmopt.bench").joinpath("texts", name).read_text(encoding="utf-8").strip()


def _lines(name: str) -> list[str]:
    return _text(name).splitlines()


def _pick(items: list[str], round_number: int, count: int) -> list[str]:
    start = round_number * count
    return [items[(start + index) % len(items)] for index in range(count)]


def _user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def _chat(round_number: int, count: int) -> list[list[dict[str, str]]]:
    questions = _pick(_lines("chat.txt"), round_number, count)
    return [_user(f"({round_number}.{row}) {question}") for row, question in enumerate(questions)]


_DOCUMENT_QUESTIONS = [
    "What did the season cost, and why was it dearer than planned?",
    "Which work was not done, and what should be done first in spring?",
    "What did the crew learn about freight?",
    "Summarise what was done to the lens.",
]


def _document(round_number: int, count: int) -> list[list[dict[str, str]]]:
    questions = _pick(_DOCUMENT_QUESTIONS, round_number, count)
    return [
        _user(f"Copy {round_number}.{row} of a report follows.\n\n{_text('document.txt')}\n\nQuestion: {question}")
        for row, question in enumerate(questions)
    ]


def _prefix(round_number: int, count: int) -> list[list[dict[str, str]]]:
    system = {"role": "system", "content": _text("system_prompt.txt")}
    questions = _pick(_lines("questions.txt"), round_number, count)
    return [
        [system, {"role": "user", "content": f"(ticket {round_number}.{row}) {question}"}]
        for row, question in enumerate(questions)
    ]


_EDITS = [
    "Repeat the following text word for word, but write every number as digits.",
    "Copy the text below exactly and change only the month to June.",
    "Write out the following again without changing anything except the first word, which becomes 'Please'.",
    "Repeat this text exactly, and put a full stop at the end.",
]


def _edit(round_number: int, count: int) -> list[list[dict[str, str]]]:
    texts = _pick([text.strip() for text in _text("rewrite.txt").split("---")], round_number, count)
    orders = _pick(_EDITS, round_number, count)
    return [
        _user(f"Task {round_number}.{row}. {order}\n\n{text}")
        for row, (order, text) in enumerate(zip(orders, texts, strict=True))
    ]


def _ragged(round_number: int, count: int) -> list[list[dict[str, str]]]:
    document, questions = _text("document.txt"), _lines("chat.txt")
    prompts = []
    for row in range(count):
        share = (row % 4) ** 2 * len(document) // 27  # a line, then 1/27, 4/27 and a third of the document
        question = questions[(round_number + row) % len(questions)]
        prompts.append(_user(f"({round_number}.{row}) {document[:share]}\n\n{question}"))
    return prompts


def _equal(count: int, max_new_tokens: int) -> list[int]:
    return [max_new_tokens] * count


def _spread(count: int, max_new_tokens: int) -> list[int]:
    """From an eighth of the longest output to all of it, neighbours far apart."""
    return [max(1, max_new_tokens * (1 + (row * 5) % 8) // 8) for row in range(count)]


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("chat", "1 short question", Size(1, 256, 64), Size(1, 256, 16), _chat, _equal),
        Workload("chat8", "8 short questions in one batch", Size(8, 256, 64), Size(4, 256, 16), _chat, _equal),
        Workload("document", "a long document, then a question", Size(1, 4096, 32), Size(1, 512, 8), _document, _equal),
        Workload("prefix", "questions behind one system prompt", Size(8, 2048, 32), Size(4, 512, 8), _prefix, _equal),
        Workload("edit", "texts to repeat with a small change", Size(1, 1024, 96), Size(1, 512, 24), _edit, _equal),
        Workload("ragged", "prompts and outputs of all lengths", Size(8, 2048, 64), Size(4, 512, 16), _ragged, _spread),
    )
}

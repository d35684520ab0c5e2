"""Text in and text out: what is tokenized, what is held back, and what ends a text."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import random
import time
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import llmopt
from llmopt.baseline.application import BaselineDetokenize, BaselineTokenize
from llmopt.errors import InvalidPromptError, ModelError
from llmopt.pipeline import InferencePipeline
from llmopt.request import Request, SamplingParams
from llmopt.testing import scripted_model, tiny_tokenizer
from tests.llmopt.helpers import assert_idle

PROMPT = "go"
WORDS = ["Hello", " world", "foo", "END", "bar", "baz", "\n", " one", " two", ".", " ,", " n't", "é", "<tool>"]


HALF = "ð"  # how a vocabulary writes byte F0, the first of four


def word_tokenizer(**options: Any) -> Any:
    """Ids 3 ... are `WORDS`; 0, 1 and 2 are special, and so is ``<tool>``. Bytes that no word covers follow."""
    vocab = {"<pad>": 0, "<bos>": 1, "<eos>": 2}
    marks = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for word in WORDS:
        vocab["".join(piece for piece, _ in marks.pre_tokenize_str(word))] = len(vocab)
    vocab["foo" + HALF] = len(vocab)
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab.setdefault(letter, len(vocab))
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer, raw.decoder = marks, decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>",
        additional_special_tokens=["<tool>"], **options,
    )  # fmt: skip


def word_ids(*words: str) -> list[int]:
    return [3 + WORDS.index(word) for word in words]


def say(script: list[int], tokenizer: Any = None) -> InferencePipeline:
    """A pipeline that answers the prompt ``[7, 8]`` with these ids."""
    tokenizer = tokenizer or word_tokenizer()
    return llmopt.build(scripted_model([([7, 8], script)], tokenizer), tokenizer=tokenizer, block_size=4)


def both(pipe: InferencePipeline, **options: Any) -> tuple[str, Any]:
    """Streamed text and batch output of the same request, whose texts must be equal."""
    pieces = list(pipe.stream([7, 8], **options))
    (output,) = pipe.batch([[7, 8]], progress=False, **options)
    assert "".join(pieces) == output.text
    assert "" not in pieces
    assert_idle(pipe)
    return output.text, output


# -- what ends a text -----------------------------------------------------------------------------
@pytest.mark.parametrize("skip", [True, False])
def test_the_special_id_that_ends_the_output_cuts_nothing_from_the_text(skip: bool) -> None:
    with say([*word_ids("Hello", " world"), 2, *word_ids("foo")]) as pipe:
        text, output = both(pipe, ignore_eos=True, stop_token_ids=[2], skip_special_tokens=skip, max_new_tokens=9)
    assert text == "Hello world"
    assert output.token_ids == [*word_ids("Hello", " world"), 2]
    assert (output.finish_reason, output.stop_reason) == ("stop", 2)


def test_an_ordinary_stop_id_is_no_text_either() -> None:
    (end,) = word_ids("END")
    with say(word_ids("foo", "END", "bar")) as pipe:
        text, output = both(pipe, stop_token_ids=[end], max_new_tokens=9)
    assert (text, output.token_ids, output.stop_reason) == ("foo", word_ids("foo", "END"), end)


@pytest.mark.parametrize("stop", [{"stop": ["\n"]}, {"stop_token_ids": word_ids("\n")}])
def test_nothing_ends_the_output_before_the_minimum(stop: dict[str, Any]) -> None:
    script = word_ids("foo", "\n", "bar", "\n", "baz", " one", "\n", " two", "\n", "bar", "foo", "foo")
    with say(script) as pipe:
        _, output = both(pipe, min_new_tokens=6, max_new_tokens=12, **stop)
        assert len(output.token_ids) == 7
        assert output.finish_reason == "stop"
        _, output = both(pipe, max_new_tokens=12, **stop)
        assert len(output.token_ids) == 2


def test_eos_is_impossible_before_the_minimum() -> None:
    with say(word_ids("foo")) as pipe:  # then the script ends
        _, output = both(pipe, min_new_tokens=6, max_new_tokens=12)
    assert len(output.token_ids) == 7
    assert 2 not in output.token_ids[:6]


@pytest.mark.parametrize(
    ("stop", "text", "count", "reason"),
    [
        (["END"], "foo", 2, "END"),
        (["Dba"], "fooEN", 3, "Dba"),
        (["ob", "oEND"], "fo", 2, "oEND"),
        (["baz", "ENDbar"], "foo", 3, "ENDbar"),
        (["bazz"], "fooENDbarbaz", 5, 2),
        (["f"], "", 1, "f"),
    ],
)
def test_the_first_stop_string_cuts_the_text_wherever_tokens_begin_and_end(
    stop: list[str], text: str, count: int, reason: str | int
) -> None:
    with say(word_ids("foo", "END", "bar", "baz")) as pipe:
        got, output = both(pipe, stop=stop, max_new_tokens=9)
    assert got == text
    assert len(output.token_ids) == count
    assert output.stop_reason == reason


@pytest.mark.parametrize(
    ("stop", "pieces", "reason"),
    [
        ("END!", ["foo", "ENDbar"], "length"),  # held back until it is decided
        ("o", ["f"], "stop"),
        ("ENDbar", ["foo"], "stop"),
        ("barx", ["foo", "END", "bar"], "length"),  # released at the end
    ],
)
def test_what_may_become_a_stop_string_is_not_streamed_before_it_is_decided(
    stop: str, pieces: list[str], reason: str
) -> None:
    with say(word_ids("foo", "END", "bar")) as pipe:
        assert list(pipe.stream([7, 8], stop=[stop], max_new_tokens=3)) == pieces
        assert both(pipe, stop=[stop], max_new_tokens=3)[1].finish_reason == reason


def test_a_stop_string_that_the_last_token_completes_is_found() -> None:
    with say(word_ids("foo", "END")) as pipe:
        _, output = both(pipe, stop=["END"], max_new_tokens=2)
    assert (output.text, output.finish_reason, output.stop_reason) == ("foo", "stop", "END")


def test_nothing_follows_a_stop_string_although_bytes_of_a_character_are_held_back_behind_it() -> None:
    vocab = word_tokenizer().get_vocab()
    with say([vocab["foo" + HALF], *[vocab[HALF]] * 3, *word_ids("END")]) as pipe:
        text, output = both(pipe, stop=["foo"], max_new_tokens=5)
    assert text == ""
    assert output.stop_reason == "foo"


# -- stream and batch say the same ----------------------------------------------------------------
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("clean_up", [True, False])
def test_stream_and_batch_agree_on_special_tokens_and_blanks(skip: bool, clean_up: bool) -> None:
    script = word_ids("Hello", " ,", " n't", "<tool>", " one", ".", " ,")
    with say(script, word_tokenizer(clean_up_tokenization_spaces=clean_up)) as pipe:
        text, _ = both(pipe, skip_special_tokens=skip, max_new_tokens=9)
        copies = pipe.batch([[7, 8]], skip_special_tokens=skip, max_new_tokens=9, n=2, progress=False)
    assert text == "Hello , n't" + ("" if skip else "<tool>") + " one. ,"
    assert [c.text for c in copies] == [text, text]


def test_random_ids_give_the_text_of_one_decode_whatever_the_pieces() -> None:
    tokenizer = tiny_tokenizer()
    chooser = random.Random(0)
    for _ in range(300):
        pool = [chooser.choice(["é", "日", "🔥", "a", " ", "\ufffd", "👩‍👩‍👧"]).encode() for _ in range(8)]
        data = b"".join(part if chooser.random() < 0.8 else bytes([chooser.randrange(256)]) for part in pool)
        ids = [3 + byte for byte in data]
        cut = chooser.randint(1, 4)
        assert grow(BaselineDetokenize(tokenizer), [65], ids, step=cut)[0] == tokenizer.decode([65, *ids])[1:]


def grow(
    detokenize: BaselineDetokenize, prompt: list[int], ids: list[int], step: int = 1, **options: Any
) -> tuple[str, list[str]]:
    """Give ids to a detokenizer in steps; the text and the pieces."""
    made = Request("r", prompt, SamplingParams(**options), len(prompt) + len(ids))
    pieces = []
    for start in range(0, len(ids), step):
        for token in ids[start : start + step]:
            made.append(token)
        if made.num_tokens == made.max_len:
            made.finish("length")
        pieces.append(detokenize(made))
    return "".join(pieces), pieces


# -- characters of several tokens -----------------------------------------------------------------
SPLIT = {
    "flame": [10813, 238, 115],
    "japanese": [23274, 115, 40993, 179, 120, 248],
    "family": [10813, 235, 118, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117],
}


@pytest.mark.model
@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_character_arrives_whole_however_many_tokens_it_takes(demo_fp32: Any, name: str, step: int) -> None:
    _, tokenizer = demo_fp32
    text, pieces = grow(BaselineDetokenize(tokenizer), [504], SPLIT[name], step)
    assert text == tokenizer.decode(SPLIT[name])
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("step", [1, 2, 3, 7])
def test_tokens_without_text_inside_a_character_do_not_tear_it(step: int) -> None:
    tokenizer = tiny_tokenizer()
    nothing = 300
    assert tokenizer.decode([nothing]) == ""
    first, second, third = (3 + byte for byte in "堃".encode())
    ids = [first, nothing, nothing, second, nothing, third, *(3 + byte for byte in b" ok")]
    text, _ = grow(BaselineDetokenize(tokenizer), [65], ids, step)
    assert text == tokenizer.decode(ids) == "堃 ok"


def test_a_character_of_several_tokens_is_one_piece_of_a_stream() -> None:
    tokenizer = tiny_tokenizer()
    text = "a🔥é日b"
    model = scripted_model([("hi", text)], tokenizer)
    with llmopt.build(model, tokenizer=tokenizer) as pipe:
        assert list(pipe.stream("hi", max_new_tokens=40)) == list(text)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 50])
def test_bytes_that_can_never_be_text_are_released_after_a_few_tokens(count: int) -> None:
    tokenizer = tiny_tokenizer()
    ids = [3 + 0x80] * count + [3 + byte for byte in b" ok"]
    text, pieces = grow(BaselineDetokenize(tokenizer), [65], ids)
    assert text == tokenizer.decode(ids)
    assert any(pieces[:5])


def test_work_per_token_stays_constant_over_bytes_that_are_no_text() -> None:
    class Counting:
        """Counts how many ids are decoded."""

        def __init__(self) -> None:
            self.inner = tiny_tokenizer()
            self.longest = 0

        def decode(self, ids: list[int], **options: Any) -> str:
            self.longest = max(self.longest, len(ids))
            text: str = self.inner.decode(ids, **options)
            return text

    for ids in ([3 + 0x80] * 2000, [3 + byte for byte in "日🔥".encode()] * 300, [3 + 0xF0] * 2000):
        counting: Any = Counting()
        text, _ = grow(BaselineDetokenize(counting), [65] * 1000, ids)
        assert counting.longest <= 16
        assert text == tiny_tokenizer().decode(ids)


def test_half_a_character_at_the_end_of_the_prompt_is_completed_and_the_prompt_is_not_repeated() -> None:
    tokenizer = tiny_tokenizer()
    flame = [3 + byte for byte in "🔥".encode()]
    for before in ([3 + byte for byte in b"Weather: "], []):
        for half in (1, 2, 3):
            prompt = before + flame[:half]
            text, _ = grow(BaselineDetokenize(tokenizer), prompt, flame[half:] + [3 + byte for byte in b" ok"])
            assert text == "🔥 ok"


@pytest.mark.model
def test_half_a_character_at_the_end_of_a_real_prompt_is_completed(demo_fp32: Any) -> None:
    _, tokenizer = demo_fp32
    for before in (tokenizer("Weather: ")["input_ids"], []):
        text, _ = grow(BaselineDetokenize(tokenizer), [*before, 10813, 238], [115, *tokenizer(" ok")["input_ids"]])
        assert text == "🔥 ok"


@pytest.mark.model
def test_random_ids_of_a_real_tokenizer_give_the_text_of_one_decode(demo_fp32: Any) -> None:
    _, tokenizer = demo_fp32
    chooser = random.Random(1)
    prompt = tokenizer("The capital")["input_ids"]
    for _ in range(60):
        ids = [chooser.choice([chooser.randrange(49152), chooser.randrange(300), 10813, 238, 115]) for _ in range(30)]
        whole = tokenizer.decode(prompt + ids, skip_special_tokens=True)[len("The capital") :]
        assert grow(BaselineDetokenize(tokenizer), prompt, ids)[0] == whole


# -- the real model -------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def demo(demo_fp32: Any) -> Any:
    model, tokenizer = demo_fp32
    with llmopt.build(model, tokenizer=tokenizer, max_model_len=512, max_num_requests=8) as pipe:
        yield pipe


@pytest.mark.model
@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [(".\n\nThe answer", " Paris", "stop"), (".\n\nThe reply", " Paris.\n\nThe answer", "length")],
)
def test_a_stop_string_over_several_tokens_is_held_back_and_then_cut_or_released(
    demo: Any, stop: str, text: str, reason: str
) -> None:
    options: dict[str, Any] = {"stop": [stop], "max_new_tokens": 6, "repetition_penalty": 1.0}
    pieces = list(demo.stream("The capital of France is", **options))
    (output,) = demo.batch(["The capital of France is"], progress=False, **options)
    assert "".join(pieces) == output.text == text
    assert output.finish_reason == reason
    if reason == "stop":
        assert pieces == [" Paris"]


@pytest.mark.model
def test_a_penalty_over_the_prompt_gives_the_ids_of_transformers(demo: Any) -> None:
    prompt = "one two three one two three one"
    requests = [{"prompt": prompt}, {"prompt": prompt, "repetition_penalty": 1.3}]
    plain, penalized = demo.batch(requests, max_new_tokens=8, progress=False)
    assert plain.token_ids == [827, 29, 17891, 282, 260, 970, 1187, 260]
    assert penalized.token_ids == [29, 11355, 2976, 1856, 282, 253, 12796, 28]


@pytest.mark.model
def test_text_parts_of_a_message_give_the_ids_of_their_joined_text(demo: Any) -> None:
    plain = demo.tokenize([{"role": "user", "content": "hi there"}])
    parts = [{"type": "text", "text": "hi"}, {"type": "text", "text": " there"}]
    assert demo.tokenize([{"role": "user", "content": parts}]) == plain
    assert plain == demo.tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi there"}], add_generation_prompt=True, tokenize=True, return_dict=False
    )


@pytest.mark.model
def test_the_end_of_turn_inside_a_prompt_is_attended_although_it_is_the_pad_id(demo: Any) -> None:
    turns = [("user", "Say one word."), ("assistant", "Blue."), ("user", "Another.")]
    talk = [{"role": role, "content": text} for role, text in turns]
    ids = demo.tokenize(talk)
    assert ids.count(2) == 4
    (output,) = demo.batch([talk], max_new_tokens=6, progress=False)
    assert output.prompt_ids == ids
    row = torch.tensor([ids])
    wanted = demo.model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=6, do_sample=False)
    assert output.token_ids == wanted[0, len(ids) :].tolist()
    assert torch.equal(demo.generate(row, max_new_tokens=6, do_sample=False), wanted)


@pytest.mark.model
def test_a_prompt_without_tokens_is_refused_and_the_next_one_runs(demo: Any) -> None:
    for empty in ("", [], [[]]):
        with pytest.raises(InvalidPromptError):
            demo.stream(empty)
    assert demo.batch(["Hello"], max_new_tokens=2, progress=False)[0].finish_reason == "length"


# -- prompts --------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tokenize() -> BaselineTokenize:
    return BaselineTokenize(tiny_tokenizer())


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        (5, "found int"),
        (None, "found NoneType"),
        ({"role": "user"}, "found dict"),
        ([[1, 2]], "messages or ints, found list"),
        ([1, "a"], "messages or ints, found str"),
        ([1, True], "messages or ints, found bool"),
        ([1.5], "messages or ints, found float"),
        ([{"role": "user"}], r"messages\[0\].content must be a text, found NoneType"),
        ([{"role": "user", "content": None}], r"messages\[0\].content must be a text, found NoneType"),
        ([{"role": "user", "content": "hi"}, {"role": "poet", "content": "x"}], r"messages\[1\].role is 'poet'"),
        ([{"content": "hi"}], r"messages\[0\].role is None"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"messages\[0\].content holds a part that is not text"),
        ([{"role": "user", "content": "hi"}, "text"], r"messages\[1\] must be a dict, found str"),
    ],
)
def test_a_malformed_prompt_is_refused_with_the_place(tokenize: BaselineTokenize, prompt: Any, told: str) -> None:
    with pytest.raises(InvalidPromptError, match=told):
        tokenize(prompt)


@pytest.mark.parametrize(
    "ids", [[5, 6], (5, 6), np.array([5, 6]), torch.tensor([5, 6]), [np.int64(5), np.int32(6)], range(5, 7)]
)
def test_ids_may_come_in_any_usual_form(tokenize: BaselineTokenize, ids: Any) -> None:
    got = tokenize(ids)
    assert got == [5, 6]
    assert all(type(i) is int for i in got)


def test_messages_go_through_the_template_once(tokenize: BaselineTokenize) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    text = "user: hi\nassistant: "
    assert tokenize([{"role": "user", "content": parts}]) == [3 + byte for byte in text.encode()]
    assert tokenize(text) == [3 + byte for byte in text.encode()]


def test_what_a_template_refuses_is_an_error_of_the_prompt() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidPromptError, match="the chat template refuses the messages: roles must alternate"):
        BaselineTokenize(tokenizer)([{"role": "user", "content": "x"}])
    tokenizer.chat_template = None
    with pytest.raises(InvalidPromptError, match="no chat template"):
        BaselineTokenize(tokenizer)([{"role": "user", "content": "x"}])


def test_text_without_a_tokenizer_is_refused_and_ids_are_not() -> None:
    with pytest.raises(ModelError, match="no tokenizer"):
        BaselineTokenize(None)("hi")
    assert BaselineTokenize(None)([4]) == [4]
    assert BaselineDetokenize(None)(Request("r", [4], SamplingParams(), 9)) == ""


# -- threads and processes ------------------------------------------------------------------------
def test_other_threads_that_pad_and_truncate_with_the_same_tokenizer_change_no_prompt() -> None:
    tokenizer = tiny_tokenizer()
    tokenize, detokenize = BaselineTokenize(tokenizer), BaselineDetokenize(tokenizer)
    texts = [f"text number {i} " * (1 + i % 7) for i in range(100)]
    wanted = [[3 + byte for byte in text.encode()] for text in texts]

    def work(number: int) -> bool:
        text, ids = texts[number % 100], wanted[number % 100]
        if number % 4 == 0:
            tokenizer([text, "x"], padding=True, truncation=True, max_length=5)
            return True
        if number % 4 == 1:
            return grow(detokenize, [65], ids)[0] == text
        return tokenize(text) == ids

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(2000)))
    assert results.count(True) == 2000


def _encode_in_child(tokenize: BaselineTokenize, connection: Any) -> None:
    connection.send(tokenize("from the child"))


def test_a_forked_child_can_tokenize_after_its_parent_did_in_threads() -> None:
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    tokenizer = tiny_tokenizer()
    tokenize = BaselineTokenize(tokenizer)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(tokenize, ["a text"] * 50))
    tokenizer(["many texts"] * 200)
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    child = context.Process(target=_encode_in_child, args=(tokenize, theirs))
    start = time.perf_counter()
    child.start()
    assert mine.poll(10)
    assert mine.recv() == tokenize("from the child")
    child.join(10)
    assert child.exitcode == 0
    assert time.perf_counter() - start < 10
    assert os.environ.get("TOKENIZERS_PARALLELISM") == before

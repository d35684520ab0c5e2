"""The workloads of the speculation layer run, compare what they say, and put back what they measured."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import llmopt
from llmopt.bench.drafting import WORKLOADS, _decode_s, _full_batch_s
from llmopt.bench.reuse import Setting, measure
from llmopt.errors import ModelError, PluginUnavailableError
from llmopt.testing import tiny_model

pytestmark = pytest.mark.model  # the tokenizer


@pytest.fixture
def setting() -> Iterator[Setting]:
    _, tokenizer = llmopt.load("demo")
    model = tiny_model(vocab_size=49152, max_position_embeddings=4096)
    made = Setting(model, {}, seconds=0.01, quick=True, tokenizer=tokenizer)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("name", "contenders"),
    [
        ("drafts_chat", {"plain", "ngram"}),
        ("wrong_drafts", {"plain", "ngram"}),  # no head ships for this model
        ("draft_host", {f"{n} at a time, {what}" for n in (1, 8) for what in ("plain", "trees", "over plain")}),
    ],
)
def test_a_workload_measures_every_contender(name: str, contenders: set[str], setting: Setting) -> None:
    result = measure(name, setting)
    assert result.workload == name
    assert {contender for contender, _ in result.rows} == contenders


def test_a_head_is_measured_only_where_there_is_one(setting: Setting) -> None:
    with pytest.raises(PluginUnavailableError, match="'eagle' needs a draft head"):
        measure("head8", setting)


@pytest.mark.parametrize("name", [name for name in WORKLOADS if not name.startswith("head")])
def test_texts_need_a_tokenizer(name: str) -> None:
    with pytest.raises(ModelError, match="the model has no tokenizer"):
        measure(name, Setting(tiny_model(), {}, seconds=0.01, quick=True))


def test_tokens_of_a_batch_count_from_the_moment_at_which_each_request_has_its_first(setting: Setting) -> None:
    pipe = setting.build(max_model_len=256)
    seconds, count = _decode_s(pipe, [([5, 6, 7], 9), ([8, 9], 5)])
    assert seconds > 0
    assert count == 9 + 5 - 2
    _, count = _decode_s(pipe, [([5, 6, 7], 9), ([8, 9], 9)], skip=3)
    assert count == 2 * (9 - 4)


def test_a_full_batch_counts_until_fewer_requests_are_left_than_it_holds(setting: Setting) -> None:
    pipe = setting.build(max_model_len=256, max_num_requests=2)
    seconds, count = _full_batch_s(pipe, [([5, 6, 7], 9)] * 4, 2)
    assert seconds > 0
    assert count == 4 * 9 - 2
    _, count = _full_batch_s(pipe, [([5, 6, 7], 9), ([8, 9], 9), ([5, 6], 40)], 2)
    assert count == 2 * 8  # the third one is alone

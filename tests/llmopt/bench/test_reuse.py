"""The workloads of the memory layer run, compare what they say, and tell whether their target was reached."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from llmopt.bench.reuse import WORKLOADS, Setting, measure
from llmopt.bench.reuse_report import reuse_lines, reuse_table
from llmopt.bench.target import Target
from llmopt.testing import tiny_model
from llmopt_plugins.memory.prefix_cache.stages import CachedCommit

if TYPE_CHECKING:
    from llmopt.batch import AcceptedTokens, Batch, StepOutput


@pytest.fixture
def setting() -> Setting:
    return Setting(tiny_model(max_position_embeddings=4096), {}, seconds=0.01, quick=True)


@pytest.mark.parametrize("name", ["shared", "no_hits", "turns", "kv_bytes", "offload"])
def test_a_workload_measures_every_contender_and_is_shown_with_its_target(name: str, setting: Setting) -> None:
    result = measure(name, setting)
    assert result.workload == name
    assert len(result.rows) >= 2
    lines = list(reuse_lines(result, "tiny", "float32", {"cpu": "x"}))
    assert [line["contender"] for line in lines] == [contender for contender, _ in result.rows]
    assert all(line["target"] == result.target.text and line["figure"] == result.target.figure for line in lines)
    table = reuse_table(result, "float32")
    assert table.row_count == len(result.rows)
    assert result.target.reached is (True if name == "kv_bytes" else None)  # the others say nothing at this size


def test_shared_tokens_are_hits_and_new_prompts_are_none(setting: Setting) -> None:
    shared = dict(measure("shared", setting).rows)
    found, asked = str(shared["+ prefix_cache"]["same token"]).split("/")
    assert found == asked
    assert float(shared["+ prefix_cache"]["ratio"]) > 1
    kept = dict(measure("no_hits", setting).rows)["+ prefix_cache"]
    assert kept["hits"] == 0
    assert float(kept["evicted"]) > 0  # the pool is full: what is measured is not the first touch of its memory


def test_time_that_the_prefix_cache_takes_is_a_cost(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = CachedCommit.__call__

    def slow_commit(self: CachedCommit, batch: Batch, accepted: AcceptedTokens) -> StepOutput:
        time.sleep(0.01)
        return commit(self, batch, accepted)

    before = dict(measure("no_hits", setting).rows)
    monkeypatch.setattr(CachedCommit, "__call__", slow_commit)
    after = dict(measure("no_hits", setting).rows)
    assert float(after["+ prefix_cache"]["cost %"]) > float(before["+ prefix_cache"]["cost %"]) + 10


def test_a_target_is_judged_in_words_and_in_records() -> None:
    assert str(Target("at most 2", "3", False)) == "target: at most 2\nfound:  3\n        missed"
    assert Target("at most 2", "1", True).verdict == "reached"
    assert Target("at most 2", "1", None).record() == {"target": "at most 2", "figure": "1", "reached": None}
    assert "--quick" in str(Target("at most 2", "1", None))


def test_options_of_the_compared_plugins_reach_them() -> None:
    setting = Setting(tiny_model(), {"paged_kv": {"watermark": 0.25}}, seconds=0.01, quick=True)
    try:
        pipe = setting.build("paged_kv", max_model_len=64)
        assert [getattr(plugin, "watermark", None) for plugin in pipe.registry.plugins] == [0.25]
    finally:
        setting.close()


def test_the_command_line_knows_all_workloads() -> None:
    from llmopt.cli.bench import GROUPS

    assert {"host256", *GROUPS["reuse"], *GROUPS["drafts"]} == set(WORKLOADS)

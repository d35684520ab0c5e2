"""The workloads of the memory layer run, compare what they say, and tell whether their target was reached."""

from __future__ import annotations

import pytest

from llmopt.bench.reuse import WORKLOADS, Setting, measure
from llmopt.bench.reuse_report import reuse_lines, reuse_table
from llmopt.testing import tiny_model


@pytest.fixture
def setting() -> Setting:
    return Setting(tiny_model(max_position_embeddings=4096), {}, seconds=0.01, quick=True)


@pytest.mark.parametrize("name", ["shared", "no_hits", "turns", "offload"])
def test_a_workload_measures_every_contender_and_is_shown_with_its_target(name: str, setting: Setting) -> None:
    result = measure(name, setting)
    assert result.workload == name
    assert len(result.rows) >= 2
    lines = list(reuse_lines(result, "tiny", "float32", {"cpu": "x"}))
    assert [line["contender"] for line in lines] == [contender for contender, _ in result.rows]
    assert all(line["target"] == result.target for line in lines)
    table = reuse_table(result, "float32")
    assert table.row_count == len(result.rows)
    assert ("reached" if result.holds else "missed") in str(table.caption)


def test_shared_tokens_are_hits_and_new_prompts_are_none(setting: Setting) -> None:
    shared = dict(measure("shared", setting).rows)
    found, asked = str(shared["+ prefix_cache"]["same token"]).split("/")
    assert found == asked
    assert float(shared["+ prefix_cache"]["ratio"]) > 1
    assert dict(measure("no_hits", setting).rows)["+ prefix_cache"]["hits"] == 0


def test_the_command_line_knows_all_workloads() -> None:
    from llmopt.cli.bench import GROUPS

    assert set(GROUPS["reuse"]) == set(WORKLOADS)

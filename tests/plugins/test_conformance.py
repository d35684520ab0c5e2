"""Every built-in plugin keeps to the rules, and says what users need to know."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import llmopt
from llmopt.errors import PluginUnavailableError
from llmopt.plugin_info import info_of
from llmopt.testing import check_plugin, tiny_model, tiny_prompts
from llmopt_plugins import BUILTIN
from llmopt_plugins.speculation.eagle import Eagle
from llmopt_plugins.speculation.medusa import Medusa
from tests.plugins.speculation.eagle_oracle import write_pupil
from tests.plugins.speculation.medusa_heads import write_trained

ROOT = Path(__file__).parents[2]


def name_of(plugin: type) -> str:
    return info_of(plugin).name


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    # steps of the tiny model are nothing but meetings, and two tests at once have no core for each other's threads
    monkeypatch.setenv("LLMOPT_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def factories(tmp_path_factory: pytest.TempPathFactory) -> dict[type, Callable[[], Any]]:
    """What makes a plugin that needs more than its class: drafters with heads that learnt what the tiny model says."""
    model, prompts = tiny_model(), tiny_prompts(4, min_length=1, max_length=30)  # those of the checks
    with llmopt.build(model) as pipe:
        said = [output.token_ids for output in pipe.batch(prompts, max_new_tokens=24, ignore_eos=True, progress=False)]
    texts = [[*prompt, *ids][-25:] for prompt, ids in zip(prompts, said, strict=True)]
    heads = write_trained(tmp_path_factory.mktemp("medusa"), model, prompts, said)
    head = write_pupil(tmp_path_factory.mktemp("eagle"), model, texts, [0, 1, 2], num_steps=60)
    return {
        Eagle: lambda: Eagle(head, aux_layers=[0, 1, 2], self_check=False, fixed=6),
        Medusa: lambda: Medusa(heads, fixed=6),
    }


def company_of(plugin: type) -> list[type]:
    """Every pair meets in one of its checks, in both orders: that of the one slower to build, or listed first."""
    later = BUILTIN[BUILTIN.index(plugin) + 1 :]
    if info_of(plugin).in_company:
        return [other for other in later if info_of(other).in_company]
    return [other for other in BUILTIN if other is not plugin and (info_of(other).in_company or other in later)]


def test_every_pair_of_built_in_plugins_meets_once() -> None:
    met = [frozenset((plugin, other)) for plugin in BUILTIN for other in company_of(plugin)]
    assert len(met) == len(set(met))
    assert set(met) == {frozenset(pair) for pair in itertools.combinations(BUILTIN, 2)}


@pytest.mark.parametrize("plugin", BUILTIN, ids=name_of)
def test_a_built_in_plugin_keeps_to_the_rules(plugin: type, factories: dict[type, Callable[[], Any]]) -> None:
    company = [factories.get(other, other) for other in company_of(plugin)]
    try:
        # long outputs beside each other plugin would take minutes of those that meet all of them
        report = check_plugin(
            factories.get(plugin, plugin), company=company, max_new_tokens=24 if info_of(plugin).in_company else 12
        )
    except PluginUnavailableError as error:
        assert plugin not in factories
        pytest.skip(str(error))
    print(report)  # shown with -rP: the overhead of every plugin
    assert report.passed


@pytest.mark.parametrize("plugin", BUILTIN, ids=name_of)
def test_a_built_in_plugin_stands_in_the_folder_of_its_layer(plugin: type) -> None:
    info = info_of(plugin)
    assert plugin.__module__ == f"llmopt_plugins.{info.layer}.{info.name}"


@pytest.mark.parametrize("plugin", BUILTIN, ids=name_of)
def test_a_built_in_plugin_says_what_it_changes_and_promises_and_where_it_is_from(plugin: type) -> None:
    text = __import__("sys").modules[plugin.__module__].__doc__ or ""
    for word in ("Stage", "Promise", "Helps:", "Hurts:", "Source:"):
        assert word in text, f"the module docstring of {plugin.__name__} has no {word!r}"
    promise = re.search(r"Promise: (\w+)", text)
    assert promise
    assert promise.group(1) == info_of(plugin).promise


@pytest.mark.parametrize("plugin", BUILTIN, ids=name_of)
def test_a_built_in_plugin_has_a_page_and_a_test_file(plugin: type) -> None:
    info = info_of(plugin)
    assert (ROOT / "docs" / "plugins" / f"{info.name}.md").is_file()
    assert (ROOT / "tests" / "plugins" / info.layer / f"test_{info.name}.py").is_file()

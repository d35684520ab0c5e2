"""Every built-in plugin keeps to the rules, and says what users need to know."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from llmopt.errors import PluginUnavailableError
from llmopt.plugin_info import info_of
from llmopt.testing import check_plugin
from llmopt_plugins import BUILTIN

ROOT = Path(__file__).parents[2]


def name_of(plugin: type) -> str:
    return info_of(plugin).name


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    # steps of the tiny model are nothing but meetings, and two tests at once have no core for each other's threads
    monkeypatch.setenv("LLMOPT_NUM_THREADS", "1")


def company_of(plugin: type) -> list[type]:
    """Every pair meets in one of its checks, in both orders: that of the one listed first, or slower to build."""
    if not info_of(plugin).in_company:
        return [other for other in BUILTIN if other is not plugin]
    return [other for other in BUILTIN[BUILTIN.index(plugin) + 1 :] if info_of(other).in_company]


def test_every_pair_of_built_in_plugins_meets() -> None:
    met = {frozenset((plugin, other)) for plugin in BUILTIN for other in company_of(plugin)}
    assert met == {frozenset(pair) for pair in itertools.combinations(BUILTIN, 2)}


@pytest.mark.parametrize("plugin", BUILTIN, ids=name_of)
def test_a_built_in_plugin_keeps_to_the_rules(plugin: type) -> None:
    try:
        report = check_plugin(plugin, company=company_of(plugin))
    except PluginUnavailableError as error:
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

"""The documentation is right: links lead somewhere, commands exist, and Python blocks run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
import typer.main

from llmopt.cli.app import app
from llmopt.cli.plugin_commands import plugin_commands
from llmopt.layers import LAYERS
from llmopt.plugin_info import info_of
from llmopt_plugins import BUILTIN

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
NAMES = {page: str(page.relative_to(ROOT)) for page in PAGES}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [text for name, text in BLOCK.findall(page.read_text()) if name == language]


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=NAMES.get)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    text = BLOCK.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{NAMES[page]} links to {target}"
        assert file.is_relative_to(ROOT), f"{NAMES[page]} links out of the project: {target}"
        if anchor:
            assert anchor in {slug(h) for h in re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE)}, target


@pytest.mark.parametrize("page", PAGES, ids=NAMES.get)
def test_every_named_file_of_the_project_exists(page: Path) -> None:
    """Paths in code spans, such as `llmopt/pipeline.py`."""
    text = BLOCK.sub("", page.read_text())
    for name in re.findall(r"`((?:llmopt|plugins|csrc|tests|docs)/[\w./\-]+)`", text):
        assert (ROOT / name).exists(), f"{NAMES[page]} names {name}"


def test_the_readme_needs_exactly_two_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    targets = set(re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    (commands,) = [b.split("\n") for b in blocks(ROOT / "README.md", "sh") if "make " in b]
    assert [c.split("#")[0].strip() for c in commands if c] == ["make demo", "make test"]
    assert set(re.findall(r"`make (\w+)", readme)) <= targets
    assert {"demo", "test"} <= targets


@pytest.mark.parametrize("page", PAGES, ids=NAMES.get)
def test_every_shown_command_of_llmopt_exists_with_its_options(page: Path) -> None:
    whole = typer.Typer()
    whole.registered_commands = list(app.registered_commands)
    for command in plugin_commands():
        whole.command(command.name)(command.load())
    root = typer.main.get_command(whole)
    assert isinstance(root, click.Group) or hasattr(root, "commands")
    for line in "\n".join(blocks(page, "sh")).splitlines():
        words = shlex.split(line, comments=True)
        if not words or words[0] != "llmopt" or len(words) == 1:
            continue
        shown = root.commands.get(words[1])
        assert shown is not None, f"{NAMES[page]} shows {line!r}"
        known = {option for parameter in shown.params for option in (*parameter.opts, *parameter.secondary_opts)}
        used = {word.split("=")[0] for word in words[2:] if word.startswith("-") and word != "-"}
        assert used <= known, f"{NAMES[page]} shows {line!r}"


def python_pages() -> list[object]:
    marks = []
    for page in PAGES:
        code = blocks(page, "python")
        if code:
            needs = [pytest.mark.model] if any('"demo"' in c for c in code) else []
            marks.append(pytest.param(page, id=NAMES[page], marks=needs))
    return marks


@pytest.mark.parametrize("page", python_pages())
def test_the_python_blocks_of_a_page_run_one_after_the_other(
    page: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if request.node.get_closest_marker("model"):
        request.getfixturevalue("demo_folder")  # skips where the model cannot be had
    code = "\n".join(blocks(page, "python"))
    path = [ROOT, ROOT / "plugins", ROOT / "docs" / "examples" / "llmopt-hello"]
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "LLMOPT_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{code}\n{done.stderr}"


def test_the_readme_has_a_row_for_every_layer_stage_and_plugin() -> None:
    readme = (ROOT / "README.md").read_text()
    for number, (layer, stages) in enumerate(LAYERS.items(), start=1):
        (row,) = re.findall(rf"^\| {number} {layer} \|.*$", readme, re.MULTILINE)
        for stage in stages:
            assert f"`{stage}`" in row
        for name in (info_of(plugin).name for plugin in BUILTIN if info_of(plugin).layer == layer):
            assert f"`{name}`" in row or f"[`{name}`]" in row


@pytest.mark.parametrize("plugin", BUILTIN, ids=lambda plugin: info_of(plugin).name)
def test_the_page_of_a_plugin_says_what_users_ask(plugin: type) -> None:
    info = info_of(plugin)
    text = (ROOT / "docs" / "plugins" / f"{info.name}.md").read_text()
    assert f"# {info.name}\n" in text
    for heading in ("## What it changes", "## When it helps", "## When it hurts", "## Options"):
        assert heading in text
    assert f"Promise: {info.promise}" in text

"""Imports point one way: plugins -> llmopt -> csrc. Inside llmopt, a layer never imports another layer."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from llmopt.layers import LAYERS

ROOT = Path(__file__).parents[2]
CORE = sorted((ROOT / "llmopt").rglob("*.py"))
PLUGINS = sorted((ROOT / "plugins" / "llmopt_plugins").rglob("*.py"))
NATIVE = sorted(p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".h", ".hpp", ".cuh", ".cc", ".cpp", ".cu"})
# What everything else stands on; these import nothing that runs a model.
FOUNDATION = {"batch", "config", "errors", "hookspecs", "layers", "request", "stages", "version"}


def module_name(path: Path) -> str:
    base = ROOT / "plugins" if path.is_relative_to(ROOT / "plugins") else ROOT
    parts = path.relative_to(base).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, *, at_run_time: bool = False) -> Iterator[tuple[str, str]]:
    """``(module, name)`` of every import statement; the name is empty for ``import module``.

    :param at_run_time: leave out what stands under ``if TYPE_CHECKING``.
    """
    tree = ast.parse(path.read_text())
    skipped: set[ast.AST] = set()
    if at_run_time:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                skipped.update(child for statement in node.body for child in ast.walk(statement))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import; write the whole name"
            yield from ((node.module or "", alias.name) for alias in node.names)


def test_the_sources_are_found() -> None:
    assert len(CORE) > 30
    assert len(PLUGINS) > 2
    assert len(NATIVE) > 5


@pytest.mark.parametrize("path", CORE, ids=module_name)
def test_the_core_never_imports_a_plugin(path: Path) -> None:
    assert not [module for module, _ in imports(path) if module.split(".")[0] == "llmopt_plugins"]


def test_only_the_search_reaches_for_the_built_in_plugins_and_by_name() -> None:
    naming = [module_name(path) for path in CORE if re.search(r"import_module\(.llmopt_plugins", path.read_text())]
    assert naming == ["llmopt.plugin_search"]


@pytest.mark.parametrize("path", CORE, ids=module_name)
def test_the_core_does_not_import_its_tools_for_authors(path: Path) -> None:
    """`llmopt.testing` imports the core, never the other way round."""
    if {"testing", "bench"} & set(path.parts):
        return  # the tools themselves, and the benchmark that runs on a tiny model
    assert not [module for module, _ in imports(path) if module.startswith("llmopt.testing")]


@pytest.mark.parametrize("layer", LAYERS)
def test_a_plain_layer_imports_no_other_layer(layer: str) -> None:
    path = ROOT / "llmopt" / "baseline" / f"{layer}.py"
    others = {f"llmopt.baseline.{other}" for other in LAYERS if other != layer} | {"llmopt.baseline"}
    assert not [module for module, _ in imports(path) if module in others]


@pytest.mark.parametrize("path", CORE, ids=module_name)
def test_what_stands_below_the_layers_does_not_import_them(path: Path) -> None:
    name = module_name(path)
    upper = ("llmopt.builder", "llmopt.pipeline", "llmopt.cli", "llmopt.bench", "llmopt.testing")
    if name.startswith(("llmopt.baseline", "llmopt.ops", "llmopt.hf")) and name not in (
        "llmopt.hf.accelerate",  # a front door, like build itself
    ):
        found = [m for m, _ in imports(path, at_run_time=True) if m.startswith(upper)]
        assert not found
    if name.startswith(("llmopt.ops", "llmopt.hf")):
        assert not [m for m, _ in imports(path, at_run_time=True) if m.startswith("llmopt.baseline")]
    if name.removeprefix("llmopt.") in FOUNDATION:
        allowed = {f"llmopt.{other}" for other in FOUNDATION}
        assert {m for m, _ in imports(path, at_run_time=True) if m.startswith("llmopt")} <= allowed


@pytest.mark.parametrize("path", PLUGINS, ids=module_name)
def test_a_built_in_plugin_uses_nothing_private(path: Path) -> None:
    """What a built-in plugin does, a third party can do."""
    for module, name in imports(path):
        if module.split(".")[0] == "llmopt":
            parts = [*module.split("."), name]
            assert not [part for part in parts if part.startswith("_") and part != "_core"], f"{module}.{name}"


@pytest.mark.parametrize("path", PLUGINS, ids=module_name)
def test_a_built_in_plugin_imports_nothing_from_tests_or_the_command_line(path: Path) -> None:
    forbidden = ("llmopt.testing", "llmopt.cli", "llmopt.bench", "tests")
    assert not [module for module, _ in imports(path) if module.startswith(forbidden)]


@pytest.mark.parametrize("path", NATIVE, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_the_bindings_know_python_and_torch(path: Path) -> None:
    included = re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)
    folder = path.relative_to(ROOT / "csrc").parts[0]
    foreign = [i for i in included if re.match(r"(nanobind|pybind11|Python\.h|torch|ATen|c10)", i)]
    if folder != "bindings":
        assert not foreign
    elif path.name != "ops.cc":
        assert not [i for i in foreign if re.match(r"(torch|ATen|c10)", i)]
    if folder == "include":
        assert not [i for i in included if i.startswith(("core/", "../", "cuda/"))], (
            "a public header shows what is inside"
        )

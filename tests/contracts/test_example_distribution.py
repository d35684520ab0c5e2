"""A plugin in somebody else's distribution: built, installed, found by its name, and tested as its author would."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "llmopt-hello"


def run(*command: str, path: Path | None = None, cwd: Path | None = None) -> str:
    parts = [str(p) for p in (path, ROOT, ROOT / "plugins") if p is not None]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(parts), "LLMOPT_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _has_setuptools() -> bool:
    try:
        version = importlib.metadata.version("setuptools")
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(map(int, version.split(".")[:2])) >= (70, 1)  # builds wheels without the package "wheel"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the example."""
    source = tmp_path_factory.mktemp("source") / EXAMPLE.name
    shutil.copytree(EXAMPLE, source)  # building writes into the source tree
    target = tmp_path_factory.mktemp("target")
    isolation = ["--no-build-isolation"] if _has_setuptools() else []
    run(sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--target",
        str(target), *isolation, str(source))  # fmt: skip
    return target


def test_it_is_listed_beside_the_built_in_plugins(installed: Path) -> None:
    listed = json.loads(run(sys.executable, "-m", "llmopt.cli", "plugins", "--json", path=installed))
    assert [p["layer"] for p in listed if p["name"] == "hello"] == ["scheduling"]
    assert "paged_kv" in [p["name"] for p in listed]


def test_it_is_used_by_name_and_takes_options(installed: Path) -> None:
    code = """
import llmopt
from llmopt.plugin_search import make_plugin
from llmopt.testing import tiny_model
for plugins in (["hello"], [make_plugin("hello", {"min_tokens": 3}), "paged_kv"]):
    with llmopt.build(tiny_model(), plugins, self_test=False) as pipe:
        pipe.batch([[5, 6, 7], [8, 9]], max_new_tokens=4, ignore_eos=True, progress=False)
        print(pipe.describe().stages["scheduling"]["schedule"], pipe.stats()["schedule.hello"]["mean_tokens"])
"""
    lines = run(sys.executable, "-c", code, path=installed).splitlines()
    assert lines == ["['baseline', 'hello'] 2.75", "['baseline', 'hello'] 5.0"]


def test_its_own_tests_pass(installed: Path, tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE / "tests", tmp_path / "tests")
    run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", path=installed, cwd=tmp_path)


def test_without_it_its_name_is_unknown() -> None:
    code = "import llmopt.plugin_search as r\ntry: r.find_plugin('hello')\nexcept r.PluginNotFoundError as e: print(e)"
    assert "no plugin is called 'hello'" in run(sys.executable, "-c", code)

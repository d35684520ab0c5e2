"""Builds the C++ tests with CMake and runs them, so that one command covers both languages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "cpp-tests"  # kept: a second run compiles only what changed


def run(*command: str | Path) -> str:
    """Run a tool of this environment; its output is shown when it fails."""
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        [shutil.which(command[0], path=search) or command[0], *command[1:]],
        env={**os.environ, "PATH": search},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def built_core() -> Path | None:
    """The library that the extension was built from, if no source is newer: compiling it again would take minutes."""
    archives = [path for path in ROOT.glob("build/*/libllmopt_core.a") if list(path.parent.glob("_core*.so"))]
    newest = max(archives, key=lambda path: path.stat().st_mtime, default=None)
    changed = max(path.stat().st_mtime for path in (ROOT / "csrc").rglob("*") if path.is_file())
    return newest if newest and newest.stat().st_mtime > changed else None


@pytest.mark.slow
def test_the_cpp_tests_pass() -> None:
    tools = Path(sys.executable).parent
    if not (shutil.which("cmake") or (tools / "cmake").exists()):
        pytest.skip("cmake is missing")
    if not (shutil.which("c++") or os.environ.get("CXX")):
        pytest.skip("a C++ compiler is missing")
    options = ["-DLLMOPT_PYTHON=OFF", "-DLLMOPT_TESTS=ON", f"-DLLMOPT_CORE_ARCHIVE={built_core() or ''}"]
    output = run("cmake", "-S", ROOT / "csrc", "-B", BUILD, *options)
    if "GoogleTest was not found" in output:
        pytest.skip("GoogleTest is missing (Debian: libgtest-dev)")
    run("cmake", "--build", BUILD, "--parallel", "2")
    assert "100% tests passed" in run("ctest", "--test-dir", BUILD, "--output-on-failure")

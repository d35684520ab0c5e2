"""Importing is free of side effects: no torch, no CUDA, no threads, no environment changes, and a fork still works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATH = os.pathsep.join([str(ROOT), str(ROOT / "plugins")])


def run(code: str, **environment: str) -> str:
    """Run Python code in a fresh interpreter and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": PATH, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("module", ["llmopt", "llmopt.cli.app", "llmopt.errors", "llmopt.hookspecs"])
def test_importing_it_imports_neither_torch_nor_transformers(module: str) -> None:
    found = run(f"import sys, {module}; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])")
    assert found == "[]"


def test_the_version_and_the_list_of_public_names_need_no_torch() -> None:
    found = run("import sys, llmopt; llmopt.__version__, dir(llmopt), llmopt.__all__; print('torch' in sys.modules)")
    assert found == "False"


def test_the_table_of_plugins_needs_neither_torch_nor_transformers() -> None:
    """Case: `llmopt plugins` took half a minute on a machine under load."""
    found = run(
        "import sys; from llmopt.cli import plugins; plugins.run(as_json=True)\n"
        "print([m for m in ('torch', 'transformers', 'safetensors') if m in sys.modules])"
    )
    assert '"draft_model"' in found
    assert found.endswith("[]")


def test_every_public_name_can_be_had_and_an_unknown_one_is_an_attribute_error() -> None:
    run(
        "import llmopt\n"
        "assert all(getattr(llmopt, name) is not None for name in llmopt.__all__)\n"
        "try: llmopt.nothing\n"
        "except AttributeError as error: assert 'nothing' in str(error)\n"
        "else: raise SystemExit('no error')"
    )


EVERYTHING = """
import importlib, os, pkgutil, threading
before = dict(os.environ)
import torch, transformers
transformers.PreTrainedModel  # loads lazily, and sets TORCHINDUCTOR_CACHE_DIR on the way
theirs = {k: v for k, v in os.environ.items() if before.get(k) != v}
handlers = {s: __import__("signal").getsignal(s) for s in (2, 15)}
num_threads = torch.get_num_threads()
tasks = "/proc/self/task"  # the operating system's threads: numpy's BLAS may have started some
num_tasks = len(os.listdir(tasks)) if os.path.isdir(tasks) else 0
import llmopt, llmopt_plugins
for package in (llmopt, llmopt_plugins):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
"""


def test_importing_everything_starts_no_cuda_and_no_threads_and_changes_no_settings() -> None:
    run(
        EVERYTHING
        + """
changed = {k: v for k, v in os.environ.items() if before.get(k) != v}
assert changed == theirs, (changed, theirs)
assert not set(before) - set(os.environ)
assert not torch.cuda.is_initialized()
assert threading.active_count() == 1, threading.enumerate()
assert not num_tasks or len(os.listdir(tasks)) == num_tasks
assert torch.get_num_threads() == num_threads
assert handlers == {s: __import__("signal").getsignal(s) for s in (2, 15)}
""",
        OMP_NUM_THREADS="2",
    )


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("native", ["off", "auto"])
def test_a_forked_child_can_run_a_pipeline_after_the_import(native: str) -> None:
    """Case: servers import first and fork workers afterwards."""
    run(
        EVERYTHING
        + """
import sys
from llmopt.testing import tiny_model
pid = os.fork()
if pid == 0:
    try:
        with llmopt.build(tiny_model()) as pipe:
            out = pipe.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, min_new_tokens=4, do_sample=False)
        os._exit(0 if out.shape == (1, 7) else 3)
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        os._exit(4)
import signal
signal.signal(signal.SIGALRM, lambda *_: (os.kill(pid, 9), sys.exit("the child hangs")))
signal.alarm(60)
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
""",
        LLMOPT_NATIVE=native,
        OMP_NUM_THREADS="2",
    )

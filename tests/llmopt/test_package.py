"""What importing the package does to a process: nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(script: str, **environment: str) -> str:
    """Run a script in a fresh interpreter; its output."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "plugins"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_version_needs_neither_torch_nor_transformers() -> None:
    script = "import sys, llmopt; llmopt.__version__; print('torch' in sys.modules, 'transformers' in sys.modules)"
    assert run(script).split() == ["False", "False"]


IMPORT_AND_FORK = """
import json, os, threading
before = dict(os.environ)
import torch, transformers
threads = threading.active_count()
with_libraries = dict(os.environ)
import llmopt, llmopt.pipeline, llmopt.builder, llmopt.submit, llmopt.text, llmopt_plugins
from llmopt import build, load, accelerate, plugins, SamplingParams
from llmopt.testing import tiny_model
report = {
    "cuda": torch.cuda.is_initialized(),
    "threads": threading.active_count() - threads,
    "environment": sorted(k for k in {*os.environ, *with_libraries} if os.environ.get(k) != with_libraries.get(k)),
    "parallelism": os.environ.get("TOKENIZERS_PARALLELISM"),
}
torch.set_num_threads(1)
model = tiny_model()
wanted = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=5, do_sample=False)
child = os.fork()
if child == 0:
    with build(model) as pipe:
        same = torch.equal(pipe.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=5, do_sample=False), wanted)
        ids = pipe.submit([5, 6, 7], max_new_tokens=5).result(20).token_ids
    os._exit(0 if same and ids == wanted[0, 3:].tolist() else 1)
report["child"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps(report))
"""


def test_import_starts_no_thread_and_no_cuda_and_leaves_the_environment_so_that_a_fork_works() -> None:
    report = json.loads(run(IMPORT_AND_FORK, TOKENIZERS_PARALLELISM="true"))
    assert report == {"cuda": False, "threads": 0, "environment": [], "parallelism": "true", "child": 0}


FORK_AFTER_SUBMIT = """
import os, torch, llmopt
from llmopt.testing import tiny_model
torch.set_num_threads(1)
with llmopt.build(tiny_model()) as pipe:
    wanted = pipe.submit([5, 6], max_new_tokens=5).result(20).token_ids
    child = os.fork()
    if child == 0:  # the thread stayed with the parent
        os._exit(0 if pipe.submit([5, 6], max_new_tokens=5).result(20).token_ids == wanted else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_starts_a_background_thread_of_its_own() -> None:
    assert run(FORK_AFTER_SUBMIT).strip() == "0"


LEAVE_IN_THE_MIDDLE = """
import time, torch, llmopt
from llmopt.testing import tiny_model
torch.set_num_threads(1)
pipe = llmopt.build(tiny_model(hidden_size=256, intermediate_size=1024, num_hidden_layers=6))
handle = pipe.submit([1, 2, 3], max_new_tokens=250, ignore_eos=True)
while pipe.stats()["num_steps"] < 3:
    time.sleep(0.001)
print(handle.is_finished)
"""


def test_a_script_that_ends_while_a_request_runs_ends_cleanly() -> None:
    assert run(LEAVE_IN_THE_MIDDLE).strip() == "False"

"""What every test shares: one thread, skips with a reason, and the demo model."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from llmopt.demo_models import cache_folder
from llmopt.errors import ModelError

_own_cache: list[Path] = []  # the folder this process made


def _use_own_cache() -> None:
    """What tests measure and compile is kept for one run; only the models, which are large, are the user's."""
    models = cache_folder() / "models"
    try:
        models.mkdir(parents=True, exist_ok=True)
        own = Path(tempfile.mkdtemp(prefix="llmopt-tests-"))
        (own / "models").symlink_to(models.resolve(), target_is_directory=True)
    except OSError:
        return  # no home that can be written: tests of the cache say what they need
    _own_cache.append(own)
    os.environ["LLMOPT_CACHE"] = str(own)


def pytest_unconfigure(config: pytest.Config) -> None:
    for folder in _own_cache:
        shutil.rmtree(folder, ignore_errors=True)


def pytest_configure(config: pytest.Config) -> None:
    # Results do not depend on the machine, and parallel test runs do not fight. The variable is for the processes that
    # tests start: on a busy machine, threads that spin for each other cost minutes there.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    # Nor is the machine measured by accident: what a busy machine reaches would stay in the user's cache.
    os.environ["LLMOPT_MACHINE_LIMITS"] = str(Path(__file__).parent / "machine_limits.json")
    if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit the folder: what one compiled serves the others
        _use_own_cache()


def _why_no_native() -> str | None:
    try:
        import llmopt._core  # noqa: F401
    except ImportError as error:
        return f"the compiled core is missing: {error}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons = {
        "gpu": None if torch.cuda.is_available() else "no CUDA device",
        "native": _why_no_native(),
    }
    for item in items:
        for marker, reason in reasons.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The folder of SmolLM2-135M-Instruct (bfloat16). Mark the test with ``model``."""
    from llmopt.hub import resolve

    try:
        return Path(resolve("demo"))
    except ModelError as error:
        pytest.skip(f"the demo model cannot be fetched: {error}")


@pytest.fixture(scope="session")
def demo_fp32(demo_folder: Path) -> tuple[Any, Any]:
    """The demo model in float32 and its tokenizer, shared: a test leaves them as they are."""
    from llmopt.hub import load

    return load(demo_folder, dtype="float32")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)

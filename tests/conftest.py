"""What every test shares: one thread, skips with a reason, and the demo model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from llmopt.errors import ModelError


def pytest_configure(config: pytest.Config) -> None:
    # Results do not depend on the machine, and parallel test runs do not fight. The variable is for the processes that
    # tests start: on a busy machine, threads that spin for each other cost minutes there.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    # Nor is the machine measured by accident: what a busy machine reaches would stay in the user's cache.
    os.environ["LLMOPT_MACHINE_LIMITS"] = str(Path(__file__).parent / "machine_limits.json")


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

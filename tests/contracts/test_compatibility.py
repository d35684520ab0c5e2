"""docs/compatibility.md says what the engine does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import GenerationConfig

from llmopt.hf.fields import FIELDS

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def maker() -> Any:
    spec = importlib.util.spec_from_file_location("make_compatibility", DOCS / "make_compatibility.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    spec.loader.exec_module(module)
    yield module
    transformers.utils.logging.set_verbosity(before)


@pytest.mark.slow
def test_the_page_is_what_the_configs_and_the_engine_say(maker: Any) -> None:
    written = (DOCS / "compatibility.md").read_text()
    if f"with transformers {transformers.__version__}." not in written:
        pytest.skip(f"the page was written with another transformers than {transformers.__version__}")
    assert written == maker.page(), "run: python docs/make_compatibility.py"


def test_every_field_of_the_installed_transformers_is_on_the_page() -> None:
    written = (DOCS / "compatibility.md").read_text()
    names = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert names - {"transformers_version"} <= set(FIELDS)
    assert all(f"| `{name}` |" in written for name in names)


def test_the_page_lists_at_least_a_hundred_packed_types() -> None:
    written = (DOCS / "compatibility.md").read_text()
    packed = written.split("### Packed")[1].split("### Rows")[0]
    assert packed.count("\n| `") >= 100
    assert "own loop:" not in packed

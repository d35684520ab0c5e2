"""When the compiled extension is used, and what is said when it is not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from llmopt import native
from llmopt.ops.attention import PagedAttention, ReferencePagedAttention


def create() -> PagedAttention:
    return PagedAttention.create([torch.zeros(1, 1, 4, 8)], [torch.zeros(1, 1, 4, 8)])


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True)


def test_off_uses_the_reference_and_says_so(monkeypatch) -> None:
    monkeypatch.setenv("LLMOPT_NATIVE", "off")
    assert native.core() is None
    assert native.why_not() == "native ops are switched off (LLMOPT_NATIVE=off)"
    op = create()
    assert isinstance(op, ReferencePagedAttention)
    assert op.why_reference == native.why_not()


def test_an_unknown_mode_is_refused_with_the_choices(monkeypatch) -> None:
    monkeypatch.setenv("LLMOPT_NATIVE", "maybe")
    with pytest.raises(ValueError, match="'maybe'; choose one of require, auto, off"):
        create()


def test_a_missing_extension_falls_back_in_auto_and_raises_in_require(monkeypatch, caplog) -> None:
    monkeypatch.setitem(sys.modules, "llmopt._core", None)
    native._import_core.cache_clear()
    native.log_fallback.cache_clear()
    try:
        monkeypatch.setenv("LLMOPT_NATIVE", "auto")
        with caplog.at_level("WARNING", logger="llmopt.native"):
            assert isinstance(create(), ReferencePagedAttention)
            create()
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == 1
        assert lines[0].startswith("paged attention runs on the torch reference: the extension llmopt._core cannot")
        monkeypatch.setenv("LLMOPT_NATIVE", "require")
        with pytest.raises(ImportError, match="LLMOPT_NATIVE=require, but the extension"):
            create()
    finally:
        native._import_core.cache_clear()


@pytest.mark.native
def test_a_forced_instruction_set_is_used_and_an_unknown_one_raises() -> None:
    code = "from llmopt import native; print(native.core('auto').isa())"
    assert run_python(code, LLMOPT_ISA="portable").stdout.strip() == "portable"
    refused = run_python(code, LLMOPT_ISA="avx3")
    assert refused.returncode != 0
    assert "ConfigError: LLMOPT_ISA=avx3 is not known; choose one of" in refused.stderr


@pytest.mark.native
@pytest.mark.parametrize(
    ("variable", "value", "told"),
    [
        ("LLMOPT_ISA", "avx3", "ConfigError: LLMOPT_ISA=avx3 is not known; choose one of"),
        ("LLMOPT_NUM_THREADS", "many", "ConfigError: LLMOPT_NUM_THREADS is 'many'; give a whole number"),
        ("LLMOPT_NATIVE", "maybe", "ConfigError: LLMOPT_NATIVE is 'maybe'; choose one of"),
    ],
)
def test_a_bad_variable_is_told_as_it_is_when_a_plugin_reads_it(variable: str, value: str, told: str) -> None:
    code = """
import llmopt
from llmopt.testing import tiny_model
try:
    llmopt.build(tiny_model(), ["native"])
except llmopt.errors.LlmoptError as error:
    print(f"{type(error).__name__}: {error}")
"""
    assert run_python(code, **{variable: value}).stdout.startswith(told)

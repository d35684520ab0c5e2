"""The table of a GGUF file: read as the gguf package reads it, and refused wherever it was cut."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from llmopt.errors import ModelError
from llmopt.testing import tiny_model
from llmopt_plugins.kernel.native.gguf_file import GgufFile


def _helpers() -> Any:
    path = Path(__file__).with_name("gguf_files.py")
    spec = importlib.util.spec_from_file_location("gguf_files", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["gguf_files"] = module
    spec.loader.exec_module(module)
    return module

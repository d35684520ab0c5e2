"""Loads the compiled extension ``llmopt._core``, or says in a sentence why it is not used.

``LLMOPT_NATIVE`` decides: ``auto`` (default) falls back to the torch reference and logs one line with the reason,
``require`` raises, ``off`` never loads the extension. ``LLMOPT_ISA`` forces the instruction set of the kernels
(``amx``, ``avx512_bf16``, ``avx512``, ``avx2``, ``portable``); without it the best one this machine has is used.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from types import ModuleType
from typing import Literal

from llmopt.errors import ConfigError

NativeMode = Literal["require", "auto", "off"]
MODES: tuple[NativeMode, ...] = ("require", "auto", "off")

logger = logging.getLogger(__name__)


def mode(requested: str | None = None) -> NativeMode:
    """How the extension is to be used: ``requested`` if given, else ``LLMOPT_NATIVE``, else ``auto``.

    :raises ConfigError: the value is none of ``require``, ``auto``, ``off``.
    """
    value = requested if requested is not None else os.environ.get("LLMOPT_NATIVE", "auto")
    if value not in MODES:
        raise ConfigError(f"LLMOPT_NATIVE is {value!r}; choose one of {', '.join(MODES)}.")
    return value


@functools.cache
def _import_core() -> tuple[ModuleType | None, str | None]:
    try:
        core = importlib.import_module("llmopt._core")
    except ImportError as error:
        return None, f"the extension llmopt._core cannot be imported ({error}); build it with `pip install .`"
    # A forced instruction set that the machine lacks is an error of the user, never a reason to fall back: it raises.
    try:
        core.isa()
    except RuntimeError as error:
        raise ConfigError(str(error)) from error
    return core, None


def why_not(requested: str | None = None) -> str | None:
    """The reason why the native ops are not used, as a sentence; None when they are.

    :raises ConfigError: ``LLMOPT_ISA`` names an instruction set that is unknown or that this machine lacks.
    """
    if mode(requested) == "off":
        return "native ops are switched off (LLMOPT_NATIVE=off)"
    return _import_core()[1]


def core(requested: str | None = None) -> ModuleType | None:
    """The extension module, or None when `why_not` gives a reason.

    :raises ImportError: the mode is ``require`` and the extension cannot be imported.
    """
    reason = why_not(requested)
    if reason is None:
        return _import_core()[0]
    if mode(requested) == "require":
        raise ImportError(f"LLMOPT_NATIVE=require, but {reason}.")
    return None


@functools.cache
def log_fallback(op: str, reason: str) -> None:
    """Log once per op and reason that the torch reference is used: a warning when the extension could not be loaded."""
    level = logging.WARNING if reason == _import_core()[1] else logging.INFO
    logger.log(level, "%s runs on the torch reference: %s", op, reason)

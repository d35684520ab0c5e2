"""The text form of a plugin, in ``plugins=[...]`` and on the command line: ``name`` or ``name:key=value,key=value``.

Values are Python literals (``3``, ``0.5``, ``True``, ``None``, ``[1, 2]``, ``"a,b"``), ``true`` and ``false`` as in
TOML, or bare words, which are strings: ``mode=fast``, ``path=/tmp/cache``.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmopt.errors import PluginOptionError

_NAME = re.compile(r"[A-Za-z_]\w*")
_BARE = re.compile(r"[^\s\"'\[\](){}=,]+")
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None, "none": None}
_CLOSING = {"[": "]", "(": ")", "{": "}"}


@dataclass(frozen=True, slots=True)
class PluginSpec:
    """A plugin as its text names it."""

    name: str  # as in `llmopt plugins`
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the plugin

    def __str__(self) -> str:
        if not self.options:
            return self.name
        return f"{self.name}:" + ",".join(f"{key}={value!r}" for key, value in self.options.items())


def expand_plugins(plugins: Iterable[Any]) -> list[Any]:
    """Put what a file lists in the place of ``@file``; everything else stays as it is.

    The file is JSON with a list ``plugins`` of such texts, as ``llmopt tune-spec`` writes it.

    :raises PluginOptionError: the file cannot be read, or has no such list.
    """
    found: list[Any] = []
    for plugin in plugins:
        if not (isinstance(plugin, str) and plugin.startswith("@")):
            found.append(plugin)
            continue
        try:
            listed = json.loads(Path(plugin[1:]).expanduser().read_text(encoding="utf-8"))["plugins"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PluginOptionError(
                f"{plugin!r} names a file with a list of plugins, and {plugin[1:]!r} is none: {error!r}. "
                "`llmopt tune-spec` writes such files."
            ) from error
        if not isinstance(listed, list) or not all(isinstance(text, str) and text[:1] != "@" for text in listed):
            raise PluginOptionError(f"{plugin[1:]!r} must have a list of texts as its `plugins`, found {listed!r}.")
        found += listed
    return found


def parse_plugin(text: str) -> PluginSpec:
    """Read ``name:key=value,key=value``.

    :raises PluginOptionError: says which part could not be read.
    """
    name, colon, rest = text.strip().partition(":")
    if not _NAME.fullmatch(name):
        raise _bad(text, f"{name!r} is not a plugin name")
    if colon and not rest.strip():
        raise _bad(text, "nothing follows the colon")
    options: dict[str, Any] = {}
    for part in _split(text, rest) if colon else []:
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals:
            raise _bad(text, f"{part.strip()!r} is not key=value")
        if not _NAME.fullmatch(key):
            raise _bad(text, f"{key!r} is not an option name")
        if key in options:
            raise _bad(text, f"option {key!r} is given twice")
        options[key] = _value(text, key, value.strip())
    return PluginSpec(name, options)


def _split(text: str, rest: str) -> list[str]:
    """Split at commas that stand outside quotes and brackets."""
    parts, current, quote, open_brackets = [], "", "", ""
    escaped = False
    for char in rest:
        if quote:
            if escaped:
                escaped = False
            elif char == "\\":
                escaped = True
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        elif char in _CLOSING:
            open_brackets += char
        elif open_brackets and char == _CLOSING[open_brackets[-1]]:
            open_brackets = open_brackets[:-1]
        elif char == "," and not open_brackets:
            parts.append(current)
            current = ""
            continue
        current += char
    if quote:
        raise _bad(text, f"a quotation mark {quote} is not closed")
    if open_brackets:
        raise _bad(text, f"a bracket {open_brackets[-1]} is not closed")
    return [*parts, current]


def _value(text: str, key: str, value: str) -> Any:
    if not value:
        raise _bad(text, f"option {key!r} has no value; an empty string is written {key}=''")
    if value.lower() in _WORDS:
        return _WORDS[value.lower()]
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        if _BARE.fullmatch(value):
            return value
    raise _bad(text, f"the value of {key!r}, {value}, is neither a literal nor a bare word; put quotes around a string")


def _bad(text: str, reason: str) -> PluginOptionError:
    return PluginOptionError(
        f"--plugin {text!r}: {reason}.\nWrite name or name:key=value,key=value, for example "
        "prefix_cache or chunked_prefill:chunk_size=512."
    )

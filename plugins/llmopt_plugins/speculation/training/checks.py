"""What can be found wrong with a command before a model is loaded or anything is written."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from llmopt.errors import ConfigError, PluginError, PluginUnavailableError
from llmopt.plugin_info import info_of
from llmopt.plugin_options import PluginSpec, expand_plugins, parse_plugin
from llmopt.plugin_search import find_plugin, make_plugin

_DRAFTS = ("llmopt_replace_propose", "llmopt_wrap_propose")  # a drafter has one of these hooks


def check_plugins(texts: Iterable[str], option: str) -> list[str]:
    """Make each plugin once and forget it. Hands back the texts, with what a file lists in the place of ``@file``.

    :param option: whose values the texts are, for the message.
    :raises ConfigError: a text that cannot be read, a plugin that does not exist, or options that it refuses.
    """
    try:
        found: list[str] = expand_plugins(texts)
    except PluginError as error:
        raise ConfigError(f"{option}: {error}") from error
    for text in found:
        _check_plugin(text, option)
    return found


def check_drafters(texts: Iterable[str], option: str) -> list[str]:
    """The drafters that were asked for, each once, in their order.

    :raises ConfigError: as `check_plugins`, or a plugin that does not draft.
    """
    found: dict[str, str] = {}
    for text in texts:
        spec = _check_plugin(text, option)
        cls = find_plugin(spec.name)
        if not any(hasattr(cls, hook) for hook in _DRAFTS):
            raise ConfigError(
                f"{option} {text!r} is no drafter: a plugin of the layer {info_of(cls).layer} that proposes no tokens. "
                "Put it beside every drafter with --plugin."
            )
        found.setdefault(str(spec), text)
    return list(found.values())


def _check_plugin(text: str, option: str) -> PluginSpec:
    try:
        spec = parse_plugin(text)
        with suppress(PluginUnavailableError):  # of this machine, not of the command; said when the pipeline is built
            make_plugin(spec.name, spec.options)
    except PluginError as error:
        raise ConfigError(f"{option} {text!r}: {error}") from error
    return spec


def check_folder(path: Path, option: str) -> None:
    """:raises ConfigError: files cannot be written into the folder, or it cannot be made."""
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{option} {str(path)!r} is a folder to write into, and there is a file. Name another place.")
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise ConfigError(f"{option} {str(path)!r} cannot be made: {str(existing)!r} is a file. Name another place.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {str(path)!r}: {str(existing)!r} cannot be written to. Name another place.")


def check_file(path: Path, option: str) -> None:
    """:raises ConfigError: the file cannot be written."""
    if path.is_dir():
        raise ConfigError(f"{option} {str(path)!r} is a file to write, and there is a folder. Name another place.")
    check_folder(path.parent, option)
    if path.exists() and not os.access(path, os.W_OK):
        raise ConfigError(f"{option} {str(path)!r} cannot be written to. Name another place.")

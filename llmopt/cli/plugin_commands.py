"""Commands that plugins bring: known by name and summary, imported when they run.

A distribution offers them as entry points of the group ``llmopt.commands``: the name is what users type, the object a
function with typer's annotations. The built-in plugins list theirs in ``commands.json``, because ``--help`` must answer
without importing them, and with them torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import typer

from llmopt.errors import PluginError

_GROUP = "llmopt.commands"


@dataclass(frozen=True, slots=True)
class PluginCommand:
    """A command before its module is imported."""

    name: str  # what users type
    function: str  # module:function
    summary: str  # one line for the list of commands

    def load(self) -> Callable[..., Any]:
        """Import it.

        :raises PluginError: names the command and the reason.
        """
        module, _, name = self.function.partition(":")
        try:
            found: Callable[..., Any] = getattr(importlib.import_module(module), name)
        except Exception as error:  # whatever somebody's module does when it is imported
            raise PluginError(
                f"the command {self.name!r} ({self.function}) cannot be loaded: {type(error).__name__}: {error}"
            ) from error
        return found


def plugin_commands() -> list[PluginCommand]:
    """Those of the built-in plugins, then those of other distributions; a name counts once."""
    found: dict[str, PluginCommand] = {}
    spec = importlib.util.find_spec("llmopt_plugins")  # finds it, and does not import it
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(folder) / "commands.json"
        if path.is_file():
            for name, entry in json.loads(path.read_text(encoding="utf-8")).items():
                found.setdefault(name, PluginCommand(name, entry["function"], entry["summary"]))
    for point in entry_points(group=_GROUP):
        of = f"Of the distribution {point.dist.name}." if point.dist is not None else ""
        found.setdefault(point.name, PluginCommand(point.name, point.value, of))
    return list(found.values())


def add_plugin_commands(app: typer.Typer, arguments: Sequence[str]) -> None:
    """Make the plugins' commands a part of the app: the one that is asked for is imported, the others are listed.

    :param arguments: of the command line, without the program's name.
    """
    taken = {info.name or getattr(info.callback, "__name__", "") for info in app.registered_commands}
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    for command in plugin_commands():
        if command.name in taken:
            continue
        if command.name == asked:
            app.command(command.name)(command.load())
        else:
            app.command(command.name, help=command.summary)(_listed)


def _listed() -> None:
    """Stands in the list of commands for one that is not imported."""

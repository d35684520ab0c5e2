"""Plugins by name: the built-in ones, and those that other distributions offer as entry points."""

from __future__ import annotations

import difflib
import importlib
import inspect
import logging
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from llmopt.errors import PluginError, PluginNotFoundError, PluginOptionError
from llmopt.plugin_info import PluginInfo, info_of

logger = logging.getLogger("llmopt")

PROJECT = "llmopt"  # the pluggy project and the entry-point group


def builtin_plugins() -> tuple[type, ...]:
    """The classes of the built-in plugins. The one place where the core reaches for the plugins, and only by name."""
    classes: tuple[type, ...] = importlib.import_module("llmopt_plugins").BUILTIN
    return classes


def available_plugins() -> list[PluginInfo]:
    """What every built-in plugin and every plugin of other distributions declares; broken ones are warned of."""
    infos, broken = scan_plugins()
    for reason in broken.values():
        logger.warning("%s", reason)
    return infos


def scan_plugins() -> tuple[list[PluginInfo], dict[str, str]]:
    """What every plugin declares, and the entry points that cannot be used: name -> reason."""
    infos = [info_of(cls) for cls in builtin_plugins()]
    known = {info.name for info in infos}
    broken: dict[str, str] = {}
    for point in entry_points(group=PROJECT):
        if point.name not in known:
            try:
                infos.append(info_of(_load(point)))
            except PluginError as error:
                broken[point.name] = str(error)
    return infos, broken


def _load(point: EntryPoint) -> type:
    """Import the plugin class behind an entry point.

    :raises PluginError: names the entry point, its distribution and the reason.
    """
    where = f" of distribution {point.dist.name!r}" if point.dist is not None else ""
    what = f"entry point {point.name!r}{where} ({point.value})"
    try:
        loaded: type = point.load()
    except Exception as error:  # whatever somebody's module does when it is imported
        raise PluginError(f"{what} cannot be loaded: {type(error).__name__}: {error}") from error
    try:
        info_of(loaded)
    except PluginError as error:
        raise PluginError(f"{what} is of no use: {error}") from error
    return loaded


def find_plugin(name: str) -> type:
    """Return the class of the plugin with this name: built-in first, then other distributions.

    :raises PluginNotFoundError: lists the names and the nearest ones.
    :raises PluginError: its module cannot be imported, or holds no plugin.
    """
    classes = {info_of(cls).name: cls for cls in builtin_plugins()}
    if name in classes:
        return classes[name]
    points = {point.name: point for point in entry_points(group=PROJECT)}
    if name in points:
        return _load(points[name])
    known = sorted({*classes, *points})
    near = difflib.get_close_matches(name, known, n=2)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise PluginNotFoundError(f"no plugin is called {name!r}.{hint} Known plugins: {', '.join(known) or 'none'}.")


def make_plugin(name: str, options: dict[str, Any] | None = None) -> Any:
    """Make a plugin by name with its options.

    :raises PluginOptionError: when the plugin does not take an option, or refuses its value; the message lists them.
    """
    cls = find_plugin(name)
    takes = [p for p in inspect.signature(cls).parameters.values() if p.kind is not p.VAR_POSITIONAL]
    names = [p.name for p in takes]
    for option in options or {}:
        if option not in names:
            raise PluginOptionError(
                f"plugin {name!r} has no option {option!r}. Its options: {', '.join(names) or 'none'}."
            )
    try:
        return cls(**(options or {}))
    except (TypeError, ValueError) as error:
        raise PluginOptionError(f"plugin {name!r} refuses its options {options}: {error}") from error

"""What a plugin declares about itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from llmopt import layers
from llmopt.errors import PluginError


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """What a plugin declares. Checked when it is registered."""

    name: str  # what users type
    layer: str  # one of `llmopt.layers.LAYERS`
    promise: Literal["exact", "distribution", "lossy"]  # same tokens in fp32; same distribution; a measured loss
    summary: str = ""  # one line for tables
    requires: tuple[str, ...] = ()  # names of plugins that must be listed too
    conflicts: tuple[str, ...] = ()  # names of plugins that must not be listed
    devices: tuple[str, ...] = ()  # device types it serves; empty: all
    model_types: tuple[str, ...] = ()  # `config.model_type` values it serves; empty: all
    loss: str = ""  # for "lossy": the measured loss
    auto: bool = False  # whether plugins="auto" may choose it
    in_company: bool = True  # whether `check_plugin` meets it unasked; no: building it takes too long for every check


def info_of(plugin: Any) -> PluginInfo:
    """Return a plugin's declaration.

    :raises PluginError: when it has none, or declares a layer that does not exist.
    """
    info = getattr(plugin, "info", None)
    if not isinstance(info, PluginInfo):
        raise PluginError(f"{plugin!r} is not a plugin: it has no `info = PluginInfo(...)`.")
    if info.layer not in layers.LAYERS:
        raise PluginError(
            f"plugin {info.name!r} declares layer {info.layer!r}; the layers are {', '.join(layers.LAYERS)}."
        )
    return info

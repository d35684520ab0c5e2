"""Checks of plugin options. What they raise becomes a `PluginOptionError` where a plugin is made by its name."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from llmopt.errors import PluginOptionError

if TYPE_CHECKING:
    from llmopt.kv_cache import KVCache
    from llmopt.stages import Machine


def check_int(name: str, value: Any, least: int, most: int | None = None, other: str = "", of: str = "") -> None:
    """Refuse what is no whole number in this range.

    :param other: what the option may be instead, for the message.
    :param of: what it counts, for the message.
    :raises ValueError: names the option, what it may be, and what was found.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        limits = f", at least {least}" if most is None else f" from {least} to {most}"
        raise ValueError(f"{name} is a whole number{of and f' of {of}'}{limits}{other}, found {value!r}")


def check_number(name: str, value: Any, what: str, holds: Callable[[float], bool]) -> None:
    """Refuse what is no number, and one out of range.

    :param what: what the option is, for the message.
    :param holds: whether a number is in range; false for NaN.
    :raises ValueError: names the option, what it is, and what was found.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not holds(value):
        raise ValueError(f"{name} is {what}, found {value!r}")


def check_flag(name: str, value: Any, other: str = "") -> None:
    """Refuse what is neither True nor False.

    :param other: what the option may be instead, for the message.
    :raises ValueError: names the option and what was found.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name} is True or False{other}, found {value!r}")


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Refuse what is none of these values, or equals one and is of another type, such as 4.0 and 4.

    :raises ValueError: names the option, its values, and what was found.
    """
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        *most, last = (f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in choices)
        raise ValueError(f"{name} is {', '.join(most)} or {last}, found {value!r}")


def check_path(name: str, value: Any, what: str) -> None:
    """Refuse what is no path, or an empty one, which would be the working directory.

    :raises ValueError: names the option, what it may be, and what was found.
    """
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise ValueError(f"{name} is {what}, found {value!r}")


def check_use(needs: str, options: dict[str, tuple[Any, Any]]) -> None:
    """Refuse options that were set and would do nothing.

    :param needs: what they go with, for the message.
    :param options: name -> its value and its default.
    :raises ValueError: names those whose value is not the default.
    """
    found = {name: value for name, (value, default) in options.items() if value != default}
    if found:
        told = ", ".join(f"{name}={value!r}" for name, value in found.items())
        verb, them = ("goes", "it") if len(found) == 1 else ("go", "them")
        raise ValueError(
            f"{', '.join(found)} {verb} with {needs}, found {told} without that. Leave {them} out, or set both"
        )


def check_host_memory(
    plugin: str, option: str, num_bytes: int, machine: Machine, kv_cache: KVCache | None = None
) -> None:
    """Refuse a size of host memory for KV blocks that this process cannot have, or that holds none.

    :param kv_cache: whose blocks go there; None: not known yet.
    :raises PluginOptionError: names the plugin, the option, what was asked and what there is.
    """
    if num_bytes > machine.available_bytes:
        raise PluginOptionError(
            f"{plugin} has {num_bytes} {option}, and this process may take {machine.available_bytes} bytes of host "
            "memory. Give it a part of that."
        )
    block_bytes = 0 if kv_cache is None else kv_cache.block_size * kv_cache.bytes_per_token(kv_cache.shapes)
    if num_bytes < block_bytes:
        raise PluginOptionError(
            f"{plugin} has {num_bytes} {option}, and a KV block of this model takes {block_bytes}: nothing would be "
            "kept. Give it many times as much."
        )

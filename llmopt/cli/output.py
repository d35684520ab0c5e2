"""What all commands print with."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llmopt.plugin_options import expand_plugins, parse_plugin

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from llmopt.pipeline import InferencePipeline


def console(*, stderr: bool = False) -> Console:
    """A rich console for tables and messages. Without a terminal it is wide enough for the tables."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else 140, highlight=False)


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def make_plugins(texts: Sequence[str]) -> list[Any]:
    """Plugin objects from ``name:key=value`` texts, in their order.

    :raises PluginError: a text that cannot be read, an unknown plugin, or an option it does not take.
    """
    specs = [parse_plugin(text) for text in expand_plugins(texts)]  # all of them first: a typing error is cheap to find
    from llmopt.plugin_search import make_plugin

    return [make_plugin(spec.name, spec.options) for spec in specs]


def load_model(
    name: str, *, dtype: str, device_map: str | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """`llmopt.hub.load`, with progress bars only where somebody sees them."""
    from llmopt.hub import load

    _bars_for_people_only()
    return load(name, dtype=dtype, device_map=device_map)


def build_pipeline(name: str, plugins: Sequence[Any], *, dtype: str, device_map: str | None) -> InferencePipeline:
    """`llmopt.build` of a name, so that plugins may load the model their own way; bars as in `load_model`."""
    import llmopt

    _bars_for_people_only()
    return llmopt.build(name, plugins=plugins, load_options={"dtype": dtype, "device_map": device_map})


def _bars_for_people_only() -> None:
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()

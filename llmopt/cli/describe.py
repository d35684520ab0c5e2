"""``llmopt describe``: what a pipeline is made of."""

from __future__ import annotations

from collections.abc import Sequence

from llmopt.cli.output import build_pipeline, make_plugins, print_json


def run(model_name: str, plugin_texts: Sequence[str], *, dtype: str, device_map: str | None, as_json: bool) -> None:
    """Build the pipeline, print its description, close it."""
    pipe = build_pipeline(model_name, make_plugins(plugin_texts), dtype=dtype, device_map=device_map)
    try:
        description = pipe.describe()
        if as_json:
            print_json(description.to_dict())
        else:
            print(description)
    finally:
        pipe.close()

"""``llmopt describe``: what a pipeline is made of."""

from __future__ import annotations

from collections.abc import Sequence

from llmopt.cli.output import load_model, make_plugins, print_json


def run(model_name: str, plugin_texts: Sequence[str], *, dtype: str, device_map: str | None, as_json: bool) -> None:
    """Build the pipeline, print its description, close it."""
    plugins = make_plugins(plugin_texts)
    import llmopt

    model, tokenizer = load_model(model_name, dtype=dtype, device_map=device_map)
    pipe = llmopt.build(model, plugins=plugins, tokenizer=tokenizer)
    try:
        description = pipe.describe()
        if as_json:
            print_json(description.to_dict())
        else:
            print(description)
    finally:
        pipe.close()

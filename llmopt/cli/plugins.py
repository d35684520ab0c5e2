"""``llmopt plugins``: the table of plugins."""

from __future__ import annotations

import sys
from dataclasses import asdict

from llmopt.cli.output import console, print_json


def run(*, as_json: bool) -> None:
    """Print what every plugin declares, in the order of the layers; on standard error, which are broken and why."""
    from llmopt.layers import LAYERS
    from llmopt.plugin_search import scan_plugins

    order = {layer: number for number, layer in enumerate(LAYERS)}
    found, broken = scan_plugins()
    for reason in broken.values():
        print(f"Left out: {reason}", file=sys.stderr)
    infos = sorted(found, key=lambda info: (order[info.layer], info.name))
    if as_json:
        print_json([asdict(info) for info in infos])
        return
    if not infos:
        print("No plugins are installed.")
        return
    from rich.table import Table

    table = Table(title=f"{len(infos)} plugins")
    for heading in ("layer", "plugin", "promise", "requires", "conflicts", "summary"):
        table.add_column(heading, no_wrap=heading == "plugin")
    previous = ""
    for info in infos:
        layer = info.layer if info.layer != previous else ""
        previous = info.layer
        table.add_row(layer, info.name, info.promise, ", ".join(info.requires), ", ".join(info.conflicts), info.summary)
    console().print(table)

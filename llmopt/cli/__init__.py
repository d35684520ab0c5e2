"""The command line: ``llmopt generate | describe | plugins | bench | demo``.

Nothing here imports torch before a command needs it, so that ``--help`` answers at once.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; expected errors become one message on stderr and exit status 1."""
    from llmopt.cli.app import app
    from llmopt.cli.plugin_commands import add_plugin_commands
    from llmopt.errors import LlmoptError

    try:
        add_plugin_commands(app, sys.argv[1:])
        app()
    except LlmoptError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(1) from None

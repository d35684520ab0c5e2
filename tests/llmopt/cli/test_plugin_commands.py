from __future__ import annotations

import os
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from llmopt.cli import plugin_commands
from llmopt.cli.plugin_commands import PluginCommand, add_plugin_commands
from llmopt.errors import PluginError


def test_commands_of_plugins_are_listed_without_importing_them() -> None:
    code = (
        "import sys\nsys.argv = ['llmopt', '--help']\nfrom llmopt.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    print('torch' in sys.modules, 'llmopt_plugins' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert "train-drafter" in done.stdout, done.stderr
    assert "tune-spec" in done.stdout
    assert done.stdout.strip().endswith("False False")


def test_the_command_that_is_asked_for_is_the_plugins_own() -> None:
    app = typer.Typer()
    app.command("other")(lambda: None)
    add_plugin_commands(app, ["train-drafter", "--help"])
    result = CliRunner().invoke(app, ["train-drafter", "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "--budget-minutes" in result.output
    assert "--algo" in result.output


def test_a_command_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = PluginCommand("broken", "no_such_module:run", "")
    monkeypatch.setattr(plugin_commands, "plugin_commands", lambda: [broken])
    with pytest.raises(PluginError, match=r"the command 'broken' \(no_such_module:run\) cannot be loaded"):
        add_plugin_commands(typer.Typer(), ["broken"])
    add_plugin_commands(typer.Typer(), ["--help"])  # nobody asked for it


def test_a_plugin_cannot_take_the_name_of_a_command_of_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    app = typer.Typer()

    @app.command("generate")
    def own() -> None:
        print("own")

    monkeypatch.setattr(plugin_commands, "plugin_commands", lambda: [PluginCommand("generate", "x:y", "")])
    add_plugin_commands(app, ["generate"])
    assert CliRunner().invoke(app, []).stdout == "own\n"

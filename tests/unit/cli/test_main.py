"""Commands are imported when they are called."""

from __future__ import annotations

import subprocess
import sys

from typer.testing import CliRunner

from gradwire.cli.main import COMMANDS, app


def test_help_names_every_command_and_no_other_is_known() -> None:
    found = CliRunner().invoke(app, ["--help"]).output
    assert all(f" {name} " in found for name in COMMANDS)
    refused = CliRunner().invoke(app, ["bnech"])
    assert refused.exit_code == 2


def test_what_runs_others_starts_without_torch() -> None:
    modules = "gradwire.cli.main, gradwire.lab.cli.net, gradwire.lab.cli.bench, gradwire.lab.cli.demo"
    code = f"import {modules}, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_all_that_is_public_is_there_on_first_use() -> None:
    code = (
        "import gradwire\n"
        "assert 'attach' not in vars(gradwire) and 'attach' in dir(gradwire)\n"
        "assert all(getattr(gradwire, name) is not None for name in gradwire.__all__)\n"
        "assert gradwire.recipes.names() and gradwire.recipe('dense')\n"
        "assert gradwire.measure.layer_rates and gradwire.errors.PeerFailed\n"
        "assert not hasattr(gradwire, 'attac')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

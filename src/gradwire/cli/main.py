"""The command line: every command lives in a file of its own, which is imported when it is called."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from gradwire.version import described

COMMANDS = {
    "net": "gradwire_lab.cli.net",
    "recipes": "gradwire.cli.recipes",
    "advise": "gradwire.cli.advise",
    "plan": "gradwire.cli.planner",
    "simulate": "gradwire.cli.simulator",
    "bench": "gradwire_lab.cli.bench",
    "demo": "gradwire_lab.cli.demo",
    "report": "gradwire_lab.cli.report",
    "probe": "gradwire.cli.probe",
    "warmup": "gradwire.cli.warmup",
    "lighthouse": "gradwire.cli.lighthouse",
    "members": "gradwire.cli.members",
    "doctor": "gradwire.cli.doctor",
}
"""The module of each command, in the order of the help text. The function or `Typer` of that name is
the command. Of gradwire, only this table names modules of `gradwire_lab`, as text."""


class _OnDemand(Mapping[str, Any]):
    """Commands by name: each is imported when it is called, because torch takes seconds to import."""

    def __getitem__(self, name: str) -> Any:
        if name not in COMMANDS:
            raise KeyError(name)
        found = getattr(import_module(COMMANDS[name]), name)
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(add_completion=False, rich_markup_mode=None)
            alone.command(name)(found)
            found = alone
        command = typer.main.get_command(found)
        command.name = name
        for each in (command, *getattr(command, "commands", {}).values()):
            each.short_help = (each.help or "").partition("\n\n")[0]  # which click would cut at 45 characters
        return command

    def get(self, name: str, default: Any = None) -> Any:
        """Like `dict.get`, but a `KeyError` inside a command's module is not taken for a missing command."""
        return self[name] if name in COMMANDS else default

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class _Group(TyperGroup):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands: Any = _OnDemand()


app = typer.Typer(
    name="gradwire",
    cls=_Group,
    help="Near-linear data-parallel PyTorch training on slow networks.",
    no_args_is_help=True,
    rich_markup_mode=None,  # its columns cut words below 100 characters
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"gradwire {described()}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version, and the commit if it is known.",
        ),
    ] = False,
) -> None:
    """Parse, call, print."""

"""The command line: every command lives in a file of its own and is registered here."""

import typer

from gradwire.cli import net
from gradwire.cli.bench import bench
from gradwire.cli.demo import demo
from gradwire.cli.probe import probe
from gradwire.cli.recipes import recipes

app = typer.Typer(
    name="gradwire",
    help="Near-linear data-parallel PyTorch training on slow networks.",
    no_args_is_help=True,
    add_completion=False,
)
app.add_typer(net.app, name="net")
app.command()(recipes)
app.command()(bench)
app.command()(demo)
app.command()(probe)


@app.callback()
def main() -> None:
    """Parse, call, print."""

"""The command line: every command lives in a file of its own and is registered here."""

import typer

app = typer.Typer(
    name="gradwire",
    help="Near-linear data-parallel PyTorch training on slow networks.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback()
def main() -> None:
    """Parse, call, print."""

"""Checks before a command that takes minutes: the folders of its results, and the packages that it needs."""

import sys
from importlib import import_module
from pathlib import Path

import typer


def check_folder(*paths: Path | None) -> None:
    """Raise `ValueError` for a file that could not be written because its folder does not exist.

    >>> check_folder(None, Path("out.json"))
    """
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"{path}: the folder {path.parent} does not exist")


def check_extra(module: str, purpose: str) -> None:
    """End the command with a sentence where a module of the extra `lab` cannot be imported.

    >>> check_extra("jinja2", "the report")
    """
    try:
        import_module(module)
    except ImportError:
        print(f"gradwire: {purpose} needs {module}: pip install gradwire[lab]", file=sys.stderr)
        raise typer.Exit(2) from None

"""Results in JSON, and checks before a command that takes minutes: folders, packages, names of recipes."""

import json
import sys
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Any

import typer

from gradwire.environment import write_whole
from gradwire.version import EXTRA

FORMAT = 1
"""The version of all documents in JSON. It rises when a key goes or changes its meaning."""

STDOUT = "-"
"""The path that stands for standard output: the document is printed, and nothing else."""


def check_folder(*paths: Path | None) -> None:
    """Raise `ValueError` for a file that could not be written because its folder does not exist.

    >>> check_folder(None, Path("out.json"))
    """
    for path in paths:
        if path is not None and str(path) != STDOUT and not path.absolute().parent.is_dir():
            raise ValueError(f"{path}: the folder {path.parent} does not exist")


def check_extra(module: str, purpose: str) -> None:
    """End the command with a sentence where a module of the extra `lab` cannot be imported.

    >>> check_extra("jinja2", "the report")
    """
    try:
        import_module(module)
    except ImportError:
        print(f"gradwire: {purpose} needs {module}: {EXTRA.format('lab')}", file=sys.stderr)
        raise typer.Exit(2) from None


def write_json(document: dict[str, Any], path: Path | None) -> None:
    """Write a document to a file, or print it for "-"; without a path do neither.

    >>> write_json({"format": FORMAT}, Path("-"))
    {
      "format": 1
    }
    """
    text = json.dumps(document, indent=2)
    if str(path) == STDOUT:
        print(text)
    elif path is not None:
        write_whole(path, text + "\n")


def check_recipe(name: str) -> None:
    """Raise `ValueError` for a recipe that there is not, without importing torch, which takes seconds.

    >>> check_recipe("topk")
    >>> check_recipe("topq")
    Traceback (most recent call last):
    ValueError: unknown recipe 'topq'; did you mean 'topk'?
    """
    # The package around the catalogue loads torch.
    folders = find_spec("gradwire.recipes").submodule_search_locations  # type: ignore[union-attr]  # it is ours
    known = run_path(str(Path(next(iter(folders or ()))) / "catalogue.py"))["MODULES"]
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "`gradwire recipes` lists them"
        raise ValueError(f"unknown recipe {name!r}; {hint}")

"""`gradwire report`: a page of what `gradwire bench` or `gradwire demo` has measured."""

import json
from pathlib import Path
from typing import Annotated

import typer

from gradwire.cli.prerequisites import FORMAT, check_extra, check_folder
from gradwire.environment import write_whole


def report(
    document: Annotated[Path, typer.Argument(help="File that bench or demo wrote with --json.")],
    out: Annotated[
        Path | None, typer.Option(help="Where the page goes; by default beside the document.")
    ] = None,
) -> None:
    """Make one HTML page of a bench's or a demonstration's JSON: tables, charts, and how it was run."""
    check_extra("jinja2", "the report")
    path = out or document.with_suffix(".html")
    try:
        check_folder(path)
        found = json.loads(document.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise ValueError(f"not a document of format {FORMAT}")
        write_page(found, path)
    except OSError as error:
        raise typer.BadParameter(f"{error.filename or document}: {error.strerror}") from None
    except ValueError as error:
        raise typer.BadParameter(f"{document}: {error}") from None


def write_page(document: dict[str, object], path: Path) -> None:
    """Write the page, and say where it is."""
    from gradwire_lab.report.page import render  # not at the top: without jinja2 the help still has to work

    write_whole(path, render(document))
    typer.echo(f"Report: {path.resolve().as_uri()}", err=True)

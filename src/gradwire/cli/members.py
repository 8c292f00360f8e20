"""`gradwire members`: tries an object store for rounds, and shows the progress of a run in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

members = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Try an object store for rounds of local steps, and watch a run in it.",
)

Url = Annotated[
    str, typer.Argument(help="s3://bucket/run, gs://bucket/run, az://container/run, or a folder.")
]


@members.command()
def check(url: Url) -> None:
    """Create, race, list, read back and delete objects under URL, and say whether rounds can go over it."""
    from gradwire.errors import TransportError
    from gradwire.members.bucket.check import findings

    objects = _opened(url)
    all_hold = True
    try:
        for each in findings(objects):
            typer.echo(f"{'yes' if each.holds else 'NO '}  {each.what}: {each.told}")
            all_hold &= each.holds
    except TransportError as error:
        typer.echo(f"gradwire: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo("rounds can go over this store" if all_hold else "rounds cannot go over this store")
    raise typer.Exit(0 if all_hold else 1)


@members.command()
def watch(
    url: Url,
    html: Annotated[Path | None, typer.Option(help="Write the same as one page to this file.")] = None,
    every: Annotated[float, typer.Option(min=1.0, help="Seconds between two looks.")] = 10.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, and end.")] = False,
) -> None:
    """Print the rounds of a run as they are sealed, with members, bytes and losses, until Ctrl-C."""
    from gradwire.errors import GradwireError, TransportError
    from gradwire.members.bucket.progress import Sealed, living, page, sealed
    from gradwire.members.bucket.records import SPEC

    objects, rounds = _opened(url, makes=False), list[Sealed]()
    try:
        if objects.get(SPEC) is None:
            typer.echo(
                f"gradwire: there is no run at {url}: look at the URL, or start its first member", err=True
            )
            raise typer.Exit(1)
        before = list[str]()
        while True:
            for each in sealed(objects, len(rounds)):
                rounds.append(each)
                typer.echo(str(each))
            here = living(objects)
            told = [f"  {each}" for each in here]
            if told != before:
                typer.echo("\n".join(told))
            before = told
            if html is not None:
                html.write_text(page(url, rounds, here), encoding="utf-8")
            if once:
                return
            objects.pause(every)
    except (GradwireError, TransportError) as error:
        typer.echo(f"gradwire: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        return


def _opened(url: str, *, makes: bool = True) -> Any:
    """The store at `url`; ends the command with a sentence where there is none."""
    from gradwire.errors import TransportError
    from gradwire.members.bucket.objects import Bucket

    try:
        return Bucket(url, makes=makes)
    except (ImportError, TransportError, ValueError) as error:
        typer.echo(f"gradwire: {error}", err=True)
        raise typer.Exit(1 if isinstance(error, TransportError) else 2) from None

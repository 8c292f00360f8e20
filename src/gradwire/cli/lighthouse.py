"""`gradwire lighthouse`: torchft's lighthouse, at which replicas that come and go find each other."""

from __future__ import annotations

import threading
from typing import Annotated

import typer

from gradwire.quantities import time_s
from gradwire.version import EXTRA


def lighthouse(
    at_least: Annotated[
        int, typer.Option("--at-least", min=1, help="Members that a round needs at least.")
    ] = 2,
    grace: Annotated[
        str,
        typer.Option(
            help="How long a round waits for members that live and have not asked yet: longer than the time "
            "between rounds."
        ),
    ] = "30s",
    heartbeat_timeout: Annotated[
        str, typer.Option(help="A member that was not heard of for so long is taken to be dead.")
    ] = "5s",
    bind: Annotated[
        str, typer.Option(help="Address and port at which it listens: HOST:PORT.")
    ] = "127.0.0.1:29510",
) -> None:
    """Run torchft's lighthouse until Ctrl-C. Members name it in gradwire.members.torchft(…).

    It has no authentication: whoever reaches its port can stop the job. Bind it to a private address.
    """
    try:
        grace_s, dead_s = time_s(grace), time_s(heartbeat_timeout)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        from torchft.coordination import LighthouseServer
    except ImportError:
        typer.echo(f"gradwire: the lighthouse needs torchft: {EXTRA.format('elastic')}", err=True)
        raise typer.Exit(2) from None
    try:
        server = LighthouseServer(
            bind=bind,
            min_replicas=at_least,
            join_timeout_ms=round(grace_s * 1e3),
            heartbeat_timeout_ms=round(dead_s * 1e3),
        )
    except Exception as error:  # of several types
        typer.echo(f"nothing can listen at {bind}: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"lighthouse at {_url(bind, server.address())}, for at least {at_least} members")
    try:
        threading.Event().wait()
    finally:
        server.shutdown()


def _url(bind: str, address: str) -> str:
    """The URL that members pass: torchft's own `address` has this machine's name in place of what was bound.

    >>> _url("10.0.0.1:0", "http://head:29510"), _url("[::]:29510", "http://head:29510")
    ('http://10.0.0.1:29510', 'http://head:29510')
    """
    host, port = bind.rpartition(":")[0], address.rstrip("/").rpartition(":")[2]
    return address if host in ("", "0.0.0.0", "[::]") else f"http://{host}:{port}"

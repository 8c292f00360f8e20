"""The progress of a prediction on a terminal: rows as they come, and the share that is done."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

ROWS = 12
"""Rows that are shown at most, the newest."""


@contextmanager
def waiting(console: Console | None = None) -> Iterator[Callable[[str, float], None]]:
    """A function to call with each finished row and the share that is done then.

    It shows them on the standard error, if that is a terminal, and takes them away at the end.
    """
    if console is None and not sys.stderr.isatty():
        yield lambda _row, _share: None
        return
    # Loaded where there is somebody to look on.
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(stderr=True) if console is None else console
    if not console.is_terminal:
        yield lambda _row, _share: None
        return
    rows: list[str] = []
    with Live(Text("predicting"), console=console, transient=True) as live:

        def told(row: str, share: float) -> None:
            rows.append(row)
            live.update(Text("\n".join([*rows[-ROWS:], f"{share:.0%}"])), refresh=True)

        yield told

"""Tables in text, for people, at any width."""

from __future__ import annotations

from collections.abc import Sequence


def table_text(head: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """The first column to the left, and folded where the table would be wider; numbers to the right, whole.

    >>> print(table_text(("recipe", "step"), [("int8", "396 ms"), ("topk(ratio=0.01)", "186 ms")], 40))
    recipe              step
    int8              396 ms
    topk(ratio=0.01)  186 ms
    """
    # Loaded on demand: who only trains prints no table.
    from io import StringIO

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, header_style="")
    table.add_column(Text(head[0]), overflow="fold")
    for title in head[1:]:
        table.add_column(Text(title), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(file=StringIO(), width=width, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())

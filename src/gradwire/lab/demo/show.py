"""The demonstration's result on the terminal."""

from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table

from gradwire.lab.bench.modes import mode_text
from gradwire.lab.demo.summary import final_figures, headline, table_lines

_VERDICTS = {None: "–", True: "[green]holds[/green]", False: "[red]missed[/red]"}
_HEADS = ("step", "wait", "scaling", "sent", "counted", "CPU")


def show(document: dict[str, Any]) -> Group:
    """Headline, speeds, final figures by seed, claims and notes."""
    parts: list[Any] = ["", f"[bold]{headline(document)}[/bold]", mode_text(document["settings"]["mode"])]
    parts += [_speeds(document), _figures(document), _claims(document)]
    parts += [f"[dim]{note}[/dim]" for note in document["notes"]]
    return Group(*parts)


def show_failures(document: dict[str, Any], console: Console) -> None:
    """Reasons and tracebacks, unabridged."""
    for failure in document["failures"]:
        console.print(
            f"{failure['name']} failed: {failure['reason']}\n{failure['detail']}", style="red", markup=False
        )


def exit_code(document: dict[str, Any]) -> int:
    """1 when something broke or replicas differ. A missed speed is said, not punished: machines are busy."""
    differ = any(course["replicas_identical"] is False for course in document["courses"])
    return 1 if document["failures"] or differ else 0


def _speeds(document: dict[str, Any]) -> Table:
    view = _plain_table()
    view.add_column("per step", no_wrap=True)
    for head in _HEADS:
        view.add_column(head, justify="right")
    for cells in table_lines(document):
        view.add_row(*cells)
    return view


def _figures(document: dict[str, Any]) -> Table:
    figures = final_figures(document)
    view = _plain_table(title=f"{figures['label']} after {document['settings']['steps']} steps")
    view.add_column("seed")
    view.add_column("plain DDP", justify="right")
    view.add_column("gradwire", justify="right")
    for cells in figures["lines"]:
        view.add_row(*cells)
    return view


def _claims(document: dict[str, Any]) -> Table:
    view = _plain_table("claim", "found", "wanted", "verdict")
    for check in document["checks"]:
        view.add_row(check["claim"], check["found"], check["wanted"], _VERDICTS[check["passed"]])
    return view


def _plain_table(*heads: str, title: str | None = None) -> Table:
    """Without frames: it must fit into 80 columns."""
    return Table(*heads, title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)

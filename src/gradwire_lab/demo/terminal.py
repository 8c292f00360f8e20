"""The demonstration on the terminal: progress bars of both contestants, then the result."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from gradwire_lab.bench.process_set import OnStep
from gradwire_lab.bench.statistics import StepSample
from gradwire_lab.bench.units import mode_text, seconds_text
from gradwire_lab.demo.findings import final_figures, headline, projected, table_lines


class LiveProgress:
    """One bar per contestant and seed, with its loss and step time."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress = progress
        self._console = console
        self._bars: dict[tuple[str, int], TaskID] = {}

    def say(self, text: str) -> None:
        """Print a line above the bars."""
        self._console.print(text, highlight=False)

    def follow(self, name: str, seed: int, total: int, *, shaped: bool) -> OnStep:
        """Make a callback that moves the bar of the contestant `name` with this seed, of `total` steps, by
        one for each step. Steps that are not `shaped` run without the slow link, and say so: beside the
        others, they look fast.
        """
        link = "" if shaped else ", unshaped link"
        label = {"ddp": "plain DDP"}.get(name, name)
        if (name, seed) not in self._bars:
            self._bars[name, seed] = self._progress.add_task(f"{label}, seed {seed}", total=total, state="")
        bar = self._bars[name, seed]

        def on_step(rank: int, sample: StepSample) -> None:
            if rank == 0:
                loss = "-" if sample.loss is None else f"{sample.loss:.3f}"
                state = f"{seconds_text(sample.step_s)}/step{link}, loss {loss}"
                self._progress.update(bar, advance=1, state=state)

        return on_step


@contextmanager
def live_progress(console: Console) -> Iterator[LiveProgress]:
    """Bars for as long as the block lasts; they stay on screen afterwards."""
    columns = (
        TextColumn("{task.description:<18}"),
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
    )
    with Progress(*columns, console=console, refresh_per_second=8) as progress:
        yield LiveProgress(progress, console)


_VERDICTS = {None: "–", True: "[green]holds[/green]", False: "[red]missed[/red]"}
_HEADS = ("step", "wait", "scaling", "sent", "counted", "CPU")


def show(document: dict[str, Any]) -> Group:
    """Headline, speeds, final figures by seed, claims and notes."""
    parts: list[Any] = ["", f"[bold]{headline(document)}[/bold]"]
    parts += [text for text in (projected(document), mode_text(document["settings"]["mode"])) if text]
    parts += [_speeds(document), _figures(document), _claims(document)]
    parts += [f"[dim]{note}[/dim]" for note in document["notes"]]
    return Group(*parts)


def show_failures(document: dict[str, Any], console: Console) -> None:
    """Print the reason and the traceback of each failure, unabridged."""
    for failure in document["failures"]:
        console.print(
            f"{failure['name']} failed: {failure['reason']}\n{failure['detail']}", style="red", markup=False
        )


def exit_code(document: dict[str, Any]) -> int:
    """1 when something broke or replicas differ. A missed speed is said, not punished: machines are busy."""
    differ = any(course["replicas_identical"] is False for course in document["courses"])
    return 1 if document["failures"] or differ else 0


def _speeds(document: dict[str, Any]) -> Table:
    view = _plain_table(title="Medians of the steps on the slow link that count")
    view.add_column("per step", no_wrap=True)
    for head in _HEADS:
        view.add_column(head, justify="right")
    for cells in table_lines(document):
        view.add_row(*cells)
    return view


def _figures(document: dict[str, Any]) -> Table:
    """One line for each figure and seed: the page's table, of one line for each seed, takes 90 columns."""
    figures = final_figures(document)
    view = _plain_table("figure", "seed", title=f"After {document['settings']['steps']} steps")
    for head in ("plain DDP", "gradwire", "difference"):
        view.add_column(head, justify="right")
    for first in range(1, len(figures["heads"]), 3):
        label = figures["heads"][first].removeprefix("plain DDP: ")
        for cells in figures["lines"]:
            view.add_row(label, cells[0], *cells[first : first + 3])
    return view


def _claims(document: dict[str, Any]) -> Table:
    view = _plain_table("claim", "found", "wanted", "verdict")
    for check in document["checks"]:
        view.add_row(check["claim"], check["found"], check["wanted"], _VERDICTS[check["passed"]])
    return view


def _plain_table(*heads: str, title: str | None = None) -> Table:
    """Table with the columns `heads`, without frames, so that it fits into 80 columns."""
    return Table(*heads, title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)

"""Tables of the bench document for the terminal: results first, then the parts of the time."""

from collections.abc import Callable
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.markup import escape
from rich.table import Table

from gradwire_lab.bench.settings import stock
from gradwire_lab.bench.units import bytes_text, mode_text, ratio_text, seconds_text

Document = dict[str, Any]
Column = tuple[str, Callable[[Document], str]]

_REPLICAS: dict[bool | None, str] = {None: "-", True: "identical", False: "[red]DIFFER[/red]"}


def results(settings: Document) -> tuple[Column, ...]:
    """The columns of the first table."""
    beside = stock(settings)
    return (
        ("step", lambda row: seconds_text(row["step_s"])),
        ("scaling", lambda row: ratio_text(row["scaling"], percent=True)),
        (f"vs {beside}", lambda row: ratio_text((row[f"speedup_over_{beside}"] or {}).get("ratio"))),
        ("sent", lambda row: bytes_text(row["wire_bytes_per_step"])),
        ("counted", lambda row: bytes_text(row["interface_bytes_per_step"])),
        ("loss", lambda row: "-" if row["loss"] is None else f"{row['loss']:.3f}"),
        ("replicas", lambda row: _REPLICAS[row["replicas_identical"]]),
    )


COSTS: tuple[Column, ...] = (
    ("backward", lambda row: seconds_text(row["backward_s"])),
    ("compress", lambda row: seconds_text(row["compress_s"])),
    ("exposed", lambda row: seconds_text(row["exposed_comm_s"])),
    ("data", lambda row: seconds_text(row["data_s"])),
    ("CPU", lambda row: seconds_text(row["cpu_s"])),
    ("peak", lambda row: bytes_text(row["peak_bytes"])),
)

_ROOM = 10_000
"""Columns of a terminal in which every table fits."""


def tables(document: Document) -> Group:
    """Both tables, a title above and how to read them below."""
    return Group(
        title(document["settings"]),
        _Fitting(document, results(document["settings"])),
        _Fitting(document, COSTS),
        caption(document),
    )


def title(settings: Document) -> str:
    """Workload, link, and the recipes' policy where it is not the default."""
    delay = f", delay {settings['delay']}" if settings["delay"] not in ("", "0", "0s", "0ms") else ""
    sharded = "FSDP2 · " if settings.get("sharded") else ""
    policy = settings["policy"] or settings["workload_facts"].get("suggested_policy")
    on_nodes = f"on {settings['nodes']} nodes · " if settings.get("nodes") else ""
    return (
        f"[bold]{escape(settings['workload'])}[/bold] · {sharded}{settings['workers']} workers · "
        f"{on_nodes}{settings['rate']}{delay} · {mode_text(settings['mode'])}"
        + (f" · policy {escape(policy)}" if policy and not sharded else "")
    )


def caption(document: Document) -> str:
    """Explains the columns, and gives the A/A spread that every ratio must be held against."""
    spread, settings = document["spread"], document["settings"]
    repeat = (
        "The bound was not measured twice."
        if spread is None
        else f"The bound against itself: {spread['ratio']:.3f} ({spread['low']:.3f} to {spread['high']:.3f})."
    )
    return (
        f"[dim]{repeat} Medians per step over {settings['rounds']} x {settings['steps']} steps, settings "
        "alternating.\n" + "\n".join(notes(settings)) + "[/dim]"
    )


def notes(settings: Document) -> list[str]:
    """Explains the columns, a line each."""
    where = (
        "at the interface of a node, all its ranks together" if settings.get("nodes") else "at the interface"
    )
    peak = "peak: resident memory, torch included; kernels that a first run must compile add some 60 MB."
    if settings.get("sharded"):
        return [
            "bound: a step of the whole model, without communication; scaling: speed relative to it.",
            f"sent: bytes per rank and step; counted: {where}.",
            "loss: in training, with rounded weights; replicas: the weights that ranks compute with.",
            "compress: encoding and decoding; backward: with the gathers and scatters that it waits for.",
            peak,
        ]
    return [
        "bound: the same step without communication; scaling: speed relative to it.",
        f"sent: predicted bytes per rank and step; counted: {where}.",
        "compress: encoding and decoding; of a peer, the time inside its hook.",
        "exposed: what backward waited at its end.",
        peak,
    ]


def failures(document: Document) -> list[str]:
    """A paragraph per failed setting, tracebacks included."""
    return [
        f"{row['name']} ({row['kind']}) failed: {row['failed']}\n{row['failure_detail'] or ''}".rstrip()
        for row in document["rows"]
        if row["failed"]
    ]


def exit_code(document: Document) -> int:
    """1 when a recipe or a bound failed, or replicas of a recipe differ; a failing peer is its own affair."""
    bad = [
        row
        for row in document["rows"]
        if row["kind"] != "peer" and (row["failed"] or row["replicas_identical"] is False)
    ]
    return 1 if bad else 0


class _Fitting:
    """A table if it fits, else a block for each setting: no name may be truncated."""

    def __init__(self, document: Document, columns: tuple[Column, ...]) -> None:
        self._document, self._columns = document, columns

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = _table(self._document, self._columns)
        if console.measure(table, options=options.update(width=_ROOM)).maximum <= options.max_width:
            yield table
            return
        for row in self._document["rows"]:
            cells = [] if row["failed"] else [f"{head} {text(row)}" for head, text in self._columns]
            yield f"{_name(row)}\n  " + ", ".join(cells)
        yield ""


def _name(row: Document) -> str:
    return escape(row["name"]) + ("\n[red]failed, see below[/red]" if row["failed"] else "")


def _table(document: Document, columns: tuple[Column, ...]) -> Table:
    view = Table(box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    view.add_column("setting", no_wrap=True)
    for head, _ in columns:
        view.add_column(head, justify="right", no_wrap=True)
    for row in document["rows"]:
        # A failed setting's figures would look like a result; the JSON has them.
        texts = ["-" if row["failed"] else text(row) for _, text in columns]
        view.add_row(_name(row), *texts, style="dim" if row["kind"] == "bound" else None)
    return view

"""`gradwire recipes`: what there is, and what each one sends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from gradwire.exchange.base import CYCLE, STEADY, Exchange
from gradwire.memory import UNSENT
from gradwire.moment import Moment
from gradwire.recipes import Entry, entries

NUMEL = 1 << 20


def recipes(
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the table as JSON.")] = None,
) -> None:
    """List all recipes: what travels, bytes per element and rounds on four ranks, laws, paper, and use."""
    rows = [describe(entry) for entry in entries()]
    console = Console(width=110, highlight=False)
    for row in rows:
        options = ", ".join(f"{key}={value!r}" for key, value in row["options"].items())
        console.print(f"[bold]{row['name']}[/bold]" + (f"({options})" if options else ""), soft_wrap=True)
        table = Table(box=None, show_header=False, padding=(0, 1, 0, 2))
        table.add_column(style="dim", width=10)
        table.add_column()
        table.add_row("", row["summary"])
        table.add_row("travels", f"{row['travels']} {_cost(row)}")
        table.add_row("laws", row["laws"])
        table.add_row("paper", row["paper"])
        table.add_row("use when", row["use_when"])
        console.print(table)
        console.print()
    if json_path is not None:
        json_path.write_text(json.dumps(rows, indent=2) + "\n")


def describe(entry: Entry, world: int = 4) -> dict[str, Any]:
    """One recipe with its default options; bytes are sent per rank and element, over a cycle of steps.

    Adaptive recipes have no bytes of their own before they have measured.
    """
    row: dict[str, Any] = {"name": entry.name, "options": entry.options, "summary": entry.summary}
    row |= {key.lower().replace(" ", "_"): entry.says(key) for key in ("Travels", "Paper", "Use when")}
    row |= {"wire_bytes_per_element": None, "rounds": None, "at_most": None, "laws": "those of the choice"}
    built = entry.build()
    return row | _measures(built.exchange, world) if built.next is None else row


def _measures(exchange: Exchange, world: int) -> dict[str, Any]:
    """Of a long run, over the steps in which something travels and those in which nothing does."""
    moments = [Moment(step, unit=0, rank=0, world=world) for step in range(STEADY, STEADY + CYCLE)]
    steps = [exchange.rounds(NUMEL, torch.float32, at) for at in moments]
    travelled = sum(round_.wire_bytes(world) for rounds in steps for round_ in rounds)
    return {
        "wire_bytes_per_element": travelled / NUMEL / CYCLE,
        "rounds": max(len(rounds) for rounds in steps),
        "at_most": any(round_.at_most for rounds in steps for round_ in rounds),
        "laws": _laws(exchange),
    }


def _laws(exchange: Exchange) -> str:
    parts = ["consensus, finiteness"]
    parts.append(_balance(exchange))
    if exchange.laws.contractive:
        parts.append("contractive")
    if exchange.laws.may_overflow:
        parts.append("may overflow")
    return "; ".join(parts)


def _balance(exchange: Exchange) -> str:
    if not exchange.laws.conserves:
        return "no conservation"
    if exchange.memory is None:
        return "no memory"
    return "conservation with a memory" if UNSENT in exchange.memory.planes else "what is not sent is dropped"


def _cost(row: dict[str, Any]) -> str:
    if row["rounds"] is None:
        return ""
    least = "at most " if row["at_most"] else ""
    rounds = f"{row['rounds']} round" + ("s" if row["rounds"] != 1 else "")
    return f"[dim]{least}{row['wire_bytes_per_element']:.3g} bytes per element in {rounds}[/dim]"

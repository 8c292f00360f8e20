"""`gradwire recipes`: what there is, and what each one sends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from gradwire.moment import Moment
from gradwire.recipes import Composition, Entry, entries

NUMEL = 1 << 20


def recipes(
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the table as JSON.")] = None,
) -> None:
    """List all recipes: what travels, bytes per element and rounds on four ranks."""
    rows = [describe(entry) for entry in entries()]
    table = Table("recipe", "bytes per element", "rounds per unit", "keeps unsent", box=None)
    for row in rows:
        options = ", ".join(f"{key}={value!r}" for key, value in row["options"].items())
        name = f"[bold]{row['name']}[/bold]({options})" if options else f"[bold]{row['name']}[/bold]"
        memory = row["memory"] or "when decided"
        table.add_row(name, _number(row["wire_bytes_per_element"]), _number(row["rounds"]), memory)
        table.add_row(f"  [dim]{row['summary']}[/dim]")
    Console(width=110).print(table)
    if json_path is not None:
        json_path.write_text(json.dumps(rows, indent=2) + "\n")


def describe(entry: Entry, world: int = 4) -> dict[str, Any]:
    """One recipe with its default options; bytes are sent per rank and element, over a cycle of steps.

    Adaptive recipes have no bytes of their own before they have measured.
    """
    row: dict[str, Any] = {"name": entry.name, "options": entry.options, "summary": entry.summary}
    built = entry.build()
    row |= {"wire_bytes_per_element": None, "rounds": None, "memory": None}
    if isinstance(built, Composition):
        exchange = built.exchange
        at = Moment(step=0, unit=0, rank=0, world=world)
        rounds = exchange.rounds(NUMEL, torch.float32, at)
        row["wire_bytes_per_element"] = sum(round_.wire_bytes(world) for round_ in rounds) / NUMEL
        row["rounds"] = len(rounds)
        row["memory"] = "yes" if exchange.memory is not None else "no"
    return row


def _number(value: float | None) -> str:
    return "measured" if value is None else f"{value:.3g}"

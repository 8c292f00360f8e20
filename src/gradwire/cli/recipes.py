"""`gradwire recipes`: what there is, and what each one sends."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gradwire.cli.completion import recipe_names
from gradwire.cli.prerequisites import FORMAT, STDOUT, check_folder, write_json

if TYPE_CHECKING:  # torch takes seconds to load, which help and completion need not wait for
    from gradwire.exchange.base import Exchange
    from gradwire.recipes import RecipeEntry

NUMEL = 1 << 20


class Group(StrEnum):
    """The kinds of recipes by what they send: see `GROUPS` of the catalogue."""

    WHOLE = "whole"
    CHOSEN = "chosen"
    SOMETIMES = "sometimes"
    BITS = "bits"
    DIMENSIONS = "dimensions"
    MEASURED = "measured"


def recipes(
    name: Annotated[
        str | None, typer.Argument(help="Describe this recipe.", autocompletion=recipe_names)
    ] = None,
    group: Annotated[Group | None, typer.Option(help="List only recipes of this kind.")] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write JSON; - prints nothing else.")
    ] = None,
) -> None:
    """List recipes with bytes per element on four ranks and when to use them, or describe one.

    Example: gradwire recipes topk
    """
    try:
        check_folder(json_path)
        chosen = _chosen(name, group)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    rows = [describe(entry) for entry in chosen]
    console = Console(highlight=False)
    if str(json_path) != STDOUT:
        if name is None:
            console.print(_table(rows))
        else:
            _tell(rows[0], console)
    write_json({"format": FORMAT, "recipes": rows}, json_path)


def _chosen(name: str | None, group: Group | None) -> list[RecipeEntry]:
    from gradwire.recipes import entries, recipe
    from gradwire.recipes.catalogue import GROUPS

    if name is None:
        return [entry for entry in entries() if group is None or entry.name in GROUPS[group]]
    if group is not None:
        raise ValueError("give either a recipe or a group, not both")
    known = recipe(name).name  # which says what is near, if it is unknown
    return [entry for entry in entries() if entry.name == known]


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("recipe", no_wrap=True)
    table.add_column("bytes", no_wrap=True, justify="right")
    table.add_column("use when")
    for row in rows:
        table.add_row(row["name"], _bytes(row), row["use_when"])
    return table


def _bytes(row: dict[str, Any]) -> str:
    if row["rounds"] is None:
        return "-"
    return f"{'≤ ' if row['at_most'] else ''}{row['wire_bytes_per_element']:.3g}"


def _tell(row: dict[str, Any], console: Console) -> None:
    options = ", ".join(f"{key}={value!r}" for key, value in row["options"].items())
    console.print(f"[bold]{row['name']}[/bold]" + (f"({options})" if options else ""), soft_wrap=True)
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    table.add_row("", row["summary"])
    for option, meaning in row["meanings"].items():
        table.add_row(option, escape(meaning))
    table.add_row("travels", f"{row['travels']} {_cost(row)}")
    table.add_row("laws", row["laws"])
    table.add_row("paper", row["paper"])
    table.add_row("use when", row["use_when"])
    console.print(table)


def describe(entry: RecipeEntry, world: int = 4) -> dict[str, Any]:
    """One recipe with its default options; bytes are sent per rank and element, over a cycle of steps.

    Adaptive recipes have no bytes of their own before they have measured.
    """
    row: dict[str, Any] = {"name": entry.name, "options": entry.options, "summary": entry.summary}
    row["meanings"] = entry.meanings
    row |= {key.lower().replace(" ", "_"): entry.says(key) for key in ("Travels", "Paper", "Use when")}
    row |= {"wire_bytes_per_element": None, "rounds": None, "at_most": None, "laws": "those of the choice"}
    built = entry.build()
    return row | _measures(built.exchange, world) if built.next is None else row


def _measures(exchange: Exchange, world: int) -> dict[str, Any]:
    """Traffic and laws of an exchange, for `CYCLE` steps of a long run on `world` ranks.

    Bytes are means over all these steps, with and without collectives; `rounds` is the most in a step.
    """
    import torch

    from gradwire.exchange.base import CYCLE, STEADY
    from gradwire.unit.context import ExchangeContext

    contexts = [ExchangeContext(step, unit=0, rank=0, world=world) for step in range(STEADY, STEADY + CYCLE)]
    steps = [exchange.rounds(NUMEL, torch.float32, ctx) for ctx in contexts]
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
    from gradwire.memory import UNSENT

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

"""The table of a run: faults by folder, which tier has killed them, and the others by name."""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.teeth.recording import TIERS, Item

HEAD = """\
# Do the tests notice planted faults? {date}

`python -m tests.teeth`, {machine} with {cores} cores, torch {torch}. Other work may have run beside it.
Recorded are {items} tests that pass, in {files} files: {tiers}. A fault is *killed* by a test that fails or
hangs with it. It is *undecided* if the time for it was over. It has *survived* if all recorded tests that
enter its function pass.

| folder | faults | {columns} | survived | undecided |
|---|---|{lines}---|---|
"""


def written(path: Path, rows: Iterable[dict[str, Any]], items: Sequence[Item]) -> None:
    """Write the report of `rows`, as `tests.teeth` keeps them."""
    judged = [row for row in rows if row["state"] != "smoke"]
    tiers = Counter(each.tier for each in items)
    page = HEAD.format(
        date=datetime.date.today(),
        machine=platform.machine(),
        cores=os.cpu_count(),
        torch=torch.__version__,
        files=len({each.file for each in items}),
        items=len(items),
        tiers=", ".join(f"{tiers[tier]} in `make {COMMANDS[tier]}`" for tier in TIERS if tiers[tier]),
        columns=" | ".join(f"killed by `{COMMANDS[tier]}`" for tier in TIERS),
        lines="---|" * len(TIERS),
    )
    for room in sorted({row["room"] for row in judged}):
        page += _line(f"`{room}`", [row for row in judged if row["room"] == room])
    for half in dict.fromkeys(row["half"] for row in judged):
        page += _line(f"*{half}*", [row for row in judged if row["half"] == half])
    page += _line("**all**", judged)
    left = [row for row in judged if row["state"] != "killed"]
    if left:
        page += "\n## Not killed\n\n| fault | where | change | tests run | state |\n|---|---|---|---|---|\n"
        page += "".join(_named(row) for row in sorted(left, key=lambda row: str(row["function"])))
    path.write_text(page, encoding="utf-8")


COMMANDS = {"test": "test", "all": "test-all"}


def _line(name: str, rows: Sequence[dict[str, Any]]) -> str:
    killed = [sum(row["state"] == "killed" and row["tier"] == tier for row in rows) for tier in TIERS]
    states = Counter(row["state"] for row in rows)
    cells = [len(rows), *killed, states["survived"], states["undecided"]]
    return f"| {name} | {' | '.join(map(str, cells))} |\n"


def _named(row: dict[str, Any]) -> str:
    path, _, function = row["function"].removeprefix("src/gradwire/").partition(":")
    where = f"{path}:{row['line']}" if row["line"] else path
    change = row["change"].replace("|", "\\|")
    return f"| {row['fault']} | `{where}` {function} | `` {change} `` | {row['ran']} | {row['state']} |\n"


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The last row of each fault, by its name."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["fault"]: row for row in rows}


def append(path: Path, row: dict[str, Any]) -> None:
    """One line more, in one act."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")

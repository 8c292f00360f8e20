"""What `gradwire recipes` prints and writes, and whether the guide to choosing says the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gradwire import recipes
from gradwire.cli.main import app
from gradwire.cli.recipes import describe

GUIDE = Path(__file__).parents[3] / "docs" / "choosing.md"
WORLDS = (2, 4, 8)
ENTRIES = {entry.name: entry for entry in recipes.entries()}


def rows() -> dict[str, list[str]]:
    """Bytes and rounds by recipe, as the guide's table has them."""
    table = GUIDE.read_text(encoding="utf-8").split("## All recipes")[1].split("\n## ")[0]
    cells = [line.strip("|\n ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row[2:4] for row in cells}


NUMBERS = {name: row for name, row in rows().items() if re.fullmatch(r"(≤ )?[\d., ]+", row[0])}


def described(name: str) -> list[dict[str, Any]]:
    return [describe(ENTRIES[name], world) for world in WORLDS]


def test_the_guide_has_numbers_for_all_that_know_theirs_beforehand() -> None:
    # gcomp's depend on the gradient, flexible's on the link.
    fixed = {name for name in ENTRIES if described(name)[0]["rounds"] is not None}
    assert NUMBERS.keys() == fixed - {"gcomp", "flexible"}


@pytest.mark.parametrize("name", NUMBERS)
def test_bytes_in_the_guide_are_those_that_the_command_describes(name: str) -> None:
    found = described(name)
    numbers = ", ".join(f"{each['wire_bytes_per_element']:.3g}" for each in found)
    assert NUMBERS[name][0] == ("≤ " if found[0]["at_most"] else "") + numbers


@pytest.mark.parametrize("name", NUMBERS)
def test_rounds_in_the_guide_are_those_that_the_command_describes(name: str) -> None:
    found, said = [each["rounds"] for each in described(name)], NUMBERS[name][1]
    if segment := re.fullmatch(r"(\d) per segment", said):
        assert all(rounds and rounds % int(segment[1]) == 0 for rounds in found)
        return
    by_world = [int(number) for number in re.findall(r"\d+", said.split(" to ")[-1])]
    assert found == (by_world if len(by_world) == len(WORLDS) else by_world * len(WORLDS))


def test_the_command_prints_every_recipe_with_its_paper_and_use() -> None:
    done = CliRunner().invoke(app, ["recipes"])
    assert done.exit_code == 0, done.output
    shown = " ".join(done.output.split())
    for name, entry in ENTRIES.items():
        assert re.search(rf"^{name}(\(|$)", done.output, re.MULTILINE)
        # The end of a line of the table may fall anywhere.
        for heading in ("Travels", "Paper", "Use when"):
            assert entry.says(heading)
            assert entry.says(heading) in shown


def test_json_holds_what_is_printed(tmp_path: Path) -> None:
    path = tmp_path / "recipes.json"
    assert CliRunner().invoke(app, ["recipes", "--json", str(path)]).exit_code == 0
    found = {row["name"]: row for row in json.loads(path.read_text())}
    assert found.keys() == ENTRIES.keys()
    for row in found.values():
        assert all(row[key] for key in ("summary", "travels", "paper", "use_when", "laws"))
    assert found["topk"]["rounds"] == 1
    assert found["topk"]["wire_bytes_per_element"] == pytest.approx(
        describe(ENTRIES["topk"])["wire_bytes_per_element"]
    )

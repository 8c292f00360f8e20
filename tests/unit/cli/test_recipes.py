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
from gradwire.cli.recipes import Group, describe
from gradwire.recipes.catalogue import GROUPS, MODULES

GUIDE = Path(__file__).parents[3] / "docs" / "recipes.md"
WORLDS = (2, 4, 8)
ENTRIES = {entry.name: entry for entry in recipes.entries()}


def rows() -> dict[str, list[str]]:
    """Bytes and rounds by recipe, as the guide's table has them."""
    table = GUIDE.read_text(encoding="utf-8").split("## What each sends")[1].split("\n## ")[0]
    cells = [line.strip("|\n ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row[2:4] for row in cells}


NUMBERS = {name: row for name, row in rows().items() if re.fullmatch(r"(≤ )?[\d., ]+", row[0])}


def described(name: str) -> list[dict[str, Any]]:
    return [describe(ENTRIES[name], world) for world in WORLDS]


@pytest.mark.rest
def test_the_guide_has_numbers_for_all_that_know_theirs_beforehand() -> None:
    # gcomp's depend on the gradient, flexible's on the link.
    fixed = {name for name in ENTRIES if described(name)[0]["rounds"] is not None}
    assert NUMBERS.keys() == fixed - {"gcomp", "flexible"}


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.rest
def test_bytes_in_the_guide_are_those_that_the_command_describes(name: str) -> None:
    found = described(name)
    numbers = ", ".join(f"{each['wire_bytes_per_element']:.3g}" for each in found)
    assert NUMBERS[name][0] == ("≤ " if found[0]["at_most"] else "") + numbers


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.rest
def test_rounds_in_the_guide_are_those_that_the_command_describes(name: str) -> None:
    found, said = [each["rounds"] for each in described(name)], NUMBERS[name][1]
    if segment := re.fullmatch(r"(\d) per segment", said):
        assert all(rounds and rounds % int(segment[1]) == 0 for rounds in found)
        return
    by_world = [int(number) for number in re.findall(r"\d+", said.split(" to ")[-1])]
    assert found == (by_world if len(by_world) == len(WORLDS) else by_world * len(WORLDS))


def test_the_reference_has_each_recipe() -> None:
    said = (GUIDE.parent / "reference.md").read_text(encoding="utf-8")
    for name, module in MODULES.items():
        assert f".. autofunction:: {module}.{name}\n" in said


def test_the_groups_are_those_of_the_guide() -> None:
    table = GUIDE.read_text(encoding="utf-8").split("## What each sends")[1].split("\n## ")[0]
    blocks = [re.findall(r"^\| `(\w+)` \|", block, re.MULTILINE) for block in table.split("\n| **")[1:]]
    # "all elements as they are" and "all elements, coded" are both whole.
    sets = [set(block) for block in blocks]
    ours = [set(names) for names in GROUPS.values()]
    assert all(any(block <= group for group in ours) for block in sets)
    assert sorted(name for group in ours for name in group) == sorted(ENTRIES)
    assert [group.value for group in Group] == list(GROUPS)


def test_each_option_of_each_recipe_has_a_meaning() -> None:
    lost = [
        (name, option)
        for name, entry in ENTRIES.items()
        for option, said in entry.meanings.items()
        if not said
    ]
    assert lost == []
    clipped = ENTRIES["terngrad"].meanings["clip"]
    assert clipped.startswith("gradients of a parameter are clipped")
    assert clipped.endswith("`None` clips nothing.")
    done = CliRunner().invoke(app, ["recipes", "oktopk"], env={"COLUMNS": "200"})
    assert re.search(r"^  ratio +share of the elements to send", done.output, re.MULTILINE)


@pytest.mark.parametrize("columns", ["60", "120"])
def test_the_command_lists_every_recipe_by_its_whole_name(columns: str) -> None:
    done = CliRunner().invoke(app, ["recipes"], env={"COLUMNS": columns})
    assert done.exit_code == 0, done.output
    for name, entry in ENTRIES.items():
        assert re.search(rf"^{name}  ", done.output, re.MULTILINE)
        assert entry.says("Use when").split()[0] in done.output
    assert max(map(len, done.output.splitlines())) <= int(columns)


def test_a_group_lists_its_own_recipes_only() -> None:
    shown = CliRunner().invoke(app, ["recipes", "--group", "dimensions"]).output
    assert [line.split()[0] for line in shown.splitlines() if line[0] != " "] == [
        "recipe",
        "acpsgd",
        "powersgd",
    ]


def test_a_recipe_is_told_with_its_options_paper_and_use() -> None:
    for name in ("topk", "gcomp", "auto"):
        done = CliRunner().invoke(app, ["recipes", name])
        assert done.exit_code == 0, done.output
        assert re.search(rf"^{name}(\(|$)", done.output, re.MULTILINE)
        shown = " ".join(done.output.split())
        # The end of a line of the table may fall anywhere.
        for heading in ("Travels", "Paper", "Use when"):
            assert ENTRIES[name].says(heading) in shown


@pytest.mark.parametrize(
    ("words", "said"), [(["topq"], "did you mean"), (["topk", "--group", "bits"], "not both")]
)
def test_what_cannot_be_listed_is_refused(words: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["recipes", *words])
    assert done.exit_code == 2
    assert said in done.output


def test_json_holds_what_is_printed(tmp_path: Path) -> None:
    path = tmp_path / "recipes.json"
    assert CliRunner().invoke(app, ["recipes", "--json", str(path)]).exit_code == 0
    document = json.loads(path.read_text())
    assert document["format"] == 1
    found = {row["name"]: row for row in document["recipes"]}
    assert found.keys() == ENTRIES.keys()
    for row in found.values():
        assert all(row[key] for key in ("summary", "travels", "paper", "use_when", "laws"))
    assert found["topk"]["rounds"] == 1
    assert found["topk"]["wire_bytes_per_element"] == pytest.approx(
        describe(ENTRIES["topk"])["wire_bytes_per_element"]
    )


def test_a_dash_prints_nothing_but_json() -> None:
    found = json.loads(CliRunner().invoke(app, ["recipes", "topk", "--json", "-"]).output)
    assert [row["name"] for row in found["recipes"]] == ["topk"]

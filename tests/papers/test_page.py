"""The page on the five papers: its recipes train, its files and names exist, its numbers stand in reports."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import gradwire
from gradwire.comm import Comm, run_ranks
from gradwire.lab.workloads.spec import IMAGES, TEXTS
from gradwire.recipes import entries, recipe
from gradwire.recipes.catalogue import MODULES
from tests.support.looped import looped
from tests.support.pages import blocks_of
from tests.support.recipes import kind_of_text
from tests.support.rig import SHAPES, Rig
from tests.support.source import ROOT

PAGE = ROOT / "docs" / "papers.md"
TEXT = PAGE.read_text(encoding="utf-8")
PROSE = re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)


class Table(NamedTuple):
    """Rows of cells by the columns of its header."""

    columns: tuple[str, ...]
    rows: list[dict[str, str]]


def tables(text: str) -> Iterator[Table]:
    """Every table of the page."""
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        columns, _line, *rows = [
            [cell.strip() for cell in line[1:-1].split("|")] for line in block.splitlines()
        ]
        yield Table(tuple(columns), [dict(zip(columns, row, strict=True)) for row in rows])


def rows_of(*columns: str) -> list[dict[str, str]]:
    """The rows of all tables with these columns."""
    return [row for table in tables(PROSE) if table.columns == columns for row in table.rows]


def spans(text: str) -> list[str]:
    """What stands between backticks, each once."""
    return list(dict.fromkeys(re.findall(r"`([^`]+)`", text)))


PLACES = rows_of("in the paper", "file", "names")
CLAIMS = rows_of("claim", "in the paper", "here", "verdict", "from")
METHODS = rows_of("method", "recipe", "source", "in the tables of", "named by")

NAMES = {name for row in PLACES for name in spans(row["names"])}
SPANS = [span for span in spans(PROSE) if span not in NAMES or span in MODULES]
FILES = [span for span in SPANS if "/" in span or span.endswith(".py")]
SETTINGS = [span for span in SPANS if re.match(r"\w+=", span)]
CALLS = [span for span in SPANS if span.startswith(("gradwire.", "wire."))]
IN_CODE = [text for block in blocks_of(PAGE) for text in re.findall(r'optimizer, "(.+?)"\)', block.text)]
OTHERS = {*FILES, *SETTINGS, *CALLS, *IMAGES, *TEXTS}
RECIPES = list(dict.fromkeys([*IN_CODE, *(span for span in SPANS if span not in OTHERS)]))
"""All that is no file, option, call or workload, so that a name that nothing knows is tried as a recipe."""


def found(path: str) -> Path | None:
    """The file of this path, from the root or from the package on."""
    return next((base / path for base in (ROOT, ROOT / "src/gradwire") if (base / path).is_file()), None)


WEIGHTS = [name for name in SHAPES if name.endswith("weight")]
STEPS = 12
"""Two more than `covap` takes to measure, and all of a cycle of eight."""


@looped("text", RECIPES)
def test_a_recipe_of_the_page_exists(text: str) -> None:
    assert recipe(text).build()


@looped("text", {kind_of_text(text): text for text in RECIPES}.values())
def test_a_recipe_of_the_page_trains(text: str) -> None:
    """Every rank is drawn towards a point of its own; matrices come nearer to the mean of all points."""
    world, rate = 3, 0.02
    generators = [torch.Generator().manual_seed(rank) for rank in range(world)]
    points = [{name: torch.randn(SHAPES[name], generator=each) for name in SHAPES} for each in generators]
    goal = {name: torch.stack([point[name] for point in points]).mean(0) for name in SHAPES}

    def distance(at: dict[str, Tensor]) -> float:
        return sum(float((at[name] - goal[name]).square().sum()) for name in WEIGHTS)

    def train(comm: Comm) -> dict[str, Tensor]:
        rig, at = Rig(comm, text), {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        for _ in range(STEPS):
            outcome = rig.step({name: (at[name] - points[comm.rank][name]).flatten() for name in SHAPES})
            assert outcome.error is None
            assert outcome.step.committed
            at = {name: at[name] - rate * outcome.mean[name].view(SHAPES[name]) for name in SHAPES}
        return at

    first, *others = run_ranks(world, train)
    assert distance(first) < distance({name: torch.zeros(shape) for name, shape in SHAPES.items()})
    for other in others:
        assert all(torch.equal(other[name], first[name]) for name in SHAPES), "replicas are equal"


@looped("setting", SETTINGS)
def test_an_option_of_the_page_is_one_of_a_recipe(setting: str) -> None:
    key = setting.partition("=")[0]
    takes = [entry.name for entry in entries() if key in entry.options]
    assert takes
    assert any(str(recipe(f"{name}({setting})")) for name in takes)


@pytest.mark.parametrize("call", CALLS)
def test_a_call_of_the_page_exists(call: str) -> None:
    base, _, name = call.partition(".")
    assert hasattr({"gradwire": gradwire, "wire": gradwire.Wire}[base], name)


def test_files_that_the_page_names_exist() -> None:
    # Links are tested with those of all pages.
    assert len(FILES) > 30
    assert [path for path in FILES if found(path) is None] == []


def test_what_is_said_to_be_in_a_file_is_defined_there() -> None:
    wrong = []
    for row in PLACES:
        [path] = spans(row["file"])
        source = found(path)
        defined = "" if source is None else source.read_text(encoding="utf-8")
        wrong += [
            f"{path}: {name}"
            for name in spans(row["names"])
            if not re.search(rf"^(class|def) {name}\b|^{name}\b.* = ", defined, re.MULTILINE)
        ]
    assert wrong == []


def numbers(text: str) -> set[str]:
    """As they are printed; not those in names such as `float32`."""
    return set(re.findall(r"(?<!\w)\d+(?:,\d{3})*(?:\.\d+)?", text))


@looped("row", CLAIMS)
def test_a_claim_has_a_verdict_and_its_numbers_are_in_what_it_links(row: dict[str, str]) -> None:
    assert re.match(r"holds|partly|not here|not measured", row["verdict"])
    if row["verdict"].startswith("not measured"):
        assert row["here"] == "not measured"
        assert spans(row["from"]), "what would measure it"
        return
    [link] = re.findall(r"\]\(([^)#]+)", row["from"])
    source = (PAGE.parent / link).read_text(encoding="utf-8")
    assert numbers(re.sub(r"`[^`]*`", "", row["here"])) - numbers(source) == set()


TABLES = {
    "COVAP": {
        "dense": ("I", "VII"),
        "topk": ("II", "VII"),
        "dgc": ("II", "VII"),
        "randomk": ("II", "III"),
        "fp16": ("II", "III", "VII"),
        "efsignsgd": ("II", "VII"),
        "powersgd": ("II", "VII"),
        "oktopk": ("II", "VII"),
    },
    "ScaleCom": dict.fromkeys(("topk", "adacomp", "dgc", "powersgd", "gtopk", "sketchsgd"), ("1",)),
    "MergeComp": dict.fromkeys(("dense", "topk", "randomk", "qsgd", "signsgd", "onebit", "signum"), ("1",))
    | {"fp16": ("1", "2", "3")}
    | dict.fromkeys(("dgc", "efsignsgd"), ("1", "2", "3", "4")),
    "GComp": dict.fromkeys(("truncate", "local_every(interval=8)"), ("figures 18 to 20",)),
    "AR-Topk": {
        "allreduce": ("I",),
        "dense": ("III", "IV"),
        "lwtopk(layers=True)": ("III", "V"),
        "mstopk(fused=True)": ("III",),
    },
}
"""Comparators of the papers' tables, by recipe: in which."""


@pytest.mark.parametrize("paper", TABLES)
def test_comparators_of_a_papers_tables_are_on_the_page(paper: str) -> None:
    told = {
        text: f"{paper} ({', '.join(where)})" in row["in the tables of"]
        for text, where in TABLES[paper].items()
        for row in METHODS
        if text in spans(row["recipe"])
    }
    assert told == dict.fromkeys(TABLES[paper], True)


def test_every_recipe_of_the_catalogue_is_on_the_page() -> None:
    assert set(MODULES) - {text.partition("(")[0] for text in RECIPES} == set()

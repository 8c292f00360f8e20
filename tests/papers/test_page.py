"""The five papers' pages: recipes train, files and names exist, numbers stand in the rows of their claims."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from benchmarks import papers
from benchmarks.papers import Claim, Paper
from torch import Tensor

import gradwire
from gradwire.comm import Comm, run_ranks
from gradwire.recipes import entries, recipe
from gradwire.recipes.catalogue import MODULES
from gradwire_lab.workloads.spec import IMAGES, TEXTS
from tests.support.looped import looped
from tests.support.pages import blocks_of
from tests.support.recipes import kind_of_text
from tests.support.rig import SHAPES, Rig
from tests.support.source import ROOT

PAPERS = {key: papers.load(key) for key in papers.KEYS}
PAGE = ROOT / "docs" / "papers.md"
PAGES = (PAGE, *(papers.PAGES / paper.page for paper in PAPERS.values()))
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
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
METHODS = rows_of("method", "recipe", "source", "in the tables of", "named by")

NAMES = {name for row in PLACES for name in spans(row["names"])}
SPANS = [span for span in spans(PROSE) if span not in NAMES or span in MODULES]
FILES = [span for span in SPANS if "/" in span or span.endswith(".py")]
SETTINGS = [span for span in SPANS if re.match(r"\w+=", span)]
CALLS = [span for span in SPANS if re.match(r"(gradwire|wire)\.\w+$", span)]
IN_CODE = [
    text
    for page in PAGES
    for block in blocks_of(page)
    for text in re.findall(r'optimizer, "(.+?)"\)', block.text)
]
OTHERS = {*FILES, *SETTINGS, *CALLS, *IMAGES, *TEXTS, "PAPER"}
COMMAND = re.compile(r"(make|gradwire) |gradwire\.attach\(")
RECIPES = list(
    dict.fromkeys([*IN_CODE, *(span for span in SPANS if span not in OTHERS and not COMMAND.match(span))])
)
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


def numbers(text: str) -> Counter[str]:
    """As they are printed, and how often; not those in names such as `float32`."""
    return Counter(re.findall(r"(?<!\w)\d+(?:,\d{3})*(?:\.\d+)?", text))


CHECKED = json.loads((Path(__file__).parent / "checked.json").read_text(encoding="utf-8"))
"""By claim its verdict, the paper's numbers, those here and the report, as read beside the papers' texts
on 29 November 2026. A row that changes is read there again, and changes in both files."""


def faults_of(claim: Claim) -> list[str]:
    """What is wrong with a claim: not as it was checked, no report, missing rows, numbers not in the rows."""
    told = [claim.verdict, claim.paper, claim.here, claim.report]
    found = [] if CHECKED.get(claim.claim) == told else [f"not as it was checked: {told}"]
    if claim.verdict == "not measured":
        if claim.here != "not measured" or not claim.run or claim.report:
            found.append("what is not measured has no number and no report, and says what would measure it")
        return found
    report = ROOT / claim.report.partition("#")[0]
    if not report.is_file():
        return [*found, f"no report {claim.report}"]
    lines, told = report.read_text(encoding="utf-8").splitlines(), Counter[str]()
    for row in claim.rows:
        there = [line for line in lines if line.startswith(row)]
        if len(set(there)) != 1:
            found.append(f"{len(set(there))} rows begin with {row!r}")
        for line in there:
            told += numbers(line)
    wanted = numbers(re.sub(r"`[^`]*`", "", claim.here))
    # A condition, such as "4 ranks", may be said twice. A measured number is in as many rows.
    missing = [each for each, often in wanted.items() if told[each] < (often if "." in each else 1)]
    return found + ([f"not as often in these rows: {sorted(missing)}"] if missing else [])


CLAIMS = {claim.claim: claim for paper in PAPERS.values() for claim in paper.claims}


@looped("claim", CLAIMS.values())
def test_numbers_of_a_claim_are_those_of_the_rows_that_it_names(claim: Claim) -> None:
    assert faults_of(claim) == []


@looped("paper", PAPERS.values())
def test_pages_are_written_from_the_files_of_claims(paper: Paper) -> None:
    page = (papers.PAGES / paper.page).read_text(encoding="utf-8")
    assert papers.written(paper, page) == page, "python -m benchmarks.papers --write"
    assert page.count(f"wire = {paper.line}  #") == 1, (
        "a block of the page, which a test of the documents runs"
    )
    assert re.fullmatch(r"@\w+{\w+,\n(  \w+ = {.+},\n)+  \w+ = {.+}\n}", papers.bibtex(paper))
    assert papers.bibtex(paper).count(" and ") == paper.authors.count(",") + 1


def test_planted_numbers_verdicts_and_links_are_noticed() -> None:
    profiler, sparsifiers = (
        CLAIMS["waiting for late ranks makes profiles wrong, aligned ends do not (III-B)"],
        CLAIMS["no sparsifier keeps accuracy on images (Table VII)"],
    )
    even, size, metric = (
        CLAIMS["the same by the paper's own equation 7"],
        CLAIMS["size in training: ResNet-50, BERT (figure 9)"],
        CLAIMS["δ of seven optimizers (Table 2)"],
    )
    planted = [
        replace(profiler, here=profiler.here.replace("21.1", "12.1")),
        replace(profiler, verdict="holds"),
        replace(sparsifiers, here=sparsifiers.here.replace("0.799", "0.817")),  # which another row has, once
        replace(sparsifiers, verdict="not here"),
        replace(sparsifiers, rows=sparsifiers.rows[1:]),
        replace(even, here=even.here.replace("6.3", "3.6")),
        replace(even, report="benchmarks/results/2026-11-26-mergecomp.md"),
        replace(size, here=size.here.replace("53.5", "53.3")),
        replace(size, report="benchmarks/results/2026-11-21-none.md"),
        replace(size, verdict="partly"),
        replace(
            sparsifiers, paper=sparsifiers.paper.replace("DGC 50.1, Ok-topk 61.0", "DGC 61.0, Ok-topk 50.1")
        ),
        replace(metric, report="tests/papers/test_gcomp.py"),  # it has no number that a row could miss
    ]
    assert [claim for claim in planted if not faults_of(claim)] == []
    for paper in PAPERS.values():
        page = (papers.PAGES / paper.page).read_text(encoding="utf-8")
        for old, new in (
            (" holds", " partly"),
            ("arxiv.org/abs/2", "arxiv.org/abs/1"),
            ("benchmarks/results/2", "b/2"),
        ):
            damaged = page.replace(old, new, 1)
            assert damaged == page or papers.written(paper, damaged) != damaged


def test_the_papers_links_are_theirs() -> None:
    links = {
        paper.name: tuple(each for each in (paper.arxiv, paper.doi, paper.url, paper.code) if each)
        for paper in PAPERS.values()
    }
    assert links == {
        "COVAP": ("2311.04499", "https://github.com/Sun-Helloworld/COVAP"),
        "ScaleCom": ("2104.11125",),
        "MergeComp": ("2103.15195",),
        "GComp": ("10.1145/3698038.3698541",),
        # As the README of the authors' code has it. No arXiv number is known.
        "AR-Topk": (
            "https://ieeexplore.ieee.org/document/10386724",
            "https://github.com/sahiltyagi4/ARTopk",
        ),
    }
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert [name for name, (link, *_) in links.items() if link not in citation] == []


def test_what_takes_seconds_of_make_papers_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once; what has run is kept, and what does not fit into the time is named."""
    monkeypatch.setattr(papers, "OUT", tmp_path)
    for key in ("mergecomp", "ar_topk", "covap", "scalecom"):
        papers.show(PAPERS[key], 5.0, (), again=False)
        kept = papers.results_of(key)
        papers.show(PAPERS[key], 5.0, (), again=False)
        assert papers.results_of(key) == kept
        page = (tmp_path / f"{key}.md").read_text(encoding="utf-8")
        assert "Has not run: it takes about" in page
    table = (tmp_path / "mergecomp.md").read_text(encoding="utf-8")
    paper, here = "1.16 to 1.23x; 5.1 to 5.5 % (FP16)", "1.20x of one group; 4.3% over even"
    assert f"| communication over backward 0.3 | {paper} | {here} |" in table


KINDS = {"mergecomp": "tables", "scalecom": "training", "gcomp": "figure-10"}
"""An experiment of each kind: ranks of `gradwire bench`, ranks in one process, ranks over links."""
SHORT = [
    *(pytest.param(key, [name], id=name, marks=pytest.mark.rest) for key, name in KINDS.items()),
    *(
        pytest.param(key, [each.name for each in experiments], id=key, marks=pytest.mark.full)
        for key, experiments in papers.EXPERIMENTS.items()
    ),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("key", "names"), SHORT)
def test_make_papers_runs_in_short(
    key: str, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few steps of a small network."""
    monkeypatch.setattr(papers, "OUT", tmp_path)
    papers.show(PAPERS[key], 0.0, names, again=False, brief=True)
    found = papers.results_of(f"{key}-brief")
    assert list(found) == names
    assert all(cell for result in found.values() for row in result["rows"] for cell in (row[0], row[2]))
    page = (tmp_path / f"{key}-brief.md").read_text(encoding="utf-8")
    assert page.startswith("*A few steps of small networks: these numbers say nothing.*")
    assert page.count("Has not run") == len(papers.EXPERIMENTS[key]) - len(names)
    assert not (tmp_path / f"{key}.md").exists(), "what a longer run has shown stays as it is"


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

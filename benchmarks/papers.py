"""The five papers' claims: their pages in docs/papers, and what two cores can show again, paper by paper.

`benchmarks/claims/PAPER.toml` has a paper's title, links and claims. A claim says what is in the paper,
what was found here, a verdict, and in which rows of which report or test the numbers stand. `--write`
writes the tables of docs/papers from these files. `tests/papers/test_page.py` compares each number with
the rows that its claim names.

Without `--write` it runs what two cores can show of a paper within `--seconds`. It writes a page with
the paper's numbers beside, `out/papers/PAPER.md`. What has run is kept in `out/papers/PAPER.json`, so a
run that was broken off goes on; `--again` starts anew. An experiment that does not fit into the time
that is left is named, and runs the next time. `--brief` runs each experiment with a few steps of a small
network: it shows that they run, and its numbers say nothing.

    python -m benchmarks.papers covap [scalecom …] [--seconds 900] [--again] [--only NAME …] [--list]
        [--brief]
    python -m benchmarks.papers --write
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from tests.papers.covap_tables import TABLE_I
from tests.papers.flexcomm_tables import MEGABYTES, RATIOS, TABLE_VI, WORLD

from gradwire.planning import shapes
from gradwire.planning.boundaries import Boundaries, even_groups
from gradwire.planning.collectives import fastest, total_time
from gradwire.planning.costs import NOTHING, Line, Link, Network
from gradwire.planning.facts import Watched
from gradwire.planning.flexible import Choice
from gradwire.planning.merge import GroupCost, optimal_boundaries, seconds_of
from gradwire.planning.rates import RateRule
from gradwire.planning.ratio import ALL_GATHER, RING, TREE, ways
from gradwire.recipes.flexible import rounds_of
from gradwire.recipes.units import fused_cutter
from gradwire_lab.workloads.profile import backward_of

ROOT = Path(__file__).parents[1]
CLAIMS = ROOT / "benchmarks" / "claims"
PAGES = ROOT / "docs" / "papers"
OUT = ROOT / "out" / "papers"
VERDICTS = ("holds", "partly", "not here", "not measured")
KINDS = ("measured", "predicted", "tested")
"""Of the numbers on which a claim rests."""
BEGIN = "<!-- claims: written by benchmarks/papers.py -->"
END = "<!-- end of claims -->"


@dataclass(frozen=True)
class Claim:
    """What a paper claims, and what was found: a row of its page.

    `rows` are the beginnings of the lines of `report` that have all numbers of `here`. A claim that was not
    measured says in `run` what would measure it.
    """

    claim: str
    paper: str
    here: str
    verdict: str
    why: str = ""
    report: str = ""
    rows: tuple[str, ...] = ()
    run: str = ""


@dataclass(frozen=True)
class Paper:
    """A paper, with links as far as they are known, and its claims."""

    key: str
    name: str
    title: str
    authors: str
    year: int
    line: str
    page: str
    claims: tuple[Claim, ...]
    venue: str = ""
    arxiv: str = ""
    doi: str = ""
    url: str = ""
    code: str = ""


def load(key: str) -> Paper:
    """The paper of `benchmarks/claims/KEY.toml`."""
    document = tomllib.loads((CLAIMS / f"{key}.toml").read_text(encoding="utf-8"))
    claims = tuple(Claim(**{**each, "rows": tuple(each.get("rows", ()))}) for each in document["claim"])
    return Paper(key, claims=claims, **document["paper"])


KEYS = tuple(sorted(path.stem for path in CLAIMS.glob("*.toml")))


def cited(paper: Paper) -> str:
    """Authors, year, title and links, as the page begins."""
    links = []
    if paper.arxiv:
        links.append(f"[arXiv {paper.arxiv}](https://arxiv.org/abs/{paper.arxiv})")
    if paper.doi:
        links.append(f"[doi {paper.doi}](https://doi.org/{paper.doi})")
    if paper.url:
        links.append(f"[the paper]({paper.url})")
    if paper.code:
        links.append(f"[the authors' code]({paper.code})")
    where = f", {paper.venue}" if paper.venue else ""
    return f'{paper.authors} {paper.year}, "{paper.title}"{where}. ' + ", ".join(links) + "."


def bibtex(paper: Paper) -> str:
    """An entry for LaTeX."""
    kind, place = ("inproceedings", "booktitle") if paper.venue else ("misc", "howpublished")
    fields = {
        "title": f"{{{paper.title}}}",
        "author": paper.authors.replace(", ", " and "),
        "year": str(paper.year),
    }
    if paper.venue:
        fields[place] = paper.venue
    if paper.arxiv:
        fields |= {"eprint": paper.arxiv, "archiveprefix": "arXiv"}
    if paper.doi:
        fields["doi"] = paper.doi
    if paper.url:
        fields |= {"url": paper.url}
    inside = ",\n".join(f"  {key} = {{{value}}}" for key, value in fields.items())
    return f"@{kind}{{{paper.key}{paper.year},\n{inside}\n}}"


def _from(path: str) -> str:
    """A path of the repository, as a page in docs/papers links it."""
    return os.path.relpath(ROOT / path, PAGES)


def _linked(text: str) -> str:
    """`text` with its links as seen from docs/papers."""
    return re.sub(r"\]\((?!https?:)([^)]+)\)", lambda found: f"]({_from(found[1])})", text)


def _source(claim: Claim) -> str:
    if not claim.report:
        return f"`{claim.run}`"
    path = claim.report.partition("#")[0]
    dated = re.search(r"results/\d{4}-(\d\d)-(\d\d)-", path)
    if dated:
        month = datetime.date(2000, int(dated[1]), 1).strftime("%B")
        name = f"{int(dated[2])} {month}"
    else:
        name = "test" if path.startswith("tests/") else Path(path).stem
    return f"[{name}]({_from(claim.report)})"


def _kind(claim: Claim) -> str:
    """Which of `KINDS` the numbers of a claim are."""
    if "predicted" in claim.here or claim.report.startswith("docs/engineering/costs.md"):
        return "predicted"
    return "tested" if claim.report.startswith("tests/") else "measured"


def table(paper: Paper) -> str:
    """The claims in Markdown."""
    lines = ["| claim | in the paper | here | verdict | from |", "|---|---|---|---|---|"]
    for each in paper.claims:
        verdict = each.verdict + (f": {_linked(each.why)}" if each.why else "")
        lines.append(f"| {each.claim} | {each.paper} | {each.here} | {verdict} | {_source(each)} |")
    return "\n".join(lines)


def written(paper: Paper, page: str) -> str:
    """The text of a page with its claims, its citation and its BibTeX entry as the file has them."""
    counted = Counter(each.verdict for each in paper.claims)
    kinds = Counter(_kind(each) for each in paper.claims if each.verdict == "holds")
    told = f"{counted['holds']} hold ({', '.join(f'{kinds[kind]} {kind}' for kind in KINDS if kinds[kind])})"
    told = ", ".join([told, *(f"{counted[verdict]} {verdict}" for verdict in VERDICTS[1:])])
    block = f"{BEGIN}\n\n{len(paper.claims)} claims: {told}.\n\n{table(paper)}\n\n{END}"
    head, rest = page.split(BEGIN)[0], page.split(END)[1]
    title, _, after = head.partition("\n\n")
    idea = after[after.index("**Idea.**") :]
    entry = f"```text\n{bibtex(paper)}\n```\n"
    return f"{title}\n\n{cited(paper)}\n\n{idea}{block}{rest.split('```text')[0]}{entry}"


# What can be shown again: rows of what, the paper's number, and the number here.

Row = tuple[str, str, str]


@dataclass(frozen=True)
class Experiment:
    """Something that two cores can show of a paper: `run` returns its rows, after about `seconds`.

    `brief` is the same with so few steps that its numbers say nothing; none where `run` takes a second.
    """

    name: str
    title: str
    seconds: float
    run: Callable[[], list[Row]]
    brief: Callable[[], list[Row]] | None = None


def _script(*arguments: str) -> Any:
    """Run a script of this folder, and return the JSON that it writes."""
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / "part.json"
    _printed(*arguments, "--json", str(path))
    document = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    return document


def _printed(script: str, *arguments: str) -> list[str]:
    """Run a script of this folder, and return the lines that it prints."""
    paths = os.pathsep.join(str(path) for path in (ROOT / "src", ROOT / "benchmarks", ROOT))
    command = [sys.executable, f"benchmarks/{script}", *arguments]
    environment = {**os.environ, "PYTHONPATH": paths}
    run = subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    return run.stdout.splitlines()


def merged_by_equation_7() -> list[Row]:
    """MergeComp's tables 2 and 3 by its own equation 7, on ResNet-101's shapes."""
    of = backward_of(shapes.load("resnet101"))
    tensors, elements = len(of.numel), sum(of.numel)
    rows = []
    for ratio in (0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.8, 1.0, 1.6):
        cost = GroupCost(NOTHING, Line(0.0, ratio * of.total_s / elements))
        seconds = seconds_of(of, cost, beside=False)

        def step_s(boundaries: Boundaries, seconds: Callable[[Boundaries], float] = seconds) -> float:
            return of.before_s + seconds(boundaries)

        best_s = step_s(optimal_boundaries(of, cost, 2))
        one, even = step_s(()) / best_s, step_s(even_groups(tensors, 2)) / best_s - 1.0
        paper = "1.16 to 1.23x; 5.1 to 5.5 % (FP16)" if 0.2 <= ratio <= 0.4 else ""
        rows.append(
            (f"communication over backward {ratio}", paper, f"{one:.2f}x of one group; {even:.1%} over even")
        )
    return rows


def merged_on_two_ranks(
    network: str = "emulated(resnet101, shrink=32)", warmup: int = 100, rounds: int = 5
) -> list[Row]:
    """MergeComp's tables 2 and 3 for FP16, run where equation 7 says that they show."""
    found = _script(
        "mergecomp.py", "--workload", network, "--warmup", f"{warmup}",
        "--rounds", f"{rounds}", "--workers", "2", "--rate", "700mbit", "--splits", "fp16",
        "--ways", "1 group", "1 group again", "2 even groups", "timed, Y = 2",
    )  # fmt: skip
    took = {row["name"]: row["step_s"] for row in found["fp16"]}
    one, again, even, timed = (
        next(seconds for name, seconds in took.items() if part in name)
        for part in ("groups=1", "cuts=()", "split='even', groups=2", "split='timed'")
    )
    return [
        ("Table 2: Y = 2 over Y = 1, FP16, 700 Mbit/s", "1.16 to 1.23x", f"{one / timed:.2f}x"),
        ("Table 3: Y = 2 over two even groups", "5.1 to 5.5 %", f"{even / timed - 1.0:.1%}"),
        ("one group against itself", "", f"{one / again:.2f}x"),
    ]


def every_tensor_compressed(
    network: str = "emulated(resnet50, shrink=32)", warmup: int = 40, rounds: int = 4, workers: int = 4
) -> list[Row]:
    """MergeComp's figure 4: all 161 tensors of ResNet-50 layer by layer, and in groups, over 2 Gbit/s."""
    paper = {
        "dgc(ratio=0.01, momentum=0.0, warmup_steps=0)": "3.83x, 2.91x",
        "efsignsgd": "up to 3.18x, 2.60x",
    }
    found = _script(
        "mergecomp.py", "--workload", network, "--warmup", f"{warmup}",
        "--rounds", f"{rounds}", "--workers", f"{workers}", "--rate", "2gbit", "--policy", "none",
        "--compressors", *paper,
    )  # fmt: skip
    rows = []
    for name, measured in found.items():
        took = {row["name"]: row["step_s"] for row in measured}
        layers, planned = (
            next(took[each] for each in took if part in each) for part in ("split='layers'", ", groups=2)")
        )
        over = f"{layers / planned:.2f}x, {took['ddp'] / planned:.2f}x"
        rows.append((f"figure 4: `{name}` in groups over layer by layer, over DDP", paper[name], over))
    return rows


def winners_of_table_vi() -> list[Row]:
    """AR-Topk's Table VI by equation 4, and by the rounds that `flexible` compares."""
    names, off, by_formula, by_rounds, others = (ALL_GATHER, RING, TREE), [], 0, 0, []
    for (network, gigabits), cells in TABLE_VI.items():
        over = Network(Link(1e-3, 8 / (gigabits * 1e9)))
        rounds = rounds_of(Watched(WORLD, (int(MEGABYTES[network] * 1e6 / 4),)), fused_cutter(True))
        for ratio, row in zip(RATIOS, cells, strict=True):
            kept = MEGABYTES[network] * 1e6 * ratio
            predicted = {name: total_time(ways(kept)[name], WORLD, over) for name in names}
            reported = dict(zip(names, (ms / 1e3 for ms in row), strict=True))
            best = min(reported, key=lambda name: reported[name])
            off += [abs(predicted[name] / reported[name] - 1.0) for name in names]
            by_formula += min(predicted, key=lambda name: predicted[name]) == best
            found = fastest({name: rounds(Choice(ratio, name)) for name in names}, WORLD, over)[0]
            by_rounds += found == best
            others += (
                [] if found == best else [f"{network} at {gigabits} Gbit/s, {ratio}: {found}, paper {best}"]
            )
    return [
        ("Table VI, winners by equation 4", "36", f"{by_formula}"),
        ("its times are off by", "", f"{fmean(off):.1%} in the mean, {max(off):.1%} at most"),
        ("winners by the rounds of `flexible`", "36", f"{by_rounds}; {'; '.join(others)}"),
    ]


def star_in_training(
    workload: str = "resnet_demo",
    steps: int = 300,
    rounds: int = 3,
    methods: Sequence[str] = ("star_topk", "var_topk", "lwtopk"),
    workers: int = 4,
) -> list[Row]:
    """AR-Topk's tables IV and V: accuracy and steps of STAR, VAR and LWTopk, with many matrices."""
    found = _script(
        "ar_topk_training.py", str(OUT / "ar_topk-training.md"), "--workload", workload, "--batch", "8",
        "--steps", f"{steps}", "--seeds", "1", "--rounds", f"{rounds}", "--shards", "iid",
        "--methods", *methods, "--workers", f"{workers}",
    )  # fmt: skip
    paper = {
        "dense": "146.21 ms (ResNet18)",
        "star_topk(ratio=0.1)": "64.83 ms",
        "star_topk(ratio=0.01)": "49.68 ms",
        "star_topk(ratio=0.001)": "48.17 ms",
    }
    rows = []
    for run in found["runs"]:
        name, took_ms = run["recipe"], median(found["step_ms"][run["recipe"]])
        here = f"{run['accuracy']:.1%} accurate, a step takes {took_ms:.0f} ms"
        rows.append((f"`{name}`, {steps} steps, one seed", paper.get(name, ""), here))
    return rows


def scaling_of_table_i() -> list[Row]:
    """COVAP's Table I from its own times: speed-ups by equations 1 and 2."""
    rows = []
    for name, row in TABLE_I.items():
        separate = row.before + row.backward + row.allreduce
        linear = separate / (row.before + row.backward)
        shows = max(0.0, row.allreduce - row.backward)
        overlapped = separate / (row.before + row.backward + shows)
        told = {"ResNet-101": "2.47, 1.43x", "VGG-19": "3.04, 1.22x", "Bert": "3.08, 1.28x"}[name]
        rows.append((f"Table I, {name}: limit, DDP with overlap", told, f"{linear:.2f}, {overlapped:.2f}x"))
    return rows


def covap_beside_comparators(*arguments: str, rounds: int = 3, warmup: int = 6) -> list[Row]:
    """COVAP's Table VII on emulated networks, with the paper's order, shards and intervals beside ours."""
    found = _script(
        "covap_tables.py", "--published", "--rounds", f"{rounds}", "--warmup", f"{warmup}", *arguments
    )
    told = []
    for network, rows in found.items():
        plain = next(row["step_s"] for row in rows if row["name"] == "ddp")
        for row in rows:
            paper = "" if row["paper"] is None else f"{row['paper']:.1f} %, 64 GPUs"
            if row["step_s"] is not None and row["scaling"] is not None:
                here = f"{row['scaling']:.1%} of linear, {plain / row['step_s']:.2f}x DDP"
                told.append((f"{network}, `{row['name']}`", paper, here))
    return told


def rates_by_the_rule() -> list[Row]:
    """ScaleCom's rates from the shapes of networks (Table 2)."""
    rows = []
    for network, paper in (("resnet18", 112), ("resnet50", 96), ("mobilenet_v2", 155), ("resnet34", 92)):
        layers, rule = shapes.load(network).layers, RateRule()
        weights = [sum(math.prod(each) for each in layer.shapes if len(each) > 1) for layer in layers]
        counted = [(size, layer.macs) for size, layer in zip(weights, layers, strict=True) if layer.macs]
        sent = sum(size / rule(size, macs) for size, macs in counted)
        rows.append(
            (f"{network} at 224 pixels", f"{paper}x", f"{sum(size for size, _ in counted) / sent:.0f}x")
        )
    return rows


def trained_by_scalecom(workload: str = "resnet_demo", epochs: float = 5.0) -> list[Row]:
    """ScaleCom's Table 2: held-out accuracy at 100x, standard batch."""
    lines = _printed(
        "scalecom_scaling.py", "--workload", workload, "--epochs", f"{epochs}", "--scales", "1",
        "--betas", "1", "--rates", "100", "--seeds", "1",
    )  # fmt: skip
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines if line.startswith("| x1")]
    paper = {True: "the baseline", False: "at most 0.45 points below"}
    return [
        (f"Table 2: {row[0]}, {epochs:g} epochs, one seed", paper["dense" in row[0]], row[4]) for row in rows
    ]


def likeness_of_ranks(workload: str = "resnet_demo", steps: int = 90) -> list[Row]:
    """ScaleCom's figures 2a and 3 in a short training of two ranks."""
    lines = _printed(
        "scalecom_choice.py", "--workload", workload, "--figures", "2a", "3", "--ranks", "2",
        "--steps", f"{steps}", "--seeds", "1",
    )  # fmt: skip
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines if line.startswith("| ")]
    head, cells = rows[0], rows[1:]
    paper = {"memories apart": '"decreases fast"', "Hamming": "0.6 to 0.8 at epoch 0 (figure 3)"}
    return [
        (f"{', '.join(row[:4])}", paper.get(row[3], ""), "; ".join(f"{at}: {value}" for at, value in
                                                                 zip(head[4:], row[4:], strict=True)))
        for row in cells
        if row[3] in paper
    ]  # fmt: skip


def sizes_of_gradients(workload: str = "chargpt", steps: int = 60) -> list[Row]:
    """GComp's figures 2, 9, 13a and 14 on a small transformer."""
    rows = _script(
        "gcomp_report.py", "sizes", "--workload", workload, "--steps", f"{steps}", "--every", f"{steps // 2}"
    )["rows"]

    def told(name: str, form: str) -> str:
        return " and ".join(format(row[name], form) for row in rows)

    share = ", share of 4 bytes"
    return [
        ("figure 9: size in training", "32.9, 36.5 %", told(f"near, as the recipe cuts it{share}", ".1%")),
        ("by the paper's levels", "the same", told(f"levels{share}", ".1%")),
        ("figure 2: 15 exponents of all", "nearly 95 %", told("top 15 of exponents", ".1%")),
        ("figure 13a: bits of an exponent, static table", "4.6", told("exponent bits, static", ".2f")),
        ("figure 13a: renewed table", "3.7", told("exponent bits, dynamic", ".2f")),
        ("figure 14: bits of mantissas, one level of 18", "a plot", told(ONE_LEVEL, ".2f")),
        ("figure 14: one level of 12", "", told("mantissa bits, one level of 12", ".2f")),
        ("figure 14: four levels", "a plot", told("mantissa bits, four levels", ".2f")),
        ("figure 14: thresholds", "", told("mantissa bits, thresholds", ".2f")),
        ("figure 10: zlib, zstd leave", "more time than none", told(f"zlib 1{share}", ".1%")),
    ]


ONE_LEVEL = "mantissa bits, one level of 18 (the paper's)"


def zeros_of_words(steps: int = 60) -> list[Row]:
    """GComp's figures 2b, 3b and 9 where a model has an embedding of words."""
    rows = _script(
        "gcomp_report.py", "sizes", "--workload", "words", "--steps", f"{steps}", "--every", f"{steps // 2}"
    )["rows"]

    def told(name: str) -> str:
        return " and ".join(f"{row[name]:.1%}" for row in rows)

    return [
        ("figure 3b: gradients that are zero", "up to 50 %", told("zeros")),
        (
            "figure 9: size in training",
            "36.5 % (BERT)",
            told("near, as the recipe cuts it, share of 4 bytes"),
        ),
        ("by the paper's levels", "the same", told("levels, share of 4 bytes")),
    ]


def straying_losses(steps: int = 150, seeds: int = 1) -> list[Row]:
    """GComp's figure 18: distance of losses from exact training's, beside both of its comparators."""
    found = _script(
        "gcomp_report.py", "strays", "--workload", "convnet", "--steps", f"{steps}", "--seeds", f"{seeds}"
    )["away"]
    away = {text: fmean(each) for text, each in found.items()}
    ours = [text for text in away if "gcomp" in text]
    paper = {"truncate(bits=18)": "73.6 to 93.1 % less", "8th step": "77.4 to 96.8 % less"}
    rows = []
    for text in away:
        for part, less in paper.items():
            if part in text:
                here = ", ".join(f"`{own}` {1 - away[own] / away[text]:.1%} less" for own in ours)
                rows.append((f"figure 18, beside {text}", less, here))
    return rows


def compressed_rings(
    workload: str = "chargpt",
    repetitions: int = 5,
    workers: int = 4,
    rates: Sequence[str] = ("200mbit", "500mbit", "1gbit"),
) -> list[Row]:
    """GComp's figure 10: an all-reduce by the ring of compressed blocks, zlib and zstd, at three rates."""
    rows = []
    for rate in rates:
        found = _script(
            "compressed_ring.py", "--workload", workload, "--rate", rate, "--repetitions", f"{repetitions}",
            "--workers", f"{workers}", "--libraries",
        )["rows"]  # fmt: skip
        paper = {"near": "0.616, 0.470", "levels": "the same", "zlib": "slower than none", "zstd": "slower"}
        rows += [
            (f"figure 10: {name}, {rate}, of gloo's time", paper.get(name, ""), f"{row['ratio'][0]:.2f}")
            for name, row in found.items()
            if "ratio" in row
        ]
    return rows


QUICK = "emulated(resnet50, shrink=1024, time_scale=0.001)"
"""A network that hardly computes."""

EXPERIMENTS = {
    "covap": (
        Experiment("table-1", "Table I by its own times", 1, scaling_of_table_i),
        Experiment(
            "table-7",
            "Table VII on four emulated networks, 4 ranks, at the paper's intervals",
            240,
            covap_beside_comparators,
            partial(
                covap_beside_comparators, "--only", "vgg19", "--shrink", "1024", "--alone", rounds=1, warmup=1
            ),
        ),
    ),
    "scalecom": (
        Experiment("table-2", "Rates of Table 2 by the rule", 1, rates_by_the_rule),
        Experiment(
            "figures",
            "Figures 2a and 3, two ranks, one seed",
            240,
            likeness_of_ranks,
            partial(likeness_of_ranks, "convnet", 10),
        ),
        Experiment(
            "training",
            "Table 2 in training, two ranks, one seed",
            300,
            trained_by_scalecom,
            partial(trained_by_scalecom, "convnet", 0.02),
        ),
    ),
    "mergecomp": (
        Experiment("equation-7", "Tables 2 and 3 by equation 7", 1, merged_by_equation_7),
        Experiment(
            "tables",
            "Tables 2 and 3 on two ranks at 700 Mbit/s",
            240,
            merged_on_two_ranks,
            partial(merged_on_two_ranks, QUICK, 1, 1),
        ),
        Experiment(
            "figure-4",
            "Figure 4, all 161 tensors compressed, 4 ranks at 2 Gbit/s",
            240,
            every_tensor_compressed,
            partial(every_tensor_compressed, QUICK, 1, 1, 2),
        ),
    ),
    "gcomp": (
        Experiment(
            "sizes",
            "Sizes of gradients of a small transformer",
            120,
            sizes_of_gradients,
            partial(sizes_of_gradients, "convnet", 2),
        ),
        Experiment(
            "words", "Zeros with an embedding of words", 120, zeros_of_words, partial(zeros_of_words, 2)
        ),
        Experiment(
            "figure-18", "Losses beside exact training's", 200, straying_losses, partial(straying_losses, 8)
        ),
        Experiment(
            "figure-10",
            "The all-reduce beside general compressors, 4 ranks",
            200,
            compressed_rings,
            partial(compressed_rings, "convnet", 2, 2, ("1gbit",)),
        ),
    ),
    "ar_topk": (
        Experiment("table-6", "Table VI", 1, winners_of_table_vi),
        Experiment(
            "table-5",
            "Tables IV and V, 4 ranks, 20 Mbit/s",
            400,
            star_in_training,
            partial(star_in_training, "convnet", 2, 1, ("star_topk",), 2),
        ),
    ),
}
"""What `make papers` runs of a paper, in this order. Times are those of two cores."""


def results_of(name: str) -> dict[str, Any]:
    """What has run of a paper, by experiment."""
    path = OUT / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def show(paper: Paper, seconds: float, only: Sequence[str], *, again: bool, brief: bool = False) -> None:
    """Run what has not run, as far as `seconds` go, and write the paper's page."""
    OUT.mkdir(parents=True, exist_ok=True)
    name = f"{paper.key}-brief" if brief else paper.key
    found = {} if again else results_of(name)
    began = time.monotonic()
    for each in EXPERIMENTS[paper.key]:
        if each.name in found or (only and each.name not in only):
            continue
        left = seconds - (time.monotonic() - began)
        if not brief and each.seconds > left:
            print(f"{paper.name}: {each.title} takes {each.seconds:g} s, and {max(left, 0):.0f} s are left")
            continue
        print(f"{paper.name}: {each.title}", flush=True)
        started = time.monotonic()
        rows = (each.brief or each.run)() if brief else each.run()
        found[each.name] = {
            "rows": rows,
            "took_s": round(time.monotonic() - started, 1),
            "on": f"{datetime.date.today():%d %B %Y}, {os.cpu_count()} cores, {platform.machine()}, "
            f"torch {torch.__version__}, load {os.getloadavg()[0]:.1f}",
        }
        (OUT / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    text = page_of(paper, found)
    if brief:
        text = f"*A few steps of small networks: these numbers say nothing.*\n\n{text}"
    (OUT / f"{name}.md").write_text(text, encoding="utf-8")
    print(f"\n{text}\nwritten to {OUT / f'{name}.md'}")


def page_of(paper: Paper, found: Mapping[str, Any]) -> str:
    """What was shown here, the paper's numbers beside; then all claims."""
    parts = [f"# {paper.name}: what was shown here", cited(paper), f"On a model of your own: `{paper.line}`."]
    for each in EXPERIMENTS[paper.key]:
        if each.name not in found:
            parts.append(f"## {each.title}\n\nHas not run: it takes about {each.seconds:g} s on two cores.")
            continue
        result = found[each.name]
        rows = "\n".join(f"| {' | '.join(row)} |" for row in result["rows"])
        head = "| | in the paper | here |\n|---|---|---|"
        parts.append(f"## {each.title}\n\n{result['on']}; {result['took_s']} s.\n\n{head}\n{rows}")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Run papers, or write their pages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("papers", nargs="*", choices=[[], *KEYS], help="by default all")
    parser.add_argument("--seconds", type=float, default=900.0, help="for each paper")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="experiments")
    parser.add_argument("--again", action="store_true", help="run what has run, too")
    parser.add_argument("--brief", action="store_true", help="a few steps of each: shows that it runs")
    parser.add_argument("--list", action="store_true", help="say what would run, and for how long")
    parser.add_argument("--write", action="store_true", help="write the tables of docs/papers")
    options = parser.parse_args()
    for key in options.papers or KEYS:
        paper = load(key)
        if options.write:
            path = PAGES / paper.page
            path.write_text(written(paper, path.read_text(encoding="utf-8")), encoding="utf-8")
        elif options.list:
            for each in EXPERIMENTS[key]:
                print(f"{key:<10} {each.name:<12} {each.seconds:>4g} s  {each.title}")
        else:
            show(paper, options.seconds, options.only, again=options.again, brief=options.brief)


if __name__ == "__main__":
    main()

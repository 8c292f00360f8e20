"""Writes tables and pictures of the documents from what the demonstration and the sweep have left.

    make demo ARGS="--json demo.json"
    .venv/bin/python -m benchmarks.tables --demo demo.json

`--demo` takes the numbers of a run over into benchmarks/results/demo.json, from which `gradwire report` makes
its page again. The sweep's files are benchmarks/results/sweep.jsonl and sweep-again.jsonl, as
`benchmarks/sweep.py` writes them. The second has settings that were measured again, beside trainings of DDP
of that day; its rows replace those of the first. Without an option all is written anew: README.md,
docs/choosing.md, and the run's pictures in docs/pictures. A test fails when these and the files differ.
"""

import argparse
import json
import re
import textwrap
from dataclasses import fields
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.sweep import SETTINGS, Setting
from gradwire._api.report import Report, choices_text
from gradwire.planning.choice import ChoiceRow
from gradwire_lab.bench.units import bytes_text, ratio_text, seconds_text
from gradwire_lab.demo.curves import WINDOW
from gradwire_lab.demo.findings import (
    Choosing,
    Runs,
    band,
    both_of,
    checks_of,
    courses_of,
    headline,
    link_text,
    metric_of,
    predicted_bytes,
    row_of,
    to_loss_text,
)
from gradwire_lab.demo.plans import TARGET_CCR
from gradwire_lab.report.charts import WIDE
from gradwire_lab.report.page import TIMES_LEGEND, file_of, loss_over_time, step_timeline

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "benchmarks" / "results" / "demo.json"
SWEEPS = tuple(ROOT / "benchmarks" / "results" / name for name in ("sweep.jsonl", "sweep-again.jsonl"))
COLUMNS = 100
DIGITS = 5
"""Of the numbers in the file: more than is shown anywhere."""

Document = dict[str, Any]

_MODELS = {"resnet_demo": "residual network", "chargpt": "transformer"}


def small(document: Document) -> Document:
    """What tables and page need of a run: single steps of the bench rows are left out.

    Its claims are judged anew, by the numbers that are kept and by the rules of today.
    """
    rows = [
        {key: value for key, value in row.items() if not key.endswith("_all")} for row in document["rows"]
    ]
    found: Document = _rounded({**document, "rows": rows})
    return {**found, "checks": checks_of(found)}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def gains(demo: Document) -> str:
    """What README says of the demonstration: its headline, a table, how it was measured, what was missed."""
    settings, facts = demo["settings"], demo["settings"]["workload_facts"]
    both, metric = both_of(demo), metric_of(courses_of(demo))
    model = _MODELS.get(settings["workload"], settings["workload"])
    bound, ddp, wire = (row_of(demo, kind) for kind in ("bound", "peer", "recipe"))
    about = (
        f"**{headline(demo)}.** `make demo` trains a {model} of {facts['parameters'] / 1e6:.2f} M "
        f"parameters on {facts['data'].split(',')[0]}, over {_plain(link_text(demo))}, on "
        f"{settings['workers']} ranks that share {demo['machine']['cores']} cores. "
        + (
            f"By choice, an all-reduce there takes {TARGET_CCR} times as long as the backward pass. "
            if settings["rate_chosen_here"]
            else ""
        )
        + "Bytes are counted at the network interface."
    )
    picture = "![training loss against time, plain DDP and gradwire](docs/pictures/loss-over-time.svg)"
    head = (
        f"| | step | time to plain DDP's final loss | bytes per step | {metric.label}, {both.steps} steps |"
    )
    rows = [
        f"| no communication | {seconds_text(bound['step_s'])} | | 0 | |",
        _gain(f"gradwire (`{_name(wire)}`)", wire, both.wire, both.target(), metric),
        _gain("plain DDP", ddp, both.ddp, both.target(), metric),
    ]
    seeds = min(len(both.ddp.courses), len(both.wire.courses))
    first = max(course.uncounted for course in courses_of(demo) if course.name == "gradwire")
    spread = (
        "A time to it is when the mean loss of all seeds gets there, with the range of the seeds that do. "
        f"Accuracies are means of {seeds} seeds, with their range."
        if seeds > 1
        else "Times to it and accuracies are those of one seed."
    )
    how = (
        f"The loss to reach is the final one of plain DDP's worst seed, as a mean of {WINDOW} steps. "
        f"{spread} Times include the choice; steps and bytes are counted "
        f"after it, from step {first + 1} on. Measured on {_when(demo)}, on "
        f"{demo['machine']['processor']}. "
        + " ".join(
            [*_claims(demo), *_choices(both.wire), *(note for note in demo["notes"] if "busy" in note)]
        )
    )
    table = "\n".join([head, "|---|---|---|---|---|", *rows])
    parts = [_filled(about), picture, table, _filled(how), *_excerpt(wire["report"])]
    return "\n\n".join(parts)


def _claims(demo: Document) -> list[str]:
    """What choosing cost, how many claims of the page hold, and all that do not."""
    cost = Choosing.of(courses_of(demo), demo["settings"]["warmup"])
    told = []
    if cost is not None:
        told.append(f"Until the choice, gradwire's steps took {cost.cost_s:.1f} s longer than plain DDP's.")
    missed = [check["worse"] for check in demo["checks"] if check["passed"] is False]
    held = sum(check["passed"] is True for check in demo["checks"])
    told.append(f"Of the claims on the run's page, {held} of {len(demo['checks'])} hold.")
    return [*told, f"Missed: {'; '.join(missed)}."] if missed else told


EXCERPT = ("why", "on the wire", "per step")
"""The lines of the report that README shows."""


def _excerpt(report: Document | None) -> list[str]:
    """The beginning of what `print(wire.report())` says, in five lines."""
    if report is None:
        return []
    known = {each.name for each in fields(Report)}
    told = {key: value for key, value in report.items() if key in known}
    whole = Report(**told | {"timeline": [], "choices": (), "link": None})
    # Wide enough that nothing is wrapped: the line "why" is cut first.
    title, *rows = whole.text(10_000).splitlines()
    why, *others = [row for row in rows if row.strip().startswith(EXCERPT)]
    why = f"{'; '.join(why.split('; ')[:2])}; …"
    shown = textwrap.fill(why, COLUMNS, subsequent_indent=" " * 15, break_on_hyphens=False)
    said = f"`print(wire.report())` begins like this, after {report['step']} steps."
    said += ' The times in "why" are those before the choice:'
    return [_filled(said), "\n".join(["```text", title, shown, *others, "```"])]


def choices(demo: Document) -> str:
    """The report's table of the recipes among which `auto` chose."""
    rows = (row_of(demo, "recipe")["report"] or {}).get("choices") or []
    return "\n".join(["```text", *choices_text(tuple(ChoiceRow(**row) for row in rows)), "```"])


def pictures(demo: Document) -> dict[str, str]:
    """The SVG files of docs/pictures that show the demonstration, by name."""
    return {
        "loss-over-time.svg": file_of(loss_over_time(demo, WIDE), TIMES_LEGEND),
        "one-step.svg": file_of(step_timeline(demo)),
    }


def _choices(runs: Runs) -> list[str]:
    """A sentence where seeds chose otherwise than the one whose steps are timed."""
    chosen = [course.chosen for course in runs.courses]
    words = [
        f"`{recipe}` with seed {course.seed}" for recipe, course in zip(chosen, runs.courses, strict=True)
    ]
    return [f"Choices differ: {', '.join(words)}."] if len(set(chosen)) > 1 else []


def _gain(name: str, row: Document, runs: Runs, target: float | None, metric: Any) -> str:
    counted = row["interface_bytes_per_step"]
    sent = bytes_text(predicted_bytes(row) if counted is None else counted)
    quality = band(runs.values(metric), metric.number, metric.unit)
    return f"| {name} | {seconds_text(row['step_s'])} | {to_loss_text(runs, target)} | {sent} | {quality} |"


def measured(demo: Document, sweep: list[Document]) -> str:
    """A table of docs/choosing.md: speeds as shares of that without communication."""
    ddp, wire, cores = row_of(demo, "peer"), row_of(demo, "recipe"), demo["machine"]["cores"]
    size = demo["settings"]["workload_facts"]["parameters"] / 1e6
    workers = demo["settings"]["workers"]
    shares = [ratio_text(row["scaling"], percent=True) for row in (ddp, wire)]
    link = _plain(link_text(demo)).removeprefix("a link of ")
    lines = [
        "| workload | ranks | link | plain DDP | gradwire |",
        "|---|---|---|---|---|",
        f"| demonstration, {size:.2f} M parameters | {workers} | {link} | {shares[0]} "
        f"| {shares[1]} (`{_name(wire)}`) |",
    ]
    settings = {each.name: each for each in SETTINGS}
    raced = [line for line in sweep if line.get("setting") in settings and line["step_s"]["auto"]]
    lines += [_swept(settings[line["setting"]], line) for line in raced]
    when = f"Ranks share {cores} cores, over an emulated link. The demonstration ran on {_when(demo)}."
    return "\n\n".join([_filled(when), "\n".join(lines)])


def _swept(setting: Setting, line: Document) -> str:
    step_s = line["step_s"]
    ddp, auto = (ratio_text(step_s["bound"] / step_s[name], percent=True) for name in ("ddp", "auto"))
    ranks = f"{setting.workers} on {setting.nodes} nodes" if setting.nodes else str(setting.workers)
    delay = "" if setting.delay == "0" else f", {setting.delay}"
    chosen = str(line["chosen"]).split("(")[0]
    return f"| `{setting.workload}` | {ranks} | {setting.rate}{delay} | {ddp} | {auto} (`{chosen}`) |"


def _name(row: Document) -> str:
    return str((row["report"] or {}).get("recipe", row["name"])).split("(")[0]


def _plain(text: str) -> str:
    return text.replace("\N{NO-BREAK SPACE}", " ")


def _when(demo: Document) -> str:
    day = date.fromisoformat(demo["machine"]["date"][:10])
    return f"{day.day} {day:%B %Y}"


def _filled(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), COLUMNS, break_on_hyphens=False, break_long_words=False)


def placed(page: str, name: str, text: str) -> str:
    """The page with `text` between the two comments that name it. `ValueError` if it has no such place."""
    begin, end = f"<!-- {name}: written by benchmarks/tables.py -->", f"<!-- end of {name} -->"
    place = re.compile(f"(?<={re.escape(begin)}\n).*?(?={re.escape(end)})", re.DOTALL)
    if len(place.findall(page)) != 1:
        raise ValueError(f"the page has no place, or several, between {begin!r} and {end!r}")
    return place.sub(lambda _: f"\n{text}\n\n", page)


def pages(demo: Document, sweep: list[Document]) -> dict[Path, str]:
    """The texts of the pages, with their tables as the files have them, and of the pictures."""
    readme, guide = ROOT / "README.md", ROOT / "docs" / "choosing.md"
    found = placed(guide.read_text(encoding="utf-8"), "measured", measured(demo, sweep))
    return {
        readme: placed(readme.read_text(encoding="utf-8"), "gains", gains(demo)),
        guide: placed(found, "choices", choices(demo)),
        **{ROOT / "docs" / "pictures" / name: f"{text}\n" for name, text in pictures(demo).items()},
    }


def load() -> tuple[Document, list[Document]]:
    """The demonstration's document, and the newest line of each setting of the sweep."""
    lines = [json.loads(text) for path in SWEEPS for text in path.read_text(encoding="utf-8").splitlines()]
    newest = {line["setting"]: line for line in lines if "setting" in line}
    return json.loads(DEMO.read_text(encoding="utf-8")), list(newest.values())


def main() -> None:
    """Take numbers over, and write pages and pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--demo", type=Path, help="what `gradwire demo --json` has written")
    options = parser.parse_args()
    if options.demo is not None:
        document = json.loads(options.demo.read_text(encoding="utf-8"))
        DEMO.write_text(json.dumps(small(document), separators=(",", ":")) + "\n", encoding="utf-8")
    for page, text in pages(*load()).items():
        page.write_text(text, encoding="utf-8")
        print(f"written: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

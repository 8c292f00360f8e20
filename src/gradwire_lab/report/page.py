"""The document of a demonstration or a bench as one self-contained HTML page."""

import json
from base64 import b64encode
from collections.abc import Sequence
from importlib import resources
from statistics import fmean
from typing import Any

import jinja2
from markupsafe import Markup
from rich.text import Text

from gradwire_lab.bench.settings import stock
from gradwire_lab.bench.table import COSTS, Column, notes, results
from gradwire_lab.bench.units import bytes_text, mode_text, ratio_text, seconds_text
from gradwire_lab.demo.curves import ends_s
from gradwire_lab.demo.findings import NAMES as ROW_NAMES
from gradwire_lab.demo.findings import (
    Both,
    Runs,
    apart,
    both_of,
    courses_of,
    final_figures,
    headline,
    lead,
    link_text,
    predicted_bytes,
    projected,
    row_of,
    tiles,
)
from gradwire_lab.demo.plans import TARGET_CCR
from gradwire_lab.report import svg
from gradwire_lab.report.charts import (
    WIDTH,
    Band,
    BarPart,
    Mark,
    Series,
    Spot,
    byte_pairs,
    line_chart,
    stacked,
    timeline,
)

Document = dict[str, Any]

SHOWN = 8
"""Candidates on the page; the document has all."""

NAMES = {"ddp": "plain DDP", "gradwire": "gradwire"}
_PARTS = (
    ("data", "data_s"),
    ("forward", "forward_s"),
    ("backward", "backward_s"),
    ("wait", "exposed_comm_s"),
    ("optimizer", "optimizer_s"),
)
_ROW_COLOURS = {"bound": "bound", "peer": "ddp", "recipe": "gradwire"}


def loss_over_time(document: Document, width: float = WIDTH) -> str:
    """Chart, as SVG, of the training loss over time: means and ranges over seeds, at the mean times of steps;
    projected steps are dashed.

    Plain DDP's losses at the step time of no communication show what a link that costs nothing would give. A
    line is at the loss that every run of plain DDP ends with, and a dot on each curve says when it is there.
    """
    both, bound_s = both_of(document), row_of(document, "bound")["step_s"]
    series, bands = _sides(document, both)
    if both.ddp.courses and bound_s is not None:
        free = tuple((step * bound_s, loss) for step, loss in enumerate(_means(both.ddp.losses()), start=1))
        series.insert(0, Series(free, "bound"))
    target, last_s = both.target(), max((curve.points[-1][0] for curve in series), default=0.0)
    if target is not None:
        series.insert(0, Series(((0.0, target), (last_s, target)), "target"))
    return line_chart(
        series,
        "seconds of training on the slow link",
        "training loss",
        bands,
        _marks(document, both, timed=True),
        _arrivals(both),
        width,
    )


def _arrivals(both: Both) -> list[Spot]:
    """Dots of the chart: the seconds after which each side's mean loss has reached the target.

    The target is the loss that every run of plain DDP ends with. A side that never reaches it has no dot.
    """
    spots, target = [], both.target()
    for name, runs in (("gradwire", both.wire), ("ddp", both.ddp)):
        mean_s = None if target is None else runs.mean_reached_s(target)
        if target is not None and mean_s is not None:
            spots.append(Spot(mean_s, target, f"{NAMES[name]}: {mean_s:.1f} s", name))
    return spots


def loss_over_steps(document: Document) -> str:
    """Chart, as SVG, of the training loss over steps: means and ranges over seeds."""
    both = both_of(document)
    series, bands = _sides(document, both, timed=False)
    return line_chart(series, "steps", "training loss", bands, _marks(document, both, timed=False))


def _sides(document: Document, both: Both, *, timed: bool = True) -> tuple[list[Series], list[Band]]:
    """Curve and band of plain DDP and of gradwire, over seconds if `timed`, else over steps. If no run is
    whole, they show what there is of seed 0.
    """
    series, bands = [], []
    for name, runs in (("ddp", both.ddp), ("gradwire", both.wire)):
        if not runs.courses:
            broken = [each for each in courses_of(document) if each.name == name and each.seed == 0]
            runs = Runs(broken, [ends_s(each, both.warmup) for each in broken])
        losses, times_s = runs.losses(), [each for each in runs.times_s if each]
        if not losses or not losses[0] or (timed and not times_s):
            continue
        steps = [float(step) for step in range(1, len(losses[0]) + 1)]
        places = [fmean(each) for each in zip(*times_s, strict=True)] if timed else steps
        shaped = max(each.shaped for each in runs.courses)
        projected = shaped if timed and shaped < len(places) else None
        series.append(Series(tuple(zip(places, _means(losses), strict=True)), name, projected))
        if len(losses) > 1:
            columns = zip(places, zip(*losses, strict=True), strict=True)
            bands.append(Band(tuple((place, min(each), max(each)) for place, each in columns), name))
    return series, bands


def _means(losses: Sequence[Sequence[float]]) -> list[float]:
    return [fmean(each) for each in zip(*losses, strict=True)]


def _marks(document: Document, both: Both, *, timed: bool) -> list[Mark]:
    """Marks where kernels were compiled within steps, and where an adaptive recipe was decided; of seed 0.
    They lie at seconds if `timed`, else at steps.
    """
    first = next((each for each in courses_of(document) if each.name == "gradwire" and each.seed == 0), None)
    if first is None:
        return []
    ends = ends_s(first, both.warmup) if timed else [float(step + 1) for step in range(len(first))]
    marks = [Mark(ends[step], f"kernels compiled: {seconds_text(took)}") for step, took in first.compiled]
    if 0 < first.settled_after < len(first):
        words = f"{row_of(document, 'recipe')['name']} has chosen, step {first.settled_after}"
        marks.append(Mark(ends[first.settled_after - 1], words))
    return marks


def step_parts(document: Document) -> str:
    """Bars, as SVG, of the parts of a step: their medians for every contestant."""
    rows = []
    for row in document["rows"]:
        if row["step_s"] is not None and not row.get("failed"):
            parts = [BarPart(name, row[key] or 0.0, name) for name, key in _PARTS]
            rows.append((_name(document, row), row["step_s"], parts))
    return stacked(rows, "where the time of a step went")


def step_timeline(document: Document) -> str:
    """Chart, as SVG, of a typical step of DDP above one of gradwire. A step that was not recorded is left
    out.
    """
    spans = document["timelines"]
    return timeline([(NAMES[name], spans[name]) for name in ("ddp", "gradwire") if spans.get(name)])


def bytes_beside(document: Document) -> str:
    """SVG of two bars per row of `document`: bytes per step as predicted, and as the interface counted.

    Failed rows and the bounds are left out.
    """
    return byte_pairs(
        [
            (
                _name(document, row),
                predicted_bytes(row) if "courses" in document else row["wire_bytes_per_step"],
                row["interface_bytes_per_step"],
                _ROW_COLOURS[row["kind"]],
            )
            for row in document["rows"]
            if row["kind"] != "bound" and not row.get("failed")
        ]
    )


def _name(document: Document, row: Document) -> str:
    """Name of a row's setting: of its kind in a demonstration, which has one setting of each, and its own in
    a bench.
    """
    return ROW_NAMES[row["kind"]] if "courses" in document else str(row["name"])


_LEGEND = (("data", "loading data"), ("forward", "forward"), ("backward", "backward"))
_STEP_LEGEND = (*_LEGEND, ("wait", "waiting for the network"), ("optimizer", "optimizer"))
_TIMELINE_LEGEND = (("backward", "computing gradients"), ("encode", "encoding"), ("decode", "decoding"))
_SPAN_LEGEND = (*_TIMELINE_LEGEND, ("wire", "on the wire"), ("wait", "waiting"))


def render(document: dict[str, Any]) -> str:
    """A demonstration's or a bench's document as one HTML page without external requests.

    Raises `ValueError` for a document that is neither.

    >>> from pathlib import Path
    >>> Path("report.html").write_text(render(document), encoding="utf-8")  # doctest: +SKIP
    """
    if not {"settings", "machine", "rows"} <= document.keys():
        raise ValueError("not the JSON of `gradwire demo` or `gradwire bench`")
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FunctionLoader(_resource),
    )
    from gradwire.recipes.parse import short  # with torch, which `gradwire demo --help` does without

    environment.filters |= {
        "seconds": seconds_text,
        "bytes": bytes_text,
        "ratio": ratio_text,
        "short": short,
    }
    kind = "report" if "courses" in document else "bench"
    own = _of_demo(document) if kind == "report" else _of_bench(document)
    numbers = b64encode(json.dumps(document).encode()).decode()
    common = {
        "style": Markup(_resource("drawing.css") + _resource("report.css")),
        "mode": mode_text(document["settings"]["mode"]),
        "step_legend": _STEP_LEGEND,
        "data": f"data:application/json;base64,{numbers}",
        "download": f"gradwire-{kind}.json",
    }
    return environment.get_template(f"{kind}.html.j2").render({**common, **document, **own})


def _of_demo(document: Document) -> Document:
    """Figures that the page of a demonstration shows beside the document."""
    draw = (loss_over_time, loss_over_steps, step_parts, step_timeline, bytes_beside)
    both, recipe = both_of(document), row_of(document, "recipe")
    first = next((each for each in courses_of(document) if each.name == "gradwire"), None)
    return {
        "pictures": {each.__name__: Markup(each(document)) for each in draw},
        "headline": headline(document),
        "lead": lead(document),
        "attached": True,
        "target_ccr": TARGET_CCR,
        "tiles": tiles(document),
        "figures": final_figures(document),
        "apart": apart(document),
        "link": link_text(document),
        "choices": shown((recipe["report"] or {}).get("choices") or []),
        "buffer_bytes": recipe.get("buffer_bytes_per_step", 0.0),
        "uncounted": 0 if first is None else first.uncounted,
        "compile_s": document.get("compile_s", 0.0),
        "courses_legend": _SIDES,
        "times_legend": TIMES_LEGEND,
        "span_legend": _SPAN_LEGEND,
        "projected": projected(document),
        "dashed": any(course.shaped < len(course) for course in both.ddp.courses if course.seed == 0),
    }


_SIDES = (("ddp", "plain DDP"), ("gradwire", "gradwire"))
TIMES_LEGEND = (
    *_SIDES,
    ("bound", "no communication: plain DDP's losses at its step time"),
    ("target", "the loss that every run of plain DDP ends with"),
)
"""Of `loss_over_time`: classes of curves, and words."""


def file_of(picture: str, legend: Sequence[tuple[str, str]] = ()) -> str:
    """A picture as an SVG file, in the page's colours, light or dark."""
    return svg.alone(picture, legend, _resource("drawing.css"))


def shown(choices: Sequence[Document]) -> list[Document]:
    """At most `SHOWN` of `choices`, in their order; `dense` and the recipe that runs are always shown."""
    must = [each for each in choices if each["verdict"] == "runs" or each["recipe"] == "dense"]
    others = [each for each in choices if each not in must][: SHOWN - len(must)]
    return [each for each in choices if each in must or each in others]


def _of_bench(document: Document) -> Document:
    """Figures that the page of a bench shows beside the document."""
    rows, settings = document["rows"], document["settings"]
    beside = stock(settings)
    faster = f"speedup_over_{beside}"
    known = [row for row in rows if row["kind"] == "recipe" and row[faster]]
    best = max(known, key=lambda row: row[faster]["ratio"], default=None)
    where = f"{settings['workload']} over {settings['rate']}, {settings['workers']} ranks"
    title = where
    if best is not None:
        peer = "plain DDP" if beside == "ddp" else "stock FSDP2"
        title += f": {best['name']} is {ratio_text(best[faster]['ratio'])} as fast as {peer}"
    spread = document["spread"]
    lead = "The step without communication was not measured twice"
    if spread is not None:
        lead = (
            "The step without communication was measured twice. The second time it took "
            f"{spread['low']:.2f} to {spread['high']:.2f} times as long, so such differences mean nothing"
        )
    return {
        "pictures": {each.__name__: Markup(each(document)) for each in (step_parts, bytes_beside)},
        "headline": title,
        "lead": lead,
        "attached": False,
        "projected": "",
        "tables": [_table("Results", results(settings), rows), _table("Where the time goes", COSTS, rows)],
        "notes": notes(settings),
        "failures": [
            {"name": row["name"], "reason": row["failed"], "detail": row["failure_detail"] or ""}
            for row in rows
            if row["failed"]
        ],
        "seconds": None,
    }


def _table(
    title: str, columns: Sequence[Column], rows: Sequence[Document]
) -> tuple[str, list[str], list[tuple[str, list[str]]]]:
    """The terminal's table: title, heads, and the cells of each row by its setting. Figures of a failed
    setting are left out.
    """
    lines = [
        (
            row["name"],
            ["-" if row["failed"] else Text.from_markup(text(row)).plain for _, text in columns],
        )
        for row in rows
    ]
    return title, [head for head, _ in columns], lines


def _resource(name: str) -> str:
    return resources.files("gradwire_lab.report").joinpath(name).read_text(encoding="utf-8")

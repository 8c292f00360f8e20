"""The document of a demonstration or a bench as one self-contained HTML page."""

import json
from base64 import b64encode
from collections.abc import Sequence
from importlib import resources
from itertools import accumulate
from statistics import median
from typing import Any

import jinja2
from markupsafe import Markup
from rich.text import Text

from gradwire.lab.bench.table import COSTS, RESULTS, Column
from gradwire.lab.bench.units import bytes_text, mode_text, ratio_text, seconds_text
from gradwire.lab.demo.findings import apart, final_figures, headline, lead, link_text, row_of, tiles
from gradwire.lab.demo.plans import TARGET_CCR
from gradwire.lab.report.charts import Part, Series, byte_pairs, line_chart, smooth, stacked, timeline

Document = dict[str, Any]

NAMES = {"ddp": "plain DDP", "gradwire": "gradwire"}
_PARTS = (
    ("data", "data_s"),
    ("forward", "forward_s"),
    ("backward", "backward_s"),
    ("wait", "exposed_comm_s"),
    ("optimizer", "optimizer_s"),
)
_ROW_NAMES = {"bound": "no communication", "peer": "plain DDP", "recipe": "gradwire"}
_ROW_COLOURS = {"bound": "bound", "peer": "ddp", "recipe": "gradwire"}


def loss_over_time(document: Document) -> str:
    """Curves of seed 0. Steps of DDP on an unshaped link are placed at projected times and dashed."""
    warmup = document["settings"]["warmup"]
    series = []
    for course in document["courses"]:
        if course["seed"] == 0 and course["losses"]:
            seconds, shaped = on_slow_link(course, warmup), course["shaped"]
            points = tuple(zip(accumulate(seconds), smooth(course["losses"]), strict=False))
            series.append(Series(points, course["name"], shaped if shaped < len(seconds) else None))
    return line_chart(series, "seconds of training on the slow link", "training loss")


def loss_over_steps(document: Document) -> str:
    """Every seed; seed 0 stands out."""
    series = []
    for course in sorted(document["courses"], key=lambda course: -course["seed"]):
        points = tuple((float(step), loss) for step, loss in enumerate(smooth(course["losses"]), start=1))
        faint = "" if course["seed"] == 0 else " faint"
        if points:
            series.append(Series(points, course["name"] + faint))
    return line_chart(series, "steps", "training loss")


def step_parts(document: Document) -> str:
    """Medians per step of every contestant."""
    rows = []
    for row in document["rows"]:
        if row["step_s"] is not None and not row.get("failed"):
            parts = [Part(name, row[key] or 0.0, name) for name, key in _PARTS]
            rows.append((_name(document, row), parts))
    return stacked(rows, "where the time of a step went")


def step_timeline(document: Document) -> str:
    """One step of DDP above one of gradwire."""
    spans = document["timelines"]
    return timeline([(NAMES[name], spans[name]) for name in ("ddp", "gradwire") if spans.get(name)])


def bytes_beside(document: Document) -> str:
    """Bytes that the cost model predicts beside those that the interface counted."""
    return byte_pairs(
        [
            (
                _name(document, row),
                row["wire_bytes_per_step"],
                row["interface_bytes_per_step"],
                _ROW_COLOURS[row["kind"]],
            )
            for row in document["rows"]
            if row["kind"] != "bound" and not row.get("failed")
        ]
    )


def _name(document: Document, row: Document) -> str:
    """A demonstration has one setting of a kind, a bench has several."""
    return _ROW_NAMES[row["kind"]] if "courses" in document else str(row["name"])


def on_slow_link(course: Document, warmup: int) -> list[float]:
    """Seconds per step as on the slow link: measured, then the median of what was measured."""
    measured = list(course["step_s"][: course["shaped"]])
    if not measured:
        return []
    usual = median(measured[warmup:] or measured)
    return measured + [usual] * (len(course["step_s"]) - len(measured))


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
    environment.filters |= {"seconds": seconds_text, "bytes": bytes_text, "ratio": ratio_text}
    kind = "report" if "courses" in document else "bench"
    own = _of_demo(document) if kind == "report" else _of_bench(document)
    numbers = b64encode(json.dumps(document).encode()).decode()
    common = {
        "style": Markup(_resource("report.css")),
        "mode": mode_text(document["settings"]["mode"]),
        "step_legend": _STEP_LEGEND,
        "data": f"data:application/json;base64,{numbers}",
        "download": f"gradwire-{kind}.json",
    }
    return environment.get_template(f"{kind}.html.j2").render({**common, **document, **own})


def _of_demo(document: Document) -> Document:
    """What the page of a demonstration shows beside the document."""
    draw = (loss_over_time, loss_over_steps, step_parts, step_timeline, bytes_beside)
    courses, report = document["courses"], row_of(document, "recipe")["report"] or {}
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
        "compile_s": report.get("compile_s", 0.0),
        "courses_legend": [("ddp", "plain DDP"), ("gradwire", "gradwire")],
        "span_legend": _SPAN_LEGEND,
        "projected": any(
            course["seed"] == 0 and course["shaped"] < len(course["step_s"]) for course in courses
        ),
    }


def _of_bench(document: Document) -> Document:
    """What the page of a bench shows beside the document."""
    rows, settings = document["rows"], document["settings"]
    known = [row for row in rows if row["kind"] == "recipe" and row["speedup_over_ddp"]]
    best = max(known, key=lambda row: row["speedup_over_ddp"]["ratio"], default=None)
    where = f"{settings['workload']} over {settings['rate']}, {settings['workers']} ranks"
    title = where
    if best is not None:
        title += f": {best['name']} is {ratio_text(best['speedup_over_ddp']['ratio'])} as fast as plain DDP"
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
        "tables": [_table("Results", RESULTS, rows), _table("Where the time goes", COSTS, rows)],
        "notes": [
            "scaling: speed as a share of that of the same step without communication (bound).",
            "sent: bytes per rank and step that the cost model predicts; counted: at the interface.",
            "compress: encoding and decoding; of a peer, the time inside its hook.",
            "exposed: what the backward pass waited at its end. peak: resident memory, torch included.",
        ],
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
    """The terminal's table: title, heads, and cells by setting. What a failed one measured is left out."""
    lines = [
        (
            row["name"],
            ["-" if row["failed"] else Text.from_markup(text(row)).plain for _, text in columns],
        )
        for row in rows
    ]
    return title, [head for head, _ in columns], lines


def _resource(name: str) -> str:
    return resources.files("gradwire.lab.report").joinpath(name).read_text(encoding="utf-8")

"""The demonstration's document as one self-contained HTML page."""

from importlib import resources
from itertools import accumulate
from statistics import median
from typing import Any

import jinja2
from markupsafe import Markup

from gradwire.lab.bench.units import bytes_text, mode_text, ratio_text, seconds_text
from gradwire.lab.demo.findings import final_figures, headline, lead, link_text, tiles
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
        if row["step_s"] is not None:
            parts = [Part(name, row[key] or 0.0, name) for name, key in _PARTS]
            rows.append((_ROW_NAMES[row["kind"]], parts))
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
                _ROW_NAMES[row["kind"]],
                row["wire_bytes_per_step"],
                row["interface_bytes_per_step"],
                _ROW_COLOURS[row["kind"]],
            )
            for row in document["rows"]
            if row["kind"] != "bound"
        ]
    )


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
    """One HTML page without external requests: style and pictures are inside.

    >>> from pathlib import Path
    >>> Path("report.html").write_text(render(document), encoding="utf-8")  # doctest: +SKIP
    """
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"seconds": seconds_text, "bytes": bytes_text, "ratio": ratio_text}
    template = environment.from_string(_resource("report.html.j2"))
    draw = (loss_over_time, loss_over_steps, step_parts, step_timeline, bytes_beside)
    return template.render(
        document,
        style=Markup(_resource("report.css")),
        pictures={each.__name__: Markup(each(document)) for each in draw},
        headline=headline(document),
        lead=lead(document),
        target_ccr=TARGET_CCR,
        tiles=tiles(document),
        figures=final_figures(document),
        link=link_text(document),
        mode=mode_text(document["settings"]["mode"]),
        step_legend=_STEP_LEGEND,
        span_legend=_SPAN_LEGEND,
        projected=any(
            course["seed"] == 0 and course["shaped"] < len(course["step_s"]) for course in document["courses"]
        ),
    )


def _resource(name: str) -> str:
    return resources.files("gradwire.lab.report").joinpath(name).read_text(encoding="utf-8")

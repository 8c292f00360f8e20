"""From the demonstration's document to its pictures."""

from itertools import accumulate
from statistics import median
from typing import Any

from gradwire.lab.report.bars import Part, byte_pairs, stacked
from gradwire.lab.report.lines import Series, line_chart, smooth
from gradwire.lab.report.timeline import timeline

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
    """Of seed 0; where DDP's steps ran on an unshaped link, their place in time is projected and dashed."""
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
    """What the cost model predicts, what the interface counted."""
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

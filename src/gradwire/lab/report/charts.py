"""Charts: lines (loss over steps and time), bars (parts of a step, bytes), and lanes (one step in time)."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire.lab.bench.units import bytes_text, seconds_text
from gradwire.lab.report import svg

WIDTH, HEIGHT = 560.0, 330.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 14.0, 34.0, 46.0
_MOST_POINTS = 300
# Of pictures as wide as the page: the names on the left, and what is one below the other.
_WIDE = 1140.0
_NAMES = 150.0
_LANE_NAMES = 190.0
_VALUES = 96.0
_ROW, _BAR_HEIGHT, _LEAST_LABEL = 46.0, 26.0, 58.0
_LANE, _SPAN_HEIGHT, _LANE_GAP = 26.0, 20.0, 22.0


@dataclass(frozen=True)
class Series:
    """A curve: `class_` names its colour; from `dashed_from` (an index) on it is drawn dashed."""

    points: tuple[svg.Point, ...]
    class_: str
    dashed_from: int | None = None


def line_chart(series: Sequence[Series], x_label: str, y_label: str) -> str:
    """Curves over common axes. The vertical axis starts at 0 and leaves out the highest 2 % of values."""
    points = [point for curve in series for point in curve.points if math.isfinite(point[1])]
    if not points:
        return svg.drawing(WIDTH, 40, [svg.text(8, 24, "nothing was measured")], y_label)
    heights = sorted(y for _, y in points)
    top = heights[int(0.98 * (len(heights) - 1))] * 1.08
    across = svg.Scale(0.0, max(x for x, _ in points), _LEFT, WIDTH - _RIGHT)
    up = svg.Scale(0.0, top, HEIGHT - _BOTTOM, _TOP)
    parts = _axes(across, up, x_label, y_label)
    for curve in series:
        parts += _curve(curve, across, up)
    return svg.drawing(WIDTH, HEIGHT, parts, f"{y_label} against {x_label}")


def smooth(values: Sequence[float | None], window: int = 15) -> list[float]:
    """Mean of the last `window` known values, because single batches jump; NaN where none of them is.

    As many as `values`: a curve that diverges must not move later ones to the left.
    """
    smoothed = []
    for index in range(len(values)):
        known = [value for value in values[max(0, index - window + 1) : index + 1] if value is not None]
        smoothed.append(sum(known) / len(known) if known else math.nan)
    return smoothed


def thin(points: Sequence[svg.Point], most: int = _MOST_POINTS) -> tuple[svg.Point, ...]:
    """At most about `most` of the points, the last one included: more cannot be seen."""
    stride = max(1, len(points) // most)
    return (*points[:-1:stride], *points[-1:])


def _axes(across: svg.Scale, up: svg.Scale, x_label: str, y_label: str) -> list[str]:
    parts = []
    for value in svg.ticks(up.low, up.high):
        parts.append(svg.line(across.start, up(value), across.stop, up(value), "grid"))
        parts.append(svg.text(_LEFT - 8, up(value) + 4, svg.tick_text(value), "end"))
    parts += [
        svg.text(across(value), HEIGHT - _BOTTOM + 18, svg.tick_text(value), "middle")
        for value in svg.ticks(across.low, across.high, 6)
    ]
    parts.append(svg.line(across.start, up(0.0), across.stop, up(0.0), "axis"))
    parts.append(svg.text((across.start + across.stop) / 2, HEIGHT - 8, x_label, "middle", "name"))
    parts.append(svg.text(8, 16, y_label, "start", "name"))  # above the curves, not over them
    return parts


def _curve(curve: Series, across: svg.Scale, up: svg.Scale) -> list[str]:
    # Inf and NaN leave the plot at its top.
    places = [(across(x), max(up(y), _TOP) if math.isfinite(y) else _TOP) for x, y in curve.points]
    cut = len(places) if curve.dashed_from is None else curve.dashed_from
    solid = thin(places[:cut])
    parts = [svg.polyline(solid, f"curve {curve.class_}")] if solid else []
    if cut < len(places):
        parts.append(svg.polyline(thin(places[max(cut - 1, 0) :]), f"curve dashed {curve.class_}"))
    return parts


@dataclass(frozen=True)
class Part:
    """A piece of a stacked bar: seconds and the class of its colour."""

    name: str
    value: float
    class_: str


def stacked(rows: Sequence[tuple[str, Sequence[Part]]], label: str) -> str:
    """One bar per row, made of parts, with its total in seconds at the end."""
    longest = max((sum(part.value for part in parts) for _, parts in rows), default=0.0)
    left = _room(name for name, _ in rows)
    scale = svg.Scale(0.0, longest, 0.0, _WIDE - left - _VALUES)
    pieces: list[str] = []
    for index, (name, parts) in enumerate(rows):
        y = index * _ROW + 6
        pieces.append(svg.text(left - 12, y + _BAR_HEIGHT / 2 + 5, name, "end", "name"))
        x = left
        for part in parts:
            width = scale(part.value)
            pieces += _piece(x, y, width, part)
            x += width
        total = sum(part.value for part in parts)
        pieces.append(svg.text(x + 10, y + _BAR_HEIGHT / 2 + 5, seconds_text(total), "start", "name"))
    return svg.drawing(_WIDE, len(rows) * _ROW + 4, pieces, label)


def byte_pairs(rows: Sequence[tuple[str, float | None, float | None, str]]) -> str:
    """Name, bytes predicted, bytes counted, class: two thin bars each."""
    longest = max((value for row in rows for value in row[1:3] if value is not None), default=0.0)
    left = _room(row[0] for row in rows)
    scale = svg.Scale(0.0, longest, 0.0, _WIDE - left - 2.6 * _VALUES)
    pieces: list[str] = []
    for index, (name, predicted, counted, class_) in enumerate(rows):
        y = index * (_ROW + 10) + 6
        pieces.append(svg.text(left - 12, y + 24, name, "end", "name"))
        for offset, value, what, shade in (
            (0, predicted, "predicted", " pale"),
            (20, counted, "counted", ""),
        ):
            width = 0.0 if value is None else scale(value)
            if value is not None:
                pieces.append(svg.box(left, y + offset, width, 16, f"fill-{class_}{shade}"))
            words = "not counted" if value is None else f"{bytes_text(value)} {what}"
            pieces.append(svg.text(left + width + 10, y + offset + 13, words))
    return svg.drawing(_WIDE, len(rows) * (_ROW + 10) + 4, pieces, "bytes per step, predicted and counted")


def _room(names: Iterable[str]) -> float:
    """The width of a column of names: a character of the widest usual font takes 9 pixels."""
    return max([_NAMES, *(9.0 * len(name) + 16.0 for name in names)])


def _piece(x: float, y: float, width: float, part: Part) -> list[str]:
    words = seconds_text(part.value)
    pieces = (
        [svg.box(x, y, width, _BAR_HEIGHT, f"fill-{part.class_}", f"{part.name}: {words}")]
        if width > 0
        else []
    )
    if width >= _LEAST_LABEL:
        pieces.append(svg.text(x + width / 2, y + _BAR_HEIGHT / 2 + 5, words, "middle", "inside"))
    return pieces


Span = Mapping[str, Any]

_LANES = (
    ("backward", ("backward",)),
    ("encode, decode", ("encode", "decode")),
    ("on the wire", ("wire",)),
    ("waiting", ("wait",)),
)


def timeline(groups: Sequence[tuple[str, Sequence[Span]]]) -> str:
    """Lanes of spans per group; lanes without a span are left out. Time starts with the backward pass."""
    spans = [span for _, group in groups for span in group]
    if not spans:
        return svg.drawing(_WIDE, 40, [svg.text(8, 24, "nothing was recorded")], "timeline")
    # A forward-running clock can put an event a hair before backward starts.
    low = min(0.0, *(span["start_s"] for span in spans))
    high = max(span["stop_s"] for span in spans)
    across = svg.Scale(low, high, _LANE_NAMES, _WIDE - 16)
    pieces: list[str] = []
    y = 4.0
    for name, group in groups:
        pieces.append(svg.text(0, y + 14, name, "start", "name"))
        y += _LANE_GAP
        for lane, kinds in _LANES:
            mine = [span for span in group if span["what"] in kinds]
            if mine:
                pieces += _lane(lane, mine, across, y)
                y += _LANE
        y += 8
    pieces += _milliseconds(across, y)
    return svg.drawing(_WIDE, y + 40, pieces, "timeline of one step")


def _lane(name: str, spans: Sequence[Span], across: svg.Scale, y: float) -> list[str]:
    total = sum(span["stop_s"] - span["start_s"] for span in spans)
    pieces = [svg.text(_LANE_NAMES - 12, y + 15, f"{name}: {seconds_text(total)}", "end")]
    pieces.append(svg.line(_LANE_NAMES, y + _SPAN_HEIGHT / 2, across.stop, y + _SPAN_HEIGHT / 2, "grid"))
    for span in spans:
        start, stop = across(span["start_s"]), across(span["stop_s"])
        words = seconds_text(span["stop_s"] - span["start_s"])
        unit = f" {span['unit']}" if span["unit"] else ""
        pieces.append(
            svg.box(
                start, y, stop - start, _SPAN_HEIGHT, f"fill-{span['what']}", f"{span['what']}{unit}: {words}"
            )
        )
    return pieces


def _milliseconds(across: svg.Scale, y: float) -> list[str]:
    pieces = [svg.line(across.start, y, across.stop, y, "axis")]
    pieces += [
        svg.text(across(value / 1e3), y + 18, svg.tick_text(value), "middle")
        for value in svg.ticks(across.low * 1e3, across.high * 1e3, 10)
    ]
    middle = (across.start + across.stop) / 2
    return [*pieces, svg.text(middle, y + 36, "milliseconds since backward started", "middle", "name")]

"""Charts: lines (loss over steps and time), bars (parts of a step, bytes), and lanes (one step in time)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire_lab.bench.units import bytes_text, seconds_text
from gradwire_lab.report import svg

WIDTH, HEIGHT = 440.0, 300.0
"""Of one picture. Two stand beside each other on a screen, and one is as wide as a phone."""

WIDE = 760.0
"""The width of a chart that stands alone on a page."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 44.0, 12.0, 32.0, 42.0
_MOST_POINTS = 300
_SPOT_LINE, _BELOW, _ABOVE = 15.0, 19.0, 12.0
# Heights from top to bottom: a line of words, then a bar.
_WORDS, _BAR_HEIGHT, _LEAST_LABEL = 18.0, 24.0, 64.0
_ROW = _WORDS + _BAR_HEIGHT + 10.0
_THIN = 14.0
_SPAN_HEIGHT = 14.0
_LANE = _WORDS + _SPAN_HEIGHT + 2.0


@dataclass(frozen=True)
class Series:
    """A curve: `class_` names its colour; from `dashed_from` (an index) on it is drawn dashed."""

    points: tuple[svg.Point, ...]
    class_: str
    dashed_from: int | None = None


@dataclass(frozen=True)
class Band:
    """The range around a curve: (x, lowest, highest)."""

    points: tuple[tuple[float, float, float], ...]
    class_: str


@dataclass(frozen=True)
class Spot:
    """A point of a curve, with words beside it; `class_` is the curve's."""

    x: float
    y: float
    words: str
    class_: str


@dataclass(frozen=True)
class Mark:
    """A place on the horizontal axis, with words beside it."""

    x: float
    words: str


def line_chart(
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    bands: Sequence[Band] = (),
    marks: Sequence[Mark] = (),
    spots: Sequence[Spot] = (),
    width: float = WIDTH,
) -> str:
    """Chart of curves over common axes, as SVG. The vertical axis starts at 0 and leaves out the highest 2 %
    of values.

    Args:
        series: the curves.
        x_label, y_label: labels of the axes.
        bands: areas between two curves.
        marks: places on the horizontal axis, with words.
        spots: points with words.
        width: width in pixels.
    """
    points = [point for curve in series for point in curve.points if math.isfinite(point[1])]
    if not points:
        return svg.drawing(width, 40, [svg.text(8, 24, "nothing was measured")], y_label)
    heights = sorted(y for _, y in points)
    top = heights[int(0.98 * (len(heights) - 1))] * 1.08
    across = svg.Scale(0.0, max(x for x, _ in points), _LEFT, width - _RIGHT)
    up = svg.Scale(0.0, top, HEIGHT - _BOTTOM, _TOP)
    parts = _axes(across, up, x_label, y_label)
    for band in bands:
        parts += _band(band, across, up)
    for number, mark in enumerate(marks):
        parts += _mark(mark, across, number)
    for curve in series:
        parts += _curve(curve, across, up)
    parts += _spots(spots, across, up)
    return svg.drawing(width, HEIGHT, parts, f"{y_label} against {x_label}")


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


def _band(band: Band, across: svg.Scale, up: svg.Scale) -> list[str]:
    known = [point for point in band.points if math.isfinite(point[1]) and math.isfinite(point[2])]
    low = thin([(across(x), max(up(y), _TOP)) for x, y, _ in known])
    high = thin([(across(x), max(up(y), _TOP)) for x, _, y in known])
    return [svg.polygon([*low, *reversed(high)], f"band fill-{band.class_}")] if known else []


def _mark(mark: Mark, across: svg.Scale, number: int) -> list[str]:
    """Line from top to bottom at a mark, as SVG. Its words are at the side that has room, below those of the
    marks before, of which there are `number`.
    """
    x = across(mark.x)
    to_the_right = x < (across.start + across.stop) / 2
    place, anchor = (x + 5, "start") if to_the_right else (x - 5, "end")
    return [
        svg.line(x, _TOP, x, HEIGHT - _BOTTOM, "mark"),
        svg.text(place, _TOP + 12 + 16 * number, mark.words, anchor),
    ]


def _spots(spots: Sequence[Spot], across: svg.Scale, up: svg.Scale) -> list[str]:
    """Dots, as SVG, with their words in lines of their own: below the curves, or above where the axis is too
    near. `across` and `up` are the scales of the axes.
    """
    parts = []
    for line, spot in enumerate(spots):
        x, y = across(spot.x), up(spot.y)
        has_room = up(0.0) - y > _BELOW + _SPOT_LINE * (len(spots) - 1)
        place = y + _BELOW + _SPOT_LINE * line if has_room else y - _ABOVE - _SPOT_LINE * line
        anchor = "end" if x > (across.start + across.stop) / 2 else "start"
        parts += [svg.dot(x, y, 4.5, f"fill-{spot.class_}"), svg.text(x, place, spot.words, anchor, "name")]
    return parts


@dataclass(frozen=True)
class BarPart:
    """A piece of a stacked bar: seconds and the class of its colour."""

    name: str
    value: float
    class_: str


def stacked(rows: Sequence[tuple[str, float, Sequence[BarPart]]], label: str) -> str:
    """One bar per row, made of parts; its name and its whole in seconds are above it. Medians of parts do not
    add up to the median of the whole.
    """
    longest = max((sum(part.value for part in parts) for _, _, parts in rows), default=0.0)
    scale = svg.Scale(0.0, longest, 0.0, WIDTH)
    pieces: list[str] = []
    for index, (name, whole, parts) in enumerate(rows):
        y = index * _ROW
        pieces += _above(y, name, seconds_text(whole))
        x = 0.0
        for part in parts:
            width = scale(part.value)
            pieces += _piece(x, y + _WORDS, width, part)
            x += width
    return svg.drawing(WIDTH, len(rows) * _ROW, pieces, label)


def byte_pairs(rows: Sequence[tuple[str, float | None, float | None, str]]) -> str:
    """Name, bytes predicted, bytes counted, class: two thin bars each, below their names."""
    longest = max((value for row in rows for value in row[1:3] if value is not None), default=0.0)
    scale = svg.Scale(0.0, longest, 0.0, WIDTH)
    pieces: list[str] = []
    y = 0.0
    for name, predicted, counted, class_ in rows:
        for what, value, shade in (("predicted", predicted, " pale"), ("counted", counted, "")):
            words = "not counted" if value is None else f"{bytes_text(value)} {what}"
            pieces += _above(y, name if what == "predicted" else "", words)
            if value is not None:
                pieces.append(svg.box(0.0, y + _WORDS, scale(value), _THIN, f"fill-{class_}{shade}"))
            y += _WORDS + _THIN + 2
        y += 8
    return svg.drawing(WIDTH, y, pieces, "bytes per step, predicted and counted")


def _above(y: float, name: str, words: str) -> list[str]:
    """Line of words above a bar at height `y`, as SVG: `name` at the left, `words` at the right."""
    left = [svg.text(0.0, y + 13, name, "start", "name")] if name else []
    return [*left, svg.text(WIDTH, y + 13, words, "end", "name")]


def _piece(x: float, y: float, width: float, part: BarPart) -> list[str]:
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
    """Chart of steps as SVG: for each (name, spans) a lane per kind of work, without the kinds that have no
    span. Time starts with the backward pass.
    """
    spans = [span for _, group in groups for span in group]
    if not spans:
        return svg.drawing(WIDTH, 40, [svg.text(8, 24, "nothing was recorded")], "timeline")
    # A forward-running clock can put an event a hair before backward starts.
    low = min(0.0, *(span["start_s"] for span in spans))
    high = max(span["stop_s"] for span in spans)
    across = svg.Scale(low, high, 8.0, WIDTH - 8.0)
    pieces: list[str] = []
    y = 0.0
    for name, group in groups:
        pieces.append(svg.text(0.0, y + 14, name, "start", "name"))
        y += _WORDS
        for lane, kinds in _LANES:
            mine = [span for span in group if span["what"] in kinds]
            if mine:
                pieces += _lane(lane, mine, across, y)
                y += _LANE
        y += 10
    pieces += _milliseconds(across, y)
    return svg.drawing(WIDTH, y + 40, pieces, "timeline of one step")


def covered_s(spans: Sequence[Span]) -> float:
    """Seconds in which at least one span runs; overlaps count once.

    >>> covered_s([{"start_s": 0.0, "stop_s": 2.0}, {"start_s": 1.0, "stop_s": 3.0}])
    3.0
    """
    covered, until = 0.0, -math.inf
    for span in sorted(spans, key=lambda span: float(span["start_s"])):
        covered += max(0.0, span["stop_s"] - max(span["start_s"], until))
        until = max(until, span["stop_s"])
    return covered


def _lane(name: str, spans: Sequence[Span], across: svg.Scale, y: float) -> list[str]:
    pieces = [svg.text(across.start, y + 13, f"{name}: {seconds_text(covered_s(spans))}")]
    top = y + _WORDS
    pieces.append(svg.line(across.start, top + _SPAN_HEIGHT / 2, across.stop, top + _SPAN_HEIGHT / 2, "grid"))
    for span in spans:
        start, stop = across(span["start_s"]), across(span["stop_s"])
        words = seconds_text(span["stop_s"] - span["start_s"])
        unit = f" {span['unit']}" if span["unit"] else ""
        pieces.append(
            svg.box(
                start,
                top,
                stop - start,
                _SPAN_HEIGHT,
                f"fill-{span['what']}",
                f"{span['what']}{unit}: {words}",
            )
        )
    return pieces


def _milliseconds(across: svg.Scale, y: float) -> list[str]:
    pieces = [svg.line(across.start, y, across.stop, y, "axis")]
    pieces += [
        svg.text(across(value / 1e3), y + 18, svg.tick_text(value), "middle")
        for value in svg.ticks(across.low * 1e3, across.high * 1e3, 6)
    ]
    middle = (across.start + across.stop) / 2
    return [*pieces, svg.text(middle, y + 36, "milliseconds since backward started", "middle", "name")]

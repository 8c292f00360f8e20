"""Line charts: loss against steps and against time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.lab.report import svg

WIDTH, HEIGHT = 560.0, 330.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 14.0, 14.0, 46.0
_MOST_POINTS = 300


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
    parts.append(svg.text(_LEFT + 6, _TOP + 10, y_label, "start", "name"))
    return parts


def _curve(curve: Series, across: svg.Scale, up: svg.Scale) -> list[str]:
    # What is not a number any more leaves the picture at its top.
    places = [(across(x), max(up(y), _TOP) if math.isfinite(y) else _TOP) for x, y in curve.points]
    cut = len(places) if curve.dashed_from is None else curve.dashed_from
    solid = thin(places[:cut])
    parts = [svg.polyline(solid, f"curve {curve.class_}")] if solid else []
    if cut < len(places):
        parts.append(svg.polyline(thin(places[max(cut - 1, 0) :]), f"curve dashed {curve.class_}"))
    return parts

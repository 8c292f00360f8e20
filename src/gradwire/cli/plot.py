"""Points and lines over logarithmic axes, for a terminal and for a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gradwire.planning.links import Fit

WIDTH, HEIGHT = 64, 14
_MARKS = "o+x*#@%&"


@dataclass(frozen=True)
class Curve:
    """A fit with its name in the legend."""

    name: str
    fit: Fit


@dataclass(frozen=True)
class Axes:
    """The quantities on both axes, with units."""

    x: str
    y: str


def text_plot(curves: Sequence[Curve], axes: Axes, width: int = WIDTH, height: int = HEIGHT) -> str:
    """Plot of curves in characters, with logarithmic axes: points as a mark for each curve, fitted lines as
    dots.

    Args:
        curves: measured points (x, seconds) and the line fitted to each.
        axes: labels; seconds are labelled in milliseconds.
        width, height: size of the plane, in characters.

    >>> from gradwire.planning.links import straight_line
    >>> fit = straight_line([(1.0, 1e-3), (100.0, 1e-1)])
    >>> print(text_plot([Curve("wire", fit)], Axes("bytes", "ms"), width=9, height=3))
     100 |      ··o
         |  ·····
       1 |o··
          1 … 100 bytes, by ms;  o wire
    """
    points = [point for curve in curves for point in curve.fit.points]
    across = _Scale.over([x for x, _ in points], width)
    up = _Scale.over([seconds for _, seconds in points], height)
    grid = [[" "] * width for _ in range(height)]
    for curve in curves:
        for step in range(2 * width):
            x = across.low * (across.high / across.low) ** (step / (2 * width - 1))
            _put(grid, across(x), up(curve.fit.line(x)), "·")
    for mark, curve in zip(_MARKS * len(curves), curves, strict=False):
        for x, seconds in curve.fit.points:
            _put(grid, across(x), up(seconds), mark)
    labels = [f"{up.high * 1e3:.3g}", *[""] * (height - 2), f"{up.low * 1e3:.3g}"]
    margin = max(4, *map(len, labels))
    lines = [f"{label:>{margin}} |{''.join(row)}".rstrip() for label, row in zip(labels, grid, strict=True)]
    legend = "  ".join(
        f"{mark} {curve.name}" for mark, curve in zip(_MARKS * len(curves), curves, strict=False)
    )
    low, high = f"{across.low:.4g}", f"{across.high:.4g}"
    return "\n".join([*lines, f"{'':>{margin}}  {low} … {high} {axes.x}, by {axes.y};  {legend}"])


def draw(curves: Sequence[Curve], axes: Axes, title: str, path: Path) -> None:
    """Draw curves with logarithmic axes to the file `path`, with `title` above; its suffix decides on the
    format (svg, png, pdf). `curves` and `axes` are as in `text_plot`. Raises `ValueError` for an unknown
    suffix.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    plane = figure.subplots()
    for curve in curves:
        xs = [x for x, _ in curve.fit.points]
        (marks,) = plane.loglog(xs, [1e3 * seconds for _, seconds in curve.fit.points], "o", markersize=4)
        fine = [min(xs) * (max(xs) / min(xs)) ** (step / 99) for step in range(100)]
        plane.loglog(fine, [1e3 * curve.fit.line(x) for x in fine], color=marks.get_color(), label=curve.name)
    plane.set(xlabel=axes.x, ylabel=axes.y, title=title)
    plane.grid(visible=True, which="major", alpha=0.3)
    plane.legend(fontsize="small")
    figure.savefig(path)


@dataclass(frozen=True)
class _Scale:
    """Maps values in [low, high] to cells 0 … cells - 1, by their logarithm."""

    low: float
    high: float
    cells: int

    @classmethod
    def over(cls, values: Sequence[float], cells: int) -> _Scale:
        low, high = min(values), max(values)
        return cls(low, high if high > low else 2 * low, cells)

    def __call__(self, value: float) -> int:
        if value <= 0.0:
            return -1
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return round(share * (self.cells - 1))


def _put(grid: list[list[str]], column: int, row_from_below: int, mark: str) -> None:
    row = len(grid) - 1 - row_from_below
    if 0 <= row < len(grid) and 0 <= column < len(grid[0]):
        grid[row][column] = mark

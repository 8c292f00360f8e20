"""Straight lines through measured times.

The line minimises the sum of absolute *relative* deviations. Relative, because times of 2^6 and of 2^20
elements count alike; absolute, because a few disturbed measurements then pull at the line without moving it,
which least squares would let them do. (Edgeworth 1887: such a line passes through two of the points, so
trying all pairs finds it.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

from gradwire.planning.costs import Line

Point = tuple[float, float]
"""Size and seconds; sizes at least 0, seconds above 0."""


@dataclass(frozen=True)
class Fit:
    """A line and the points it was fitted to."""

    line: Line
    points: tuple[Point, ...]

    @property
    def deviations(self) -> tuple[float, ...]:
        """(line − measured) / measured, point by point."""
        return tuple((self.line(x) - seconds) / seconds for x, seconds in self.points)

    @property
    def residual(self) -> float:
        """The median of the absolute deviations; the worst is `max(map(abs, deviations))`."""
        return median(abs(deviation) for deviation in self.deviations)


def straight_line(points: Sequence[Point]) -> Fit:
    """The line B + γ·x, B and γ not negative, with the least sum of absolute relative deviations.

    A single size gives a line through the origin. Raises `ValueError` without points.

    >>> straight_line([(1.0, 3.0), (2.0, 5.0), (3.0, 70.0), (4.0, 9.0)]).line
    Line(base_s=1.0, slope_s=2.0)
    """
    if not points:
        raise ValueError("no points: nothing was measured")
    best = min(_candidates(points), key=lambda line: _cost(line, points))
    return Fit(best, tuple(points))


def _candidates(points: Sequence[Point]) -> Iterator[Line]:
    """All lines that can be the best: through two points, or through one where a bound is met."""
    for (x, s), (other_x, other_s) in combinations(points, 2):
        if x != other_x:
            slope = (other_s - s) / (other_x - x)
            base = s - slope * x
            if slope >= 0.0 and base >= 0.0:
                yield Line(base, slope)
    for x, s in points:
        if x > 0.0:
            yield Line(0.0, s / x)
        yield Line(s, 0.0)


def _cost(line: Line, points: Sequence[Point]) -> float:
    base_s, slope_s = line.base_s, line.slope_s
    return sum(abs(base_s + slope_s * x - s) / s for x, s in points)

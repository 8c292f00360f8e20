"""Estimator of a link's latency α and bandwidth 1/β from measured times. There is no other one.

1. A line through points (serial bytes of a collective, seconds) gives the time of no bytes and the time per
   byte. It minimises the sum of absolute *relative* deviations. Relative, so that a size of 2^6 and one of
   2^20 count alike. Absolute, so that a few disturbed measurements cannot move the line, as they would with
   least squares. (Edgeworth 1887: such a line passes through two of the points, so trying all pairs finds
   it.)
2. The number of hops of the collective turns the line into α and β.
3. The time of a whole dense gradient, if known, bounds β.

Points come from probes before a decision (`gradwire.measure.probe`), and from the collectives of a running
training (`gradwire.measure.link`). `gradwire.measure.connections` needs neither α nor β: it compares the
times of one message over more and fewer connections.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import inf
from statistics import median

from gradwire.planning.collectives import algorithm_of, hops
from gradwire.planning.costs import Line, Link, Network

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
    """All lines that may be optimal: through two points, or through one point if a bound is met."""
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


def link_of(verb: str, world: int, line: Line) -> Link:
    """α and β of a verb among `world` ranks, by the line through (serial bytes, seconds).

    >>> link_of("all_gather", 4, Line(base_s=3e-3, slope_s=1e-8))
    Link(alpha_s=0.001, beta_s=1e-08)
    """
    return Link(line.base_s / hops(verb, world), line.slope_s)


SLOWER = 2.0
"""Factor by which a byte may take longer in another collective than in an all-reduce on the same link."""


def calibrated(
    network: Network, dense_s: float, payload_bytes: float, collectives: int, world: int
) -> Network:
    """`network` with its bandwidth corrected by the time of a dense gradient, where probes contradict it.

    The dense gradient took `dense_s`, in `collectives` collectives of `payload_bytes` together. Probes are
    short. On a slow link they may pass through a shaper's burst or a switch's buffer, and report too high a
    bandwidth. So no link is faster per byte than the dense gradient was. A disturbed probe may report far too
    low a bandwidth. So if most of the dense gradient's time was spent on bytes, an all-reduce takes as long
    per byte as the gradient did, and every other collective at most `SLOWER` times as long. Latencies stay as
    probed: small messages measure them well.

    >>> probed = Network(Link(alpha_s=1e-3, beta_s=0.0))
    >>> calibrated(probed, dense_s=1.512, payload_bytes=1e8, collectives=2, world=4).link
    Link(alpha_s=0.001, beta_s=1e-08)
    """
    ring = algorithm_of("all_reduce")
    sending_s = dense_s - collectives * ring.messages(world) * network.of("all_reduce").alpha_s
    if not sending_s > 0.0 or not payload_bytes > 0.0:
        return network
    beta_s = sending_s / (ring.volume(world) * payload_bytes)

    mostly_bytes = sending_s > 0.5 * dense_s

    def bounded(link: Link, slower: float) -> Link:
        most_s = slower * beta_s if mostly_bytes else inf
        return replace(link, beta_s=min(max(link.beta_s, beta_s), most_s))

    links = {
        verb: bounded(link, 1.0 if verb == "all_reduce" else SLOWER)
        for verb, link in network.calibrated.items()
    }
    return Network(bounded(network.link, SLOWER), links)

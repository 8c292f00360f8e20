"""Detection of a changed link, from the times of the training's own collectives.

`LinkTraffic` adds four numbers about the previous step to every rank's row. Rounds of several units run at
once and share the wire, so no single time describes the link. But the step's last all-reduce, small and
alone, is pure latency; and the time with at least one round in flight carried the step's bytes. Both are
known when a step is over, and are sent with the next status vote. (If the status vote is sent together with
the last payload, every fifth step sends it alone for this purpose: see `votes_alone`.) Two more numbers
describe the load: bytes, because ranks may send frames of different lengths, and the number of consecutive
latencies. An all-gather has half as many as an all-reduce, and two consecutive rounds have those of both.

`LinkMonitor` receives (verb, payload, seconds) once per step, equal on all ranks, so all reach the same
result in the same step. Sizes fall into classes; a class keeps its last 15 steps. A line through the classes'
medians gives latency and bandwidth (`gradwire.planning.links`). The link has changed if the times of a class
deviate from the line by more than their spread (`gradwire.planning.change_detection`). The new line uses the
steps since the change, at first six.

It replaces iperf and traceroute beside the training (Tyagi and Swany 2023, "Flexible communication", section
3-E), which add traffic and measure single connections.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from gradwire.comm.base import Verb
from gradwire.measure.clock import RoundTime
from gradwire.planning.change_detection import THRESHOLD, WINDOW, ChangeDetector
from gradwire.planning.collectives import hops, serial_bytes, volume
from gradwire.planning.costs import Line, Link
from gradwire.planning.links import Point, link_of, straight_line


class Sample(NamedTuple):
    """A collective: bytes that each rank handed in, and the shortest duration over ranks."""

    verb: Verb
    payload_bytes: float
    seconds: float


@dataclass(frozen=True)
class Change:
    """A verb's link before a change and after it.

    It `is_resolved` if the largest message has 16 KiB at least, and its bytes took no less than its latency,
    before and after. Of smaller messages both numbers are little more than noise.
    """

    verb: Verb
    before: Link
    after: Link
    is_resolved: bool = True


_TELLING_BYTES = 1 << 14


class _Tracker:
    """State of one verb. `classes` hold (serial bytes, seconds) by half octaves of size, newest last.

    `line` goes through their medians. `levels` track each class's seconds over those of the line; empty while
    the line has fewer than 15 steps.
    """

    def __init__(self, threshold: float) -> None:
        self.line: Line | None = None
        self._threshold = threshold
        self._classes: dict[int, deque[Point]] = {}
        self._levels: dict[int, ChangeDetector] = {}

    @property
    def is_told(self) -> bool:
        """True if there is a line to compare times with."""
        return self.line is not None and bool(self._levels)

    def observe(self, points: list[Point]) -> tuple[Line, Line] | None:
        """Take one step's collectives. Returns the lines (until now, from now on) if the link has changed,
        else `None`.
        """
        found: dict[int, list[Point]] = {}
        for point in points:
            found.setdefault(round(2 * math.log2(point[0])), []).append(point)
        middles = {name: _middle(members) for name, members in found.items()}
        for name, point in middles.items():
            self._classes.setdefault(name, deque(maxlen=WINDOW)).append(point)
        if self.line is None or not self._levels:
            # A line through small ones alone would take their latency for bandwidth.
            if all(len(self._classes[name]) == WINDOW for name in middles):
                self._refer()
            return None
        moved = [name for name, point in middles.items() if self._level_of(name).add(self._off(point))]
        if not moved:
            return None
        before, since = self.line, max(self._levels[name].since for name in moved)
        for name, each in self._classes.items():
            self._classes[name] = deque(list(each)[-since:], maxlen=WINDOW)
        self._levels.clear()
        self.line = straight_line([_middle(list(each)) for each in self._classes.values()]).line
        return before, self.line

    def _refer(self) -> None:
        """Take the present measurements for the link."""
        full = {name: each for name, each in self._classes.items() if len(each) == WINDOW}
        self.line = straight_line([_middle(list(each)) for each in full.values()]).line
        for name, each in full.items():
            for point in each:
                self._level_of(name).add(self._off(point))

    def _level_of(self, name: int) -> ChangeDetector:
        return self._levels.setdefault(name, ChangeDetector(self._threshold))

    def _off(self, point: Point) -> float:
        assert self.line is not None, "there is one before there are levels"
        return point[1] / self.line(point[0])


class LinkMonitor:
    """Detector of collectives whose time changes by more than the share `threshold`.

    A doubled time is found after 6 steps with that size; 15 steps after its beginning, the next change can be
    found. If all payloads of a verb have one size, all of its time counts as bandwidth.

    >>> monitor = LinkMonitor(world=2)
    >>> seen = [monitor.observe([Sample("shift", 1e6, seconds)]) for seconds in [0.1] * 20 + [0.2] * 8]
    >>> [step for step, changes in enumerate(seen) if changes]
    [25]
    >>> round(seen[25][0].after.beta_s / seen[25][0].before.beta_s, 6)
    2.0
    """

    def __init__(self, world: int, threshold: float = THRESHOLD) -> None:
        ChangeDetector(threshold)  # refuses what is no share
        self._world, self._threshold = world, threshold
        self._trackers: dict[Verb, _Tracker] = {}

    def observe(self, samples: Iterable[Sample]) -> tuple[Change, ...]:
        """Take one step's collectives; those of no bytes or no time are left out."""
        by_verb: dict[Verb, list[Point]] = {}
        for verb, payload_bytes, seconds in samples:
            x = serial_bytes(verb, payload_bytes, self._world)
            if x > 0.0 and seconds > 0.0:
                by_verb.setdefault(verb, []).append((x, seconds))
        changes = []
        for verb, points in by_verb.items():
            lines = self._trackers.setdefault(verb, _Tracker(self._threshold)).observe(points)
            if lines is not None:
                before, after = (link_of(verb, self._world, line) for line in lines)
                largest = max(points)[0]
                resolved = all(largest * line.slope_s >= line.base_s for line in lines)
                changes.append(Change(verb, before, after, resolved and largest >= _TELLING_BYTES))
        return tuple(changes)

    def is_told(self, verb: Verb) -> bool:
        """True if the link of `verb` is known, and new times are compared with it."""
        tracker = self._trackers.get(verb)
        return tracker is not None and tracker.is_told

    @property
    def links(self) -> dict[Verb, Link]:
        """The estimated links by verb, of verbs that have been seen for 15 steps."""
        return {
            verb: link_of(verb, self._world, tracker.line)
            for verb, tracker in self._trackers.items()
            if tracker.line is not None
        }


def _middle(points: list[Point]) -> Point:
    if len(points) == 1:
        return points[0]
    # Half the time of `statistics.median`; this runs in every step.
    half = len(points) // 2
    return sorted([x for x, _ in points])[half], sorted([seconds for _, seconds in points])[half]


_ALONE_EVERY = 5
"""Interval, in steps, of status votes sent alone. A prime, so that units that take turns are met in all
phases.
"""


def votes_alone(step: int) -> bool:
    """True if the status vote of `step` follows its payloads although it need not: its time is the latency
    then.

    >>> [step for step in range(12) if votes_alone(step)]
    [4, 9]
    """
    return step % _ALONE_EVERY == _ALONE_EVERY - 1


Row = tuple[float, float, float, float]
NOTHING: Row = (0.0, 0.0, 0.0, 0.0)


class LinkTraffic:
    """Measurements of the link on one rank, and the conclusions of all. Call `note`, then `row` and `hear`.

    `world` ranks exchange gradients. `agreeing` ranks run the tail; these are more if ranks hold shards. The
    link has changed if the times of collectives change by the share `threshold`.
    """

    def __init__(self, world: int, agreeing: int | None = None, threshold: float = THRESHOLD) -> None:
        self.monitor = LinkMonitor(world, threshold)
        self._world, self._agreeing = world, agreeing or world
        self._volume = max(volume("all_reduce", world), 1e-9)
        """Payloads of an all-reduce that pass the busiest link."""
        self._tail_bytes = 0.0
        self._tail_s = 0.0
        """The shortest time, over ranks, of the last tail that was alone."""
        self.row: Row = NOTHING
        """Four numbers, 0 if unknown: seconds of the tail; seconds with other rounds in flight; payload of an
        all-reduce with as many bytes; number of consecutive latencies."""

    @property
    def link(self) -> Link | None:
        """The estimated link, once it has been seen for some steps; the same on all ranks."""
        return self.monitor.links.get("all_reduce")

    def note(self, rounds: Sequence[RoundTime]) -> None:
        """Take in all rounds of a step that has ended; the last one is the tail's."""
        *others, tail = rounds
        payload = sum([volume(each.verb, self._world) * each.payload_bytes for each in others]) / self._volume
        alone = all(each.stop_s is not None and each.stop_s <= tail.start_s for each in others)
        # The library's all-reduce of `world` ranks with as many bytes to a latency as the tail has.
        longer = hops("all_reduce", self._world) / max(hops(tail.verb, self._agreeing), 1)
        self._tail_bytes = longer * serial_bytes(tail.verb, tail.payload_bytes, self._agreeing) / self._volume
        busy_s, waits = under_way(others, self._world)
        self.row = (longer * tail.seconds if alone else 0.0, busy_s, payload, waits)

    def forget(self) -> None:
        """The step broke off: of it nothing is known here."""
        self.row, self._tail_bytes = NOTHING, 0.0

    def hear(self, rows: Iterable[Sequence[float]]) -> tuple[Change, ...]:
        """Take every rank's `row` from a status vote. Returns the changes found, the same on all ranks.

        A tail alone is pure latency. Without a payload beside it, nothing is known of the link.
        """
        tails, busy, payloads, waits = zip(*rows, strict=True)
        if not min(busy) > 0.0 or not fmean(payloads) > 0.0:
            return ()
        tail_s = min(tails)
        if not tail_s > 0.0 and self._tail_s > 0.0 and not self.monitor.is_told("all_reduce"):
            return ()  # a line through payloads alone would take their latency for bandwidth
        self._tail_s = tail_s or self._tail_s
        # Converted to the time of an all-reduce, so that one line fits both.
        more = 1.0 - fmean(waits) / max(hops("all_reduce", self._world), 1)
        samples = (self._tail_bytes, tail_s), (fmean(payloads), min(busy) + more * self._tail_s)
        return self.monitor.observe(Sample("all_reduce", payload, seconds) for payload, seconds in samples)


def under_way(rounds: Sequence[RoundTime], world: int) -> tuple[float, float]:
    """Seconds with at least one round in flight, and the number of consecutive latencies.

    Overlapping rounds share the longest wait among them.

    >>> spans = [(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)]
    >>> under_way([RoundTime("all_gather", 1, start_s, stop_s) for start_s, stop_s in spans], world=4)
    (4.0, 6.0)
    """
    total, waits, longest, until_s = 0.0, 0.0, 0.0, float("-inf")
    for each in sorted(rounds, key=lambda each: each.start_s):
        if each.start_s >= until_s:
            waits, longest = waits + longest, 0.0
        longest = max(longest, hops(each.verb, world))
        stop_s = each.start_s + each.seconds
        total += max(stop_s - max(each.start_s, until_s), 0.0)
        until_s = max(until_s, stop_s)
    return total, waits + longest

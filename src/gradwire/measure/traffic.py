"""What a step tells about the link: four numbers in every rank's row, about the step before.

Rounds of several units are under way at once and share the wire, so none of their times is its own. But the
step's last all-reduce, small and alone, is all latency, and the time in which anything was under way carried
the step's bytes. Both are there when a step is over, and so ride on the next verdict. With them go the bytes,
because ranks may send frames of different lengths, and how many latencies followed upon each other: an
all-gather has half as many as an all-reduce, and two rounds in a row have those of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from gradwire.measure.clock import RoundTime
from gradwire.measure.monitor import Change, LinkMonitor, Sample
from gradwire.measure.pattern import hops, serial_bytes
from gradwire.planning.costs import Link

Row = tuple[float, float, float, float]
NOTHING: Row = (0.0, 0.0, 0.0, 0.0)


class Traffic:
    """One rank's view of its step, and what all of them make of it. Call `note`, then `row` and `hear`."""

    def __init__(self, world: int) -> None:
        self.monitor = LinkMonitor(world)
        self._world = world
        self._tail_bytes = 0.0
        self.row: Row = NOTHING
        """Seconds of the tail, seconds in which the rest was under way, the payload of an all-reduce that
        would carry as much as the rest, and the rest's latencies in a row; 0 for what nobody can tell."""

    @property
    def link(self) -> Link | None:
        """What the link is taken to be, once it has been seen for some steps; the same on all ranks."""
        return self.monitor.links.get("all_reduce")

    def note(self, rounds: Sequence[RoundTime]) -> None:
        """Take in all rounds of a step that has ended; the last one is the tail's."""
        *others, tail = rounds
        carried = sum(serial_bytes(each.verb, each.payload_bytes, self._world) for each in others)
        payload = carried / max(serial_bytes("all_reduce", 1.0, self._world), 1e-9)
        alone = all(each.stop_s is not None and each.stop_s <= tail.start_s for each in others)
        self._tail_bytes = float(tail.payload_bytes)
        busy_s, waits = under_way(others, self._world)
        self.row = (tail.seconds if alone else 0.0, busy_s, payload, waits)

    def forget(self) -> None:
        """The step broke off: of it nothing is known here."""
        self.row, self._tail_bytes = NOTHING, 0.0

    def hear(self, rows: Iterable[Sequence[float]]) -> tuple[Change, ...]:
        """Every rank's `row`, as a verdict has carried them; what follows is the same on all ranks.

        A tail by itself is all latency, so without a payload beside it nothing is known of the link.
        """
        tails, busy, payloads, waits = zip(*rows, strict=True)
        if not min(busy) > 0.0 or not fmean(payloads) > 0.0:
            return ()
        # As long as an all-reduce would have taken, so that one line goes through both.
        more = 1.0 - fmean(waits) / max(hops("all_reduce", self._world), 1)
        samples = (self._tail_bytes, min(tails)), (fmean(payloads), min(busy) + more * min(tails))
        return self.monitor.observe(Sample("all_reduce", payload, seconds) for payload, seconds in samples)


def under_way(rounds: Sequence[RoundTime], world: int) -> tuple[float, float]:
    """Seconds in which at least one of the rounds was under way, and how many latencies were in a row.

    Rounds that overlap share the longest wait among them.

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

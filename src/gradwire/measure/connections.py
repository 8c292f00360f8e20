"""How many connections a link needs: found once, before training, by messages between neighbours.

A connection of TCP carries at most its window in a round trip: 4 MB, Linux's default, in 50 ms are 640
Mbit/s, and some hosts allow less. Where a round trip is short no window is the limit, and nothing more is
sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from gradwire.comm.base import Comm
from gradwire.measure.clock import now_s
from gradwire.measure.probe import slowest
from gradwire.planning.costs import LONG_S

MOST = 8
"""Connections at most. Each takes a process group: sockets, threads, and about ten round trips to make it."""

GAIN = 0.9
"""Twice as many connections must bring a message in less than this share of the time. Where the link itself
is the limit they bring nothing, and would only take more of it from others."""

TRIED_BYTES = tuple(2**power for power in range(18, 23))
TRIED_TRIPS, TRIED_S = 8, 0.2
"""The message that is tried is the first of `TRIED_BYTES` that takes one connection so many round trips, and
seconds. In less, latency hides the window."""

_READINGS, _MORE = 3, 2
"""Readings of a message, and how many more if those are on both sides of the bound in question. So the median
of five is on the same side. Lengths that only lead to the one that is tried have one reading."""
_READINGS_S = 2.0
"""Messages that take longer have fewer readings, so that these take about as long together. What disturbs a
message is little beside it then."""

_TRIPS, _BATCHES, _TRIPS_S = 5, 5, 0.25
"""A rank that waits for its processor looks far away. So many times in a row it seldom does, and not for so
many seconds."""


@dataclass(frozen=True)
class Tried:
    """The longest round trip between neighbours, and how long a message took over how many connections.

    `times_s` is empty where the round trip is short.
    """

    round_trip_s: float
    payload_bytes: int
    times_s: dict[int, float]
    connections: int

    def __str__(self) -> str:
        times = ", ".join(f"{seconds:.2f} s over {count}" for count, seconds in self.times_s.items())
        message = f": {self.payload_bytes / 1e6:.2g} MB took {times}" if times else ""
        trip = f"round trip of {self.round_trip_s * 1e3:.1f} ms"
        return f"connections per link: {self.connections} ({trip}{message})"


def tried(over: Callable[[int], Comm | None], control: Comm, clock: Callable[[], float] = now_s) -> Tried:
    """Try 1, 2, 4 … connections, as long as more of them gain. The same result on every rank; a collective.

    `over(count)` is the comm whose messages take so many, or `None`, on all ranks, where there cannot be as
    many. Ranks tell each other times over `control`. The slowest link counts: ranks of one site may be near
    each other and far from those of another.

    Five messages of a number, and 8 bytes per rank where round trips are short and ranks have their
    processors. Where they are long, two seconds and a message for each number of connections, and the time in
    which these are made.
    """
    one, payload_bytes = over(1), 0
    assert one is not None, "there is one connection"
    trip_s, times_s = round_trip_s(one, control, clock), dict[int, float]()
    if trip_s < LONG_S:
        return Tried(trip_s, payload_bytes, times_s, 1)
    enough_s = max(TRIED_TRIPS * trip_s, TRIED_S)
    for payload_bytes in TRIED_BYTES:
        first = _times(one, payload_bytes, 1, control, clock)
        if first[0] >= enough_s or payload_bytes == TRIED_BYTES[-1]:
            times_s[1] = _median_s(one, payload_bytes, enough_s, first[0], control, clock, first)
            if times_s[1] >= enough_s:
                break
    count = 1
    while count < MOST and (more := over(2 * count)) is not None:
        bound_s = GAIN * times_s[count]
        times_s[2 * count] = _median_s(more, payload_bytes, bound_s, times_s[count], control, clock)
        if times_s[2 * count] > bound_s:
            break
        count *= 2
    return Tried(trip_s, payload_bytes, times_s, count)


def round_trip_s(comm: Comm, control: Comm, clock: Callable[[], float] = now_s) -> float:
    """The longest round trip between neighbours, told by the slowest of all ranks. A collective.

    gloo announces a receive before it sends, so that a message takes a round trip.
    """
    trips_s = list[float]()
    for _ in range(_BATCHES):
        trips_s += _times(comm, 4, _TRIPS, control, clock)
        if min(trips_s) < LONG_S or sum(trips_s) >= _TRIPS_S:
            break
    return min(trips_s)


def _median_s(
    comm: Comm,
    payload_bytes: int,
    bound_s: float,
    about_s: float,
    control: Comm,
    clock: Callable[[], float],
    first: Sequence[float] = (),
) -> float:
    """How long a message takes, of which one takes `about_s`: the median, of few readings if all are below
    `bound_s` or none. Some of them may have been taken `first`."""
    readings = min(_READINGS, max(1, int(_READINGS_S / about_s)))
    times_s = [*first, *_times(comm, payload_bytes, readings - len(first), control, clock)]
    if readings == _READINGS and len({each < bound_s for each in times_s}) == 2:
        times_s += _times(comm, payload_bytes, _MORE, control, clock)
    return median(times_s)


def _times(
    comm: Comm, payload_bytes: int, messages: int, control: Comm, clock: Callable[[], float]
) -> list[float]:
    """How long the slowest rank took for each of several messages to the next one."""
    if messages == 0:
        return []
    sent = torch.zeros(payload_bytes // 4, device="cpu")
    received, seconds = torch.empty_like(sent), []
    for _ in range(messages):
        start_s = clock()
        comm.shift(received, sent).wait()
        seconds.append(clock() - start_s)
    return slowest(control, seconds)

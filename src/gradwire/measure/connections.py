"""Number of connections that a link needs, measured once before training by messages between neighbours.

A TCP connection carries at most one window per round trip. Linux's default of 4 MB in 50 ms is 640 Mbit/s,
and some hosts allow less. If the round trip is short, the window is no limit, and nothing more is sent.
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
"""Share of the time below which a message must arrive over twice as many connections. If the link itself is
the limit, more connections gain nothing, and would only take more of it from others."""

TRIED_BYTES = tuple(2**power for power in range(18, 23))
TRIED_TRIPS, TRIED_S = 8, 0.2
"""Least duration of a trial message over one connection, in round trips and in seconds. The first of
`TRIED_BYTES` that reaches both is used. In shorter messages, latency hides the window."""

_READINGS, _MORE = 3, 2
"""Number of readings of a message, and of additional ones if the first are on both sides of the bound. The
median of five is then on the right side. Sizes on the way to the trial message have one reading."""
_READINGS_S = 2.0
"""Seconds for all readings of a message. Longer messages have fewer readings; disturbances matter less to
them."""

_TRIPS, _BATCHES, _TRIPS_S = 5, 5, 0.25
"""Round trips in a batch, number of batches, and their seconds. A rank that waits for its processor looks far
away, but seldom does so in all of these."""


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

    `over(count)` returns a comm with `count` connections per message, or `None` on all ranks if that is not
    possible. Ranks report times over `control`. The slowest link counts: ranks of one site may be near each
    other and far from those of another.

    Cost: if round trips are short and ranks have their processors, five messages of a number, and 8 bytes per
    rank. If they are long, two seconds and one message per number of connections, and the time to make the
    connections.
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
    """Measure the longest round trip between neighbours on `comm`, in seconds, over all ranks. A collective.

    gloo announces a receive before it sends, so a message takes a round trip. `control` carries the times,
    and `clock` returns the present time in seconds.
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
    """Median seconds of a message of `payload_bytes` that takes about `about_s`. Few readings suffice if all
    or none are below `bound_s`. `first` has readings taken before; the other arguments are as in `_times`.
    """
    readings = min(_READINGS, max(1, int(_READINGS_S / about_s)))
    times_s = [*first, *_times(comm, payload_bytes, readings - len(first), control, clock)]
    if readings == _READINGS and len({each < bound_s for each in times_s}) == 2:
        times_s += _times(comm, payload_bytes, _MORE, control, clock)
    return median(times_s)


def _times(
    comm: Comm, payload_bytes: int, messages: int, control: Comm, clock: Callable[[], float]
) -> list[float]:
    """Time messages to the next rank. A collective.

    Args:
        comm: carries the messages.
        payload_bytes: bytes of a message.
        messages: how many are sent, one after another.
        control: carries the times.
        clock: returns the present time in seconds.

    Returns the seconds of the slowest rank, for each message.
    """
    if messages == 0:
        return []
    sent = torch.zeros(payload_bytes // 4, dtype=torch.float32, device="cpu")
    received, seconds = torch.empty_like(sent), []
    for _ in range(messages):
        start_s = clock()
        comm.shift(received, sent).wait()
        seconds.append(clock() - start_s)
    return slowest(control, seconds)

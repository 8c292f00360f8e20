"""Model of a step's time, used by `plan`, `simulate`, `auto`, MergeComp's boundaries and the report.

Three resources run in parallel, each with one job at a time: the backward pass; the worker, which takes jobs
in the order in which they were posted; and the network, which takes collectives in the order in which they
were issued. `step_time` runs the units of a step through the three. So overlap of units is COVAP's equation 3
(Meng et al. 2023, section II-B). If the codec holds up the backward pass instead (`held_up`), the same
function is MergeComp's F (Wang et al. 2021, equation 7).

A `Forecast` is the predicted step of a recipe: the mean over the steps of its cycle, and at least the
processor time of all work in the step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate
from statistics import fmean
from typing import NamedTuple

from gradwire.planning.costs import ENOUGH, FREE, BackwardTiming, CodecCost, Cores, Line


class Sent(NamedTuple):
    """A collective of `seconds` after its start-up, for the last `latency_s` of which the network is free."""

    seconds: float
    latency_s: float = 0.0
    startup_s: float = 0.0


class UnitWork(NamedTuple):
    """A unit of `numel` elements, ready `ready_s` after the start of the backward pass, and its collectives.

    In a step without collectives, the unit rests and costs nothing.
    """

    ready_s: float
    numel: int
    sent: tuple[Sent, ...]


class Tail(NamedTuple):
    """The step's last collective, which carries the status vote; it waits for every decode, or goes at once.

    `beside` goes out when the backward pass ends, and waits for nothing.
    """

    vote: Sent
    waits: bool = True
    beside: Sent | None = None


Work = tuple[float, int, tuple[tuple[float, float, float], ...]]
"""A `UnitWork`, or a tuple of the same numbers where there are thousands."""


def step_time(
    units: Iterable[Work],
    backward_s: float,
    codec: CodecCost = FREE,
    decodes: float = 1.0,
    tail: Tail | None = None,
) -> float:
    """Seconds from the start of a backward pass of `backward_s` to the end of its step.

    Args:
        units: in the agreed order, with ascending ready times.
        codec: the cost of a unit. Encoding includes the worker's preparation, such as adding the gradient to
            the memory.
        decodes: number of payloads that a unit decodes: N after an all-gather, 1 if ranks decode the sum.
        tail: the last collective of the step; `None` leaves it out.

    >>> units = [UnitWork(ready_s, 1, (Sent(1.5),)) for ready_s in (1.0, 2.0)]
    >>> codec = CodecCost(encode=Line(0.25, 0.0), decode=Line(0.5, 0.0))
    >>> step_time(units, 2.0, codec), step_time(units, 2.0, codec, tail=Tail(Sent(0.25)))
    (4.75, 5.0)
    """
    encode_s, encode_element_s = codec.encode.base_s, codec.encode.slope_s
    decode_s, decode_element_s = codec.decode.base_s, codec.decode.slope_s
    worker_s = wire_s = issued_s = landed_s = 0.0  # when worker and network are free; last issue, last end
    arrived: list[tuple[float, float]] = []  # a heap: when a unit's last round ends, and its decoding

    # A search for boundaries calls this thousands of times, and `max` takes three times as long as a
    # condition.
    for ready_s, numel, sent in units:
        if not sent:
            continue
        # 1. The worker takes jobs as they were posted: it decodes what came back before the unit was ready.
        while arrived and arrived[0][0] < ready_s:
            posted_s, seconds = heappop(arrived)
            worker_s = (worker_s if worker_s > posted_s else posted_s) + seconds
        # 2. It encodes the unit, issues its collectives, and waits for all but the last one.
        ended_s = (worker_s if worker_s > ready_s else ready_s) + encode_s + encode_element_s * numel
        for seconds, latency_s, startup_s in sent:
            # 3. The network starts a collective when it is free, and overlaps it with the last bytes in
            # flight.
            worker_s = ended_s
            ended_s = (wire_s if wire_s > worker_s else worker_s) + startup_s + seconds
            wire_s = ended_s - latency_s
        issued_s, landed_s = worker_s, (landed_s if landed_s > ended_s else ended_s)
        # 4. The end of the last round posts the decoding.
        heappush(arrived, (ended_s, decodes * (decode_s + decode_element_s * numel)))
    while arrived:
        posted_s, seconds = heappop(arrived)
        worker_s = max(worker_s, posted_s) + seconds

    # 5. The tail ends the step. One that waits for no decoding goes out after the last unit.
    if tail is None:
        return max(backward_s, worker_s, landed_s)
    if tail.beside is not None:
        ended_s = max(backward_s, issued_s, wire_s) + tail.beside.seconds
        wire_s = ended_s - tail.beside.latency_s
        landed_s = max(landed_s, ended_s)
    ended_s = max(backward_s, worker_s, landed_s)
    vote_s = ended_s if tail.waits else max(backward_s, issued_s)
    return max(ended_s, max(vote_s, wire_s) + tail.vote.seconds)


def held_up(units: Iterable[Work], backward_s: float, compress: Line) -> tuple[list[Work], float]:
    """The units and the backward pass, delayed by a codec that holds up the latter, as on one GPU stream.

    `compress` is the cost of encoding and decoding. Both precede the sending of a unit (MergeComp, Wang et
    al. 2021, equation 7), so that everything that is ready later is delayed by it.

    >>> units = [UnitWork(1.0, 1, (Sent(1.5),))]
    >>> held_up(units, 2.0, Line(0.75, 0.0))[1], step_time(*held_up(units, 2.0, Line(0.75, 0.0)))
    (2.75, 3.25)
    """
    held_s, found = 0.0, []
    for ready_s, numel, sent in units:
        held_s += compress(numel)
        found.append((ready_s + held_s, numel, sent))
    return found, backward_s + held_s


def ready_of_element(backward: BackwardTiming) -> Callable[[int], float]:
    """A function from a number of leading elements to the time when all of them are ready; 0 for none."""
    ends = list(accumulate(backward.numel))
    latest = list(accumulate(backward.ready_s, max))

    def ready_s(leading: int) -> float:
        return latest[min(bisect_left(ends, leading), len(latest) - 1)] if leading > 0 and latest else 0.0

    return ready_s


CALL_S = 1e-3
"""Processor time of one collective on busy cores: waking a thread, and the library. Measured with two ranks
that fill two cores; less if cores are free."""

BYTE_S = 0.7e-9
"""Processor time per byte that a rank sends and receives, in the library and in the kernel. Measured with DDP
on four ranks (77 ms for 108 MB)."""

MOST_DEAR = 4.0
"""Times the assumed processor time, at most, that collectives are believed to take. Another thread of the
process may have been at work while it was measured."""


def sending_s(calls: float, wire_bytes: float) -> float:
    """Assumed processor time, in seconds, of `calls` collectives in which a rank sends `wire_bytes`."""
    return CALL_S * calls + BYTE_S * wire_bytes


def overhead_factor(measured_s: float, calls: float, wire_bytes: float) -> float:
    """Measured processor time of collectives as a multiple of the assumed one (`sending_s`), at most
    `MOST_DEAR`; 1 if nothing was measured.

    `measured_s`, `calls` and `wire_bytes` are seconds, collectives and bytes of one step.

    >>> overhead_factor(0.004, 2, 0.0), overhead_factor(1.0, 2, 0.0), overhead_factor(0.0, 2, 0.0)
    (2.0, 4.0, 1.0)
    """
    assumed_s = sending_s(calls, wire_bytes)
    return min(measured_s / assumed_s, MOST_DEAR) if measured_s > 0.0 and assumed_s > 0.0 else 1.0


@dataclass(frozen=True)
class Forecast:
    """Prediction for one recipe on one network: its units in each step of its cycle, and the cost of its
    codec.

    - `decodes`: payloads that a unit decodes: N after an all-gather, 1 if ranks decode the sum.
    - `wire_bytes`: bytes sent per rank and step. `node_bytes`: bytes over the busiest node's link; 0 if there
      is one node. `calls`: number of collectives. All are means over the cycle. The status vote's time
      counts, its bytes do not.
    - `memory_bytes`: memory beyond DDP's: planes, and at most what the all-gathers of a step receive.
    - `at_most`: True if the bytes include an announced upper bound.
    - `cores`: shared by encoding, decoding and collectives with the computation.
    """

    backward: BackwardTiming
    cycle: tuple[tuple[UnitWork, ...], ...]
    tail: Tail
    wire_bytes: float
    node_bytes: float
    memory_bytes: float
    at_most: bool
    calls: float = 0.0
    codec: CodecCost = FREE
    decodes: float = 1.0
    cores: Cores = ENOUGH

    @property
    def compute_s(self) -> float:
        """The step without communication."""
        return self.backward.before_s + self.backward.total_s

    @cached_property
    def _usual_step_s(self) -> float:
        return self._step_s(1.0)

    def step_s(self, slowed: float = 1.0) -> float:
        """Mean seconds of a step, if the slowest rank computes `slowed` times as long.

        All ranks encode at the same time, so codecs take longer if a rank has less than a core. A step takes
        at least the processor time of all its work.
        """
        return self._usual_step_s if slowed == 1.0 else self._step_s(slowed)

    def _step_s(self, slowed: float) -> float:
        backward_s, before_s = slowed * self.backward.total_s, slowed * self.backward.before_s
        codec = self.codec.slowed(1.0 / self.cores.pace)
        took_s = [
            step_time(_later(units, slowed), backward_s, codec, self.decodes, self.tail)
            for units in self.cycle
        ]
        return before_s + max(fmean(took_s), self.cores.least_s(backward_s, self.work_s))

    @property
    def coded_s(self) -> float:
        """Processor time of encoding and decoding in a step."""
        encode, decode = self.codec.encode, self.codec.decode
        return fmean(
            sum(encode(numel) + self.decodes * decode(numel) for _, numel, sent in units if sent)
            for units in self.cycle
        )

    @property
    def work_s(self) -> float:
        """Processor time beside the computation: encoding, decoding, and what calls and bytes take."""
        return self.coded_s + self.cores.overhead_factor * sending_s(self.calls, self.wire_bytes)

    def coded(self, codec: CodecCost) -> Forecast:
        """Copy of this forecast with other costs of encoding and decoding."""
        return replace(self, codec=codec)


def _later(units: Sequence[UnitWork], slowed: float) -> Sequence[UnitWork]:
    """The units of a backward pass that takes `slowed` times as long."""
    return [unit._replace(ready_s=slowed * unit.ready_s) for unit in units] if slowed != 1.0 else units

"""Predicts how long a step takes: simulates the engine with given ready times, codec costs and links.

Three things work side by side, each at one job at a time: the backward pass; the ordered worker, which
takes jobs in the order in which they were posted; and the network, which takes collectives in the order
in which they were issued. While the last bytes of a collective are under way, for its latency, the network is
free for the next. A unit that has become ready is encoded, its rounds are issued, and the worker
waits for all of them but the last; the end of that one posts the decoding. When everything is decoded the
tail goes out, and the step ends with it. Overlapping of units is therefore COVAP's equation 3 (Meng et
al. 2023, section II-B).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate
from typing import Literal, NamedTuple

from gradwire.planning.collectives import Sends, time_of
from gradwire.planning.costs import BackwardTiming, CodecCost, Line, Network

FREE = CodecCost(Line(0.0, 0.0), Line(0.0, 0.0))
"""A codec that takes no time."""

What = Literal["backward", "encode", "wire", "decode"]


@dataclass(frozen=True)
class UnitWork:
    """One unit of a step: ready `ready_s` after the backward pass has begun, then these collectives.

    `codec.encode` includes what the worker does before it, such as folding the gradient into the memory.
    `decodes` is how many payloads of the whole unit are decoded: N after an all-gather, 1 where ranks
    decode what has been summed, one more where error feedback decodes the own payload separately.
    """

    ready_s: float
    numel: int
    rounds: tuple[Sends, ...]
    codec: CodecCost = FREE
    decodes: float = 1.0

    @property
    def encode_s(self) -> float:
        """Seconds on the worker before the first round."""
        return self.codec.encode(self.numel)

    @property
    def decode_s(self) -> float:
        """Seconds on the worker after the last round."""
        return self.decodes * self.codec.decode(self.numel)


@dataclass(frozen=True)
class Tail:
    """The step's last collective, which carries the verdict; it waits for every decode, or goes at once.

    `beside` goes out when the backward pass ends, and waits for nothing.
    """

    round: Sends
    waits: bool = True
    beside: Sends | None = None


class PredictedSpan(NamedTuple):
    """A span of work, in seconds from the beginning of the step; `unit` is -1 for work without a unit."""

    what: What
    unit: int
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class Prediction:
    """A step of `step_s`. It takes `compute_s` without any communication, and `exposed_s` more with it."""

    step_s: float
    compute_s: float
    spans: tuple[PredictedSpan, ...]

    @property
    def exposed_s(self) -> float:
        """Seconds that communication and codec add to the step."""
        return self.step_s - self.compute_s

    def busy_s(self, what: What) -> float:
        """Seconds that all spans of a kind take together."""
        return sum(span.stop_s - span.start_s for span in self.spans if span.what == what)

    @property
    def share_of_linear(self) -> float:
        """Speed as a share of the same step's without communication."""
        return self.compute_s / self.step_s if self.step_s > 0 else 1.0


def predict(
    units: Sequence[UnitWork],
    backward_s: float,
    world: int,
    network: Network,
    *,
    before_s: float = 0.0,
    tail: Tail | None = None,
) -> Prediction:
    """The step of `units` in the agreed order, ready times ascending.

    `before_s` passes before the backward pass of `backward_s` begins. Units without rounds rest: they
    cost nothing.

    >>> from gradwire.planning.collectives import Transfer
    >>> from gradwire.planning.costs import Link
    >>> units = [UnitWork(at, 1, (Transfer("shift", 1.0),)) for at in (1.0, 2.0)]
    >>> predict(units, 2.0, 2, Network(Link(alpha_s=0.5, beta_s=1.0)), before_s=1.0).step_s
    5.0
    """
    stage = _Stage(lambda sent: time_of(sent, world, network))
    worker = _run(units, stage)
    compute_s = before_s + backward_s
    if tail is not None and tail.beside is not None:
        stage.wire(-1, tail.beside, max(backward_s, stage.issued_s))
    ended_s = max(backward_s, worker, stage.landed_s)
    if tail is not None:
        # A tail that waits for no decode goes out with the last unit, after it on the wire.
        issued_s = ended_s if tail.waits else max(backward_s, stage.issued_s)
        stage.wire(-1, tail.round, issued_s)
        ended_s = max(ended_s, stage.landed_s)
    backward = PredictedSpan("backward", -1, before_s, compute_s)
    spans = (
        PredictedSpan(what, unit, before_s + start, before_s + stop)
        for what, unit, start, stop in stage.spans
    )
    return Prediction(before_s + ended_s, compute_s, (backward, *spans))


@dataclass
class _Stage:
    """The network and the spans so far; times count from the beginning of the backward pass."""

    seconds_of: Callable[[Sends], float]
    wire_free_s: float = 0.0
    landed_s: float = 0.0
    issued_s: float = 0.0
    spans: list[PredictedSpan] = field(default_factory=list)

    def wire(self, unit: int, sent: Sends, issued_s: float) -> float:
        """The end of a collective that is issued now."""
        start_s = max(issued_s, self.wire_free_s)
        stop_s = start_s + self.seconds_of(sent)
        self.wire_free_s = stop_s - getattr(sent, "latency_s", 0.0)
        self.landed_s = max(self.landed_s, stop_s)
        self.spans.append(PredictedSpan("wire", unit, start_s, stop_s))
        return stop_s

    def work(self, what: What, unit: int, start_s: float, seconds: float) -> float:
        """The end of local work that starts now."""
        if seconds > 0.0:
            self.spans.append(PredictedSpan(what, unit, start_s, start_s + seconds))
        return start_s + seconds

    def start(self, number: int, unit: UnitWork, start_s: float) -> tuple[float, float]:
        """Encode and issue; when the worker is free again, and when the last round will have ended."""
        now_s = self.work("encode", number, start_s, unit.encode_s)
        for waited in unit.rounds[:-1]:
            now_s = self.wire(number, waited, now_s)
        self.issued_s = now_s
        return now_s, self.wire(number, unit.rounds[-1], now_s)


def _run(units: Sequence[UnitWork], stage: _Stage) -> float:
    """All units through worker and wire; returns when the worker has done its last job."""
    arrivals = deque((number, unit) for number, unit in enumerate(units) if unit.rounds)
    ended: list[tuple[float, int]] = []  # a heap
    free_s = 0.0
    while arrivals or ended:
        # Jobs are taken as they were posted: an arrival at its ready time, a decoding when its round ended.
        if arrivals and (not ended or arrivals[0][1].ready_s <= ended[0][0]):
            number, unit = arrivals.popleft()
            free_s, landed_s = stage.start(number, unit, max(unit.ready_s, free_s))
            heappush(ended, (landed_s, number))
        else:
            posted_s, number = heappop(ended)
            free_s = stage.work("decode", number, max(posted_s, free_s), units[number].decode_s)
    return free_s


def ready_of_element(backward: BackwardTiming) -> Callable[[int], float]:
    """A function from a number of leading elements to the time when all of them are ready; 0 for none."""
    ends = list(accumulate(backward.numel))
    latest = list(accumulate(backward.ready_s, max))

    def ready_s(leading: int) -> float:
        return latest[min(bisect_left(ends, leading), len(latest) - 1)] if leading > 0 and latest else 0.0

    return ready_s

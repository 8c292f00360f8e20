"""Predicts how long a step of one recipe takes, from its units of work and their costs.

The engine prices the rounds that a recipe announces (`gradwire.control.forecast`); all else is numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

from gradwire.planning.costs import ENOUGH, BackwardTiming, CodecCost, Cores, Link, Network
from gradwire.planning.predict import Tail, UnitWork, predict

CALL_S = 1e-3
"""Processor time of one collective on cores that compute: of a thread that wakes up, and of the library.
Found where two ranks fill two cores; less where cores are free."""

BYTE_S = 0.7e-9
"""Processor time of a byte that a rank sends, and of one that it receives meanwhile: in the library and in
the kernel. Found with DDP on four ranks (77 ms for 108 MB)."""

MOST_DEAR = 4.0
"""Times the assumed processor time, at most, that collectives are believed to take. Another thread of the
process may have been at work while it was measured."""

_SECONDS = Network(Link(alpha_s=0.0, beta_s=1.0))
"""A link on which one "byte" takes one second, for rounds whose time is known already."""


def sending_s(calls: float, wire_bytes: float) -> float:
    """Processor time that is assumed for so many collectives, in which a rank sends so many bytes."""
    return CALL_S * calls + BYTE_S * wire_bytes


def overhead_factor(measured_s: float, calls: float, wire_bytes: float) -> float:
    """Times `sending_s` that collectives were found to take; 1 where nothing was measured.

    >>> overhead_factor(0.004, 2, 0.0), overhead_factor(1.0, 2, 0.0), overhead_factor(0.0, 2, 0.0)
    (2.0, 4.0, 1.0)
    """
    assumed_s = sending_s(calls, wire_bytes)
    return min(measured_s / assumed_s, MOST_DEAR) if measured_s > 0.0 and assumed_s > 0.0 else 1.0


@dataclass(frozen=True)
class Forecast:
    """One recipe on one network: units of work for each step of its cycle, rounds in seconds.

    `wire_bytes` are sent per rank and step, `node_bytes` over the busiest node's link (0 where there is one
    node), and `calls` is the number of collectives, all in the mean over the cycle. The verdict takes its
    time, and its bytes are not counted. `memory_bytes` come on top of DDP's: planes, and at most what a
    step's all-gathers receive. `at_most` says that an announced upper bound is among the bytes. `cores` are
    those that encoding, decoding and collectives share with the computation.
    """

    backward: BackwardTiming
    cycle: tuple[tuple[UnitWork, ...], ...]
    tail: Tail
    wire_bytes: float
    node_bytes: float
    memory_bytes: float
    at_most: bool
    calls: float = 0.0
    cores: Cores = ENOUGH

    @property
    def compute_s(self) -> float:
        """The step without communication."""
        return self.backward.before_s + self.backward.total_s

    @cached_property
    def _usual_step_s(self) -> float:
        return self._step_s(1.0)

    def step_s(self, slowed: float = 1.0) -> float:
        """The mean step, where the slowest rank takes `slowed` times as long to compute.

        All ranks encode at the same time, so that codecs take longer where a rank has less than a core. No
        step takes less than the processor time of all that it does.
        """
        return self._usual_step_s if slowed == 1.0 else self._step_s(slowed)

    def _step_s(self, slowed: float) -> float:
        backward_s = slowed * self.backward.total_s
        before_s = slowed * self.backward.before_s
        step_s = fmean(
            predict(
                self._at_pace(units, slowed), backward_s, 2, _SECONDS, before_s=before_s, tail=self.tail
            ).step_s
            for units in self.cycle
        )
        return max(step_s, before_s + self.cores.least_s(backward_s, self.work_s))

    def _at_pace(self, units: Sequence[UnitWork], slowed: float) -> Sequence[UnitWork]:
        stretched = 1.0 / self.cores.pace
        if slowed == stretched == 1.0:
            return units
        return [
            replace(unit, ready_s=slowed * unit.ready_s, codec=unit.codec.slowed(stretched)) for unit in units
        ]

    @property
    def exposed_s(self) -> float:
        """Seconds that communication and codecs add to a step."""
        return self.step_s() - self.compute_s

    def mean_step_s(self, every: int, slowed: float = 1.0) -> float:
        """The mean step if only one in `every` ends in an exchange, which adds all that it exposes."""
        if every == 1:
            return self.step_s(slowed)
        return slowed * self.compute_s + self.exposed_s / every

    @property
    def work_s(self) -> float:
        """Processor time beside the computation: encoding, decoding, and what calls and bytes take."""
        coded_s = fmean(
            sum(unit.encode_s + unit.decode_s for unit in units if unit.rounds) for units in self.cycle
        )
        return coded_s + self.cores.overhead_factor * sending_s(self.calls, self.wire_bytes)

    def coded(self, codec: CodecCost) -> Forecast:
        """This forecast with other costs of encoding and decoding."""
        cycle = tuple(tuple(replace(unit, codec=codec) for unit in units) for units in self.cycle)
        return replace(self, cycle=cycle)

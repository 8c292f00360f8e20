"""A `Comm` that notes what passes: rounds and bytes for the meter, and times for the trace of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from gradwire.comm.base import Comm, Pending, Round
from gradwire.measure.clock import RoundTime, Trace, now_s

UNANNOUNCED = ("shift",)
"""Messages, whose end gloo cannot announce: `then` calls back at once; `wait` knows."""


class MeteredComm(Comm):
    """Wraps the comm of one unit: `rounds` issued so far, and the `last` one's pending.

    `trace` gets the rounds' times, the seconds spent waiting, and spans of rounds announced by `then`, which
    tell the wire's share of a step from the codec's.
    """

    def __init__(self, comm: Comm, trace: Trace | None = None, unit: str = "") -> None:
        self.rank, self.world = comm.rank, comm.world
        self.verifies, self.announces = comm.verifies, comm.announces
        self.rounds: list[Round] = []
        self.last: Pending | None = None
        self._comm, self._unit = comm, unit
        self._trace = Trace() if trace is None else trace

    @property
    def wire_bytes(self) -> float:
        """Bytes sent so far, in the sense of `Round.wire_bytes`."""
        return sum(issued.wire_bytes(self.world) for issued in self.rounds)

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
        """Start the round and record it, if issuing succeeds: `owe_zeros` relies on that."""
        exact = None if self.announces else self._trace.exact
        time = RoundTime(round_.name, round_.payload_bytes, now_s() if exact is None else exact())
        pending = self._comm.issue(round_, tensor, out)
        if self._trace.recipe is not None:
            from gradwire.measure.ranges import OnTheWire  # loaded by those who profile

            pending = OnTheWire(pending, f"gradwire/wire {self._trace.recipe} {self._unit}")
        self.last = _Timed(pending, self._trace, time, self._unit, self.announces)
        self.rounds.append(round_)
        self._trace.rounds.append(time)
        return self.last


@dataclass
class _Timed:
    inner: Pending
    trace: Trace
    round: RoundTime
    unit: str
    announced: bool

    def wait(self) -> None:
        start_s = now_s()
        try:
            self.inner.wait()
        finally:
            self.trace.waited_s += now_s() - start_s
        if self.announced:
            self.round.ended(now_s())
        elif self.trace.exact is not None:
            self.round.ended(self.trace.exact())

    def then(self, callback: Callable[[], None]) -> None:
        def ended() -> None:
            stop_s = now_s()
            if self.announced and self.round.verb not in UNANNOUNCED:
                self.round.ended(stop_s)
            if self.announced:
                self.trace.add("wire", self.unit, self.round.start_s, stop_s)
            callback()

        self.inner.then(ended)

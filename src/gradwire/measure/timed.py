"""A `Comm` whose waits are timed, so that the wire's share of a step can be told from the codec's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from gradwire.comm.base import Algorithm, Broadcasting, Comm, Pending, Verb
from gradwire.measure.clock import RoundTime, Trace, now_s

UNANNOUNCED = ("shift",)
"""Messages, whose end gloo cannot announce: `then` calls back at once; `wait` knows."""


@dataclass
class _TimedPending:
    inner: Pending
    trace: Trace
    round: RoundTime
    unit: str

    def wait(self) -> None:
        start_s = now_s()
        try:
            self.inner.wait()
        finally:
            self.trace.waited_s += now_s() - start_s
        self.round.ended(now_s())

    def then(self, callback: Callable[[], None]) -> None:
        def ended() -> None:
            stop_s = now_s()
            if self.round.verb not in UNANNOUNCED:
                self.round.ended(stop_s)
            self.trace.add("wire", self.unit, self.round.start_s, stop_s)
            callback()

        self.inner.then(ended)


class TimedComm:
    """Wraps the verbs of one unit; the trace gets their times, and spans of those announced by `then`."""

    def __init__(self, comm: Comm, trace: Trace, unit: str) -> None:
        self._comm, self._trace, self._unit = comm, trace, unit
        self.rank, self.world = comm.rank, comm.world

    def _timed(
        self,
        verb: Verb,
        tensor: Tensor,
        issue: Callable[[], Pending],
        algorithm: Algorithm | Broadcasting = "library",
    ) -> Pending:
        name = verb if algorithm == "library" else f"{verb}/{algorithm}"
        round_ = RoundTime(name, tensor.numel() * tensor.element_size(), now_s())
        pending = _TimedPending(issue(), self._trace, round_, self._unit)
        self._trace.rounds.append(round_)  # only what could be issued, as the meter counts
        return pending

    def all_reduce(self, tensor: Tensor, algorithm: Algorithm = "library") -> Pending:
        """See `Comm.all_reduce`."""
        return self._timed("all_reduce", tensor, lambda: self._comm.all_reduce(tensor, algorithm), algorithm)

    def all_gather(self, out: Tensor, tensor: Tensor) -> Pending:
        """See `Comm.all_gather`."""
        return self._timed("all_gather", tensor, lambda: self._comm.all_gather(out, tensor))

    def broadcast(self, tensor: Tensor, src: int, algorithm: Broadcasting = "library") -> Pending:
        """See `Comm.broadcast`."""
        return self._timed(
            "broadcast", tensor, lambda: self._comm.broadcast(tensor, src, algorithm), algorithm
        )

    def all_to_all(self, out: Tensor, tensor: Tensor) -> Pending:
        """See `Comm.all_to_all`."""
        return self._timed("all_to_all", tensor, lambda: self._comm.all_to_all(out, tensor))

    def shift(self, out: Tensor, tensor: Tensor, by: int = 1) -> Pending:
        """See `Comm.shift`."""
        return self._timed("shift", tensor, lambda: self._comm.shift(out, tensor, by))

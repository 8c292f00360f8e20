"""A `Comm` without peers: every payload comes back at once, so that what is left to time is local work."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gradwire.comm.base import DONE, Pending
from gradwire.measure.clock import now_s


class EchoComm:
    """Rank 0 of a world in which all others hold what it holds.

    Verbs complete before they return. What rank 0 gets is of the shapes and sizes that peers would send, and
    as hard to decode. A sum is what rank 0 brought: others may bring zeros, and no decoder's time depends on
    it.
    `spent_s` adds up the seconds inside of the verbs, which are no local work.
    """

    def __init__(self, world: int, clock: Callable[[], float] = now_s) -> None:
        self.rank, self.world, self.spent_s = 0, world, 0.0
        self._clock = clock

    def _done(self, work: Callable[[], object]) -> Pending:
        start_s = self._clock()
        work()
        self.spent_s += self._clock() - start_s
        return DONE

    def all_reduce(self, tensor: Tensor) -> Pending:
        """See `Comm.all_reduce`."""
        return DONE

    def all_gather(self, out: Tensor, tensor: Tensor) -> Pending:
        """See `Comm.all_gather`."""
        return self._done(lambda: out.view(self.world, -1).copy_(tensor.view(1, -1)))

    def broadcast(self, tensor: Tensor, src: int) -> Pending:
        """See `Comm.broadcast`."""
        return DONE

    def all_to_all(self, out: Tensor, tensor: Tensor) -> Pending:
        """See `Comm.all_to_all`: everybody sends what would go to rank 0."""
        return self._done(lambda: out.view(self.world, -1).copy_(tensor.view(self.world, -1)[:1]))

    def shift(self, out: Tensor, tensor: Tensor, by: int = 1) -> Pending:
        """See `Comm.shift`."""
        return self._done(lambda: out.copy_(tensor))

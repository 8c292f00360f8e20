"""A `Comm` without peers: every payload comes back at once, so that what is left to time is local work."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gradwire.comm.base import DONE, Comm, Pending, Round
from gradwire.measure.clock import now_s


class EchoComm(Comm):
    """Rank 0 of a world in which all others hold what it holds.

    Verbs complete before they return. What rank 0 gets is of the shapes and sizes that peers would send, and
    as hard to decode. A sum is what rank 0 brought: others may bring zeros, and no decoder's time depends on
    it.
    `spent_s` adds up the seconds inside of the verbs, which are no local work.
    """

    def __init__(self, world: int, clock: Callable[[], float] = now_s) -> None:
        self.rank, self.world, self.spent_s = 0, world, 0.0
        self._clock = clock

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
        """Answer at once; in an all-to-all all ranks send what would go to rank 0."""
        start_s = self._clock()
        if round_.verb == "all_gather":
            out.view(self.world, -1).copy_(tensor.view(1, -1))
        elif round_.verb == "all_to_all":
            out.view(self.world, -1).copy_(tensor.view(self.world, -1)[:1])
        elif round_.verb == "shift":
            out.copy_(tensor)
        self.spent_s += self._clock() - start_s
        return DONE

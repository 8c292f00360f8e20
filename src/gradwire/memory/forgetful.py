"""No memory: what is not sent is gone.

For exchanges that are right in the mean (QSGD of few bits, TernGrad), with which error feedback would diverge
or pile up many gradients: their errors average out over ranks and steps, and have to.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.kernels import Folded, fold
from gradwire.memory.base import UNSENT, Gradients, Planes


@dataclass(frozen=True)
class Forgetful:
    """x = g, and what x leaves unsent is dropped.

    With `as_arrived` x has the gradient's own type, and the loss scale in it.
    """

    as_arrived: bool = False
    planes = ()
    weight = 1.0
    covers_momentum = False
    whole = False

    def fold(self, working: Planes, committed: Planes, grads: Gradients, step: int, world: int) -> Folded:
        return fold(working[UNSENT], None, grads.bucket, 1.0, grads.scale, grads.pieces)

    def settle(self, working: Planes, committed: Planes) -> None:
        """Nothing is kept."""

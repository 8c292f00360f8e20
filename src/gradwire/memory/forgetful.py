"""No memory: what is not sent is gone.

For exchanges that are right in the mean (QSGD of few bits, TernGrad), with which error feedback would diverge
or pile up many gradients: their errors average out over ranks and steps, and have to.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gradwire.kernels import Folded, fold
from gradwire.memory.base import UNSENT, Planes


@dataclass(frozen=True)
class Forgetful:
    """x = g, and what x leaves unsent is dropped."""

    planes = ()
    weight = 1.0
    covers_momentum = False

    def fold(
        self, working: Planes, committed: Planes, grad: Tensor, scale: float, step: int, world: int
    ) -> Folded:
        """See `Memory.fold`."""
        # The same pass with a coefficient of 0: what it multiplies only has to be as finite as the gradient.
        return fold(working[UNSENT], grad, grad, 0.0, scale)

    def settle(self, working: Planes, committed: Planes) -> None:
        """See `Memory.settle`. Nothing is kept."""

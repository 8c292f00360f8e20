"""Error feedback: what was not sent is added to the next gradient.

Seide et al. 2014, "1-bit stochastic gradient descent"; Stich et al. 2018, "Sparsified SGD with memory". The
scheduled coefficient is COVAP's (Meng et al. 2023, section III-D).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gradwire.kernels import Folded, fold
from gradwire.memory.base import UNSENT, Gradients, Planes


@dataclass(frozen=True)
class Residual:
    """x = c·m + g, and what x leaves unsent is the next m.

    The coefficient is c = min(start + ⌊step / every⌋ · rise, 1); the default is plain error feedback,
    c = 1 throughout. With `whole`, a step that sends everything leaves nothing, in 16 bits either.

    >>> Residual(start=0.5, rise=0.1, every=50).coefficient(120)
    0.7
    """

    start: float = 1.0
    rise: float = 0.0
    every: int = 1
    whole: bool = field(default=False, repr=False)
    planes = (UNSENT,)
    weight = 1.0
    covers_momentum = False
    as_arrived = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.start <= 1.0:
            raise ValueError(f"start={self.start} is outside 0 … 1; 1 is plain error feedback")
        if self.every < 1:
            raise ValueError(f"every={self.every} must be at least 1 step")

    def coefficient(self, step: int) -> float:
        """The factor on the residual when it is added in `step`."""
        return min(round(self.start + (step // self.every) * self.rise, 9), 1.0)

    def fold(self, working: Planes, committed: Planes, grads: Gradients, step: int, world: int) -> Folded:
        weights = self.coefficient(step), grads.scale
        return fold(working[UNSENT], committed[UNSENT], grads.bucket, *weights, grads.pieces)

    def settle(self, working: Planes, committed: Planes) -> None:
        """What is left is the memory."""

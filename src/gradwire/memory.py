"""What becomes of the unsent part of a gradient: late, not lost.

A memory owns no buffers. The arena holds two planes per element: `committed` (what the last good step
left) and `working` (this step's). Nothing touches `committed` before the verdict, so a step that is
not committed leaves no trace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gradwire.kernels import Folded, fold


class Memory(Protocol):
    """The element-wise state of an exchange."""

    def fold(self, working: Tensor, committed: Tensor, grad: Tensor, scale: float, step: int) -> Folded:
        """Write the error-fed gradient to `working`; `grad` counts times `scale`."""
        ...


@dataclass(frozen=True)
class Residual:
    """Error feedback: x = c·m + g, and what x leaves unsent is the next m.

    The coefficient c = min(start + ⌊step / every⌋ · rise, 1) is COVAP's error-feedback scheduler
    (section III-D); the default is plain error feedback, c = 1 throughout.

    >>> Residual(start=0.5, rise=0.1, every=50).coefficient(120)
    0.7
    """

    start: float = 1.0
    rise: float = 0.0
    every: int = 1

    def __post_init__(self) -> None:
        if not 0.0 <= self.start <= 1.0:
            raise ValueError(f"start={self.start} is outside 0 … 1; 1 is plain error feedback")
        if self.every < 1:
            raise ValueError(f"every={self.every} must be at least 1 step")

    def coefficient(self, step: int) -> float:
        """The factor on the residual when it is added in `step`."""
        return min(round(self.start + (step // self.every) * self.rise, 9), 1.0)

    def fold(self, working: Tensor, committed: Tensor, grad: Tensor, scale: float, step: int) -> Folded:
        """See `Memory.fold`."""
        return fold(working, committed, grad, self.coefficient(step), scale)

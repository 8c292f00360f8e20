"""Momentum on every rank before signs are taken, and nothing that is unsent.

Bernstein, Wang, Azizzadenesheli and Anandkumar 2018, "signSGD: compressed optimisation for non-convex
problems", algorithm 2 (SIGNUM): m ← β·m + (1 − β)·g, and what travels is the sign of m.

Differences from the paper: a parameter without a gradient in a step keeps its m, and takes no part in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.kernels import Folded, fold
from gradwire.memory.base import UNSENT, Gradients, Planes
from gradwire.memory.momentum import MOMENTUM


@dataclass(frozen=True)
class Signum:
    """x = m with m = β·m + (1 − β)·g; what x leaves unsent is dropped, so a flush hands over nothing."""

    momentum: float = 0.9
    planes = (MOMENTUM,)
    weight = 1.0
    as_arrived = False
    whole = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum={self.momentum} is outside [0, 1); the usual value is 0.9")

    @property
    def covers_momentum(self) -> bool:
        """See `Memory.covers_momentum`."""
        return self.momentum > 0.0

    def fold(self, working: Planes, committed: Planes, grads: Gradients, step: int, world: int) -> Folded:
        """See `Memory.fold`."""
        weights = self.momentum, (1.0 - self.momentum) * grads.scale
        seen = fold(working[MOMENTUM], committed[MOMENTUM], grads.bucket, *weights, grads.pieces)
        for plane, _bucket in grads.pieces.slices():
            working[UNSENT][plane] = working[MOMENTUM][plane]
        return seen

    def settle(self, working: Planes, committed: Planes) -> None:
        """See `Memory.settle`. The fold has done it."""

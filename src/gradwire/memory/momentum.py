"""Momentum correction with factor masking and local clipping.

Lin et al. 2018, "Deep gradient compression", section 3. Every rank keeps a momentum u of its own and
remembers its sum v, so that what is sent late carries the momentum that it would have had:
u ← μ·u + g, v ← v + u, and where v was sent both start again at zero (masking), because a stale momentum
would push a parameter in the direction of an old gradient.

Differences from the paper: the clipping threshold c/√W holds for each parameter's gradient, as in the
authors' code, and not for the whole model's; a sent element is recognised by its v being exactly zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.kernels import Folded, fold_momentum, mask_zeros
from gradwire.memory.base import UNSENT, Gradients, Planes

MOMENTUM = "momentum"


@dataclass(frozen=True)
class MomentumCorrection:
    """x = v + u with u = μ·u + g, or with μ·u + g in place of u (Nesterov).

    `clip` bounds the norm of each parameter's own gradient to clip/√W before anything else.
    """

    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = True
    clip: float | None = None
    planes = (UNSENT, MOMENTUM)
    weight = 1.0
    as_arrived = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum={self.momentum} is outside [0, 1); the usual value is 0.9")
        if self.clip is not None and not self.clip > 0.0:
            raise ValueError(f"clip={self.clip} must be positive: the largest norm of a parameter's gradient")

    @property
    def covers_momentum(self) -> bool:
        """See `Memory.covers_momentum`."""
        return self.momentum > 0.0

    @property
    def whole(self) -> bool:
        """Masking takes an exact zero for what has been sent."""
        return self.masking

    def fold(self, working: Planes, committed: Planes, grads: Gradients, step: int, world: int) -> Folded:
        """See `Memory.fold`."""
        return fold_momentum(
            (working[UNSENT], working[MOMENTUM]),
            (committed[UNSENT], committed[MOMENTUM]),
            grads.bucket,
            self.momentum,
            self._scales(grads, world),
            grads.pieces,
            nesterov=self.nesterov,
        )

    def _scales(self, grads: Gradients, world: int) -> float | list[float]:
        """What each parameter's gradient is multiplied by."""
        scale = grads.scale
        if self.clip is None:
            return scale
        each = (grads.bucket[bucket] for _plane, bucket in grads.pieces.slices())
        return [scale * self._clipping(grad, scale, self.clip / math.sqrt(world)) for grad in each]

    def _clipping(self, grad: Tensor, scale: float, bound: float) -> float:
        """The factor that brings `grad` to its bound. 1 for a norm that is NaN, which the verdict rejects."""
        norm = abs(scale) * float(torch.linalg.vector_norm(grad, dtype=torch.float64))
        return bound / norm if bound < norm < math.inf else 1.0

    def settle(self, working: Planes, committed: Planes) -> None:
        """See `Memory.settle`."""
        if self.masking:
            mask_zeros(working[MOMENTUM], working[UNSENT])

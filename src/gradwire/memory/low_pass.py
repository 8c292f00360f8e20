"""A low-pass filter on the residual (ScaleCom, Chen et al. 2020, section 3.2, equation 5).

m ← (1 − β)·m + β·(m + g − sent). Per coordinate, Σ sent + m_T/β = Σ g + m_0/β holds exactly: a memory of m
stands for m/β of gradient, which is what a flush hands over.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradwire.kernels import Folded, fold
from gradwire.memory.base import UNSENT, Gradients, Planes


@dataclass(frozen=True)
class LowPass:
    """x = m + g, and of what x leaves unsent the share β replaces as much of m.

    β = 1 is plain error feedback; the paper has 0.1 to 0.3 for learning rates scaled up with the batch.

    >>> LowPass(0.25).weight
    4.0
    """

    beta: float
    planes = (UNSENT,)
    covers_momentum = False
    as_arrived = False
    whole = False

    def __post_init__(self) -> None:
        if not 0.0 < self.beta <= 1.0:
            raise ValueError(f"beta={self.beta} is outside (0, 1]; 1 is plain error feedback")

    @property
    def weight(self) -> float:
        return 1.0 / self.beta

    def fold(self, working: Planes, committed: Planes, grads: Gradients, step: int, world: int) -> Folded:
        return fold(working[UNSENT], committed[UNSENT], grads.bucket, 1.0, grads.scale, grads.pieces)

    def settle(self, working: Planes, committed: Planes) -> None:
        if self.beta < 1.0:
            old = committed[UNSENT].to(working[UNSENT].dtype)
            torch.lerp(old, working[UNSENT], self.beta, out=working[UNSENT])

"""The form that all optimizers' numerators have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Terms:
    """C = θ·(slope·(√(share·v) + eps) + offset) − pull·m, where v and m are moments of the gradient."""

    slope: float = 0.0
    offset: float = 0.0
    pull: float = 0.0
    share: float = 1.0
    eps: float = 0.0

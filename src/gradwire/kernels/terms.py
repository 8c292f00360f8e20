"""The form that all optimizers' numerators have."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Terms:
    """C = θ·(slope·(√(share·v) + eps) + offset) − pull·m, where v and m are moments of the gradient."""

    slope: float = 0.0
    offset: float = 0.0
    pull: float = 0.0
    share: float = 1.0
    eps: float = 0.0

    def times(self, factor: float) -> Terms:
        """Those of `factor` times C.

        >>> Terms(offset=3.0, eps=1e-8).times(2.0)
        Terms(slope=0.0, offset=6.0, pull=0.0, share=1.0, eps=1e-08)
        """
        scaled = {name: getattr(self, name) * factor for name in ("slope", "offset", "pull")}
        return replace(self, **scaled)

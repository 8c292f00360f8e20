"""A coarse filter: each unit travels every I-th step (COVAP, Meng et al. 2023, section III-B)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradwire.comm.base import Comm, Round
from gradwire.exchange.base import Exchange, ExchangeLaws, Finish
from gradwire.memory import Memory
from gradwire.moment import Moment


@dataclass(frozen=True)
class Every:
    """Unit t is exchanged at step s iff (t + s) mod I = 0; the others hand zeros to the optimizer.

    With `together`, all units are exchanged in the same steps: those with (s + 1) mod I = 0.
    """

    interval: int
    inner: Exchange
    together: bool = False

    @property
    def laws(self) -> ExchangeLaws:
        """As the inner exchange: over a cycle of I steps everything is sent. It is never in place."""
        return replace(self.inner.laws, in_place=False)

    @property
    def memory(self) -> Memory | None:
        """As the inner exchange."""
        return self.inner.memory

    def sends(self, at: Moment) -> bool:
        """Whether the unit travels in this step: no data dependency, every rank decides alone."""
        phase = 1 if self.together else at.unit
        return (phase + at.step) % self.interval == 0

    def start(self, x: Tensor, mean: Tensor, comm: Comm, at: Moment) -> Finish:
        if self.sends(at):
            return self.inner.start(x, mean, comm, at)
        mean.zero_()
        return lambda: None

    def rounds(self, numel: int, dtype: torch.dtype, at: Moment) -> tuple[Round, ...]:
        return self.inner.rounds(numel, dtype, at) if self.sends(at) else ()


def every(interval: int, inner: Exchange, *, together: bool = False) -> Every:
    """Exchange each unit every `interval` steps, one after another or all `together`."""
    if not isinstance(interval, int) or interval < 1:
        raise ValueError(
            f"interval={interval!r} must be at least 1 step, in whole steps; 1 sends everything always"
        )
    return Every(interval, inner, together)

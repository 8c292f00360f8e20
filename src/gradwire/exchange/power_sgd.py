"""PowerSGD: one step of power iteration per training step (Vogels, Karimireddy and Jaggi 2019, algorithm 1).

Every matrix M of a unit becomes P = M·Q, summed over ranks and orthonormalised to P̂, and Q = Mᵀ·P̂, summed
likewise; the mean is P̂·Qᵀ, and Q is where the next step starts.

Differences from the paper: what a rank leaves is its own M − P̂·(its own Q)ᵀ, and not M less the mean. Over
ranks both have the same mean, so the mean of every later step is the same in exact arithmetic; but what a
rank leaves is then an orthogonal projection of what came, never larger, and an idle rank keeps its memory.
Q is kept orthonormal, which spans the same and keeps numbers in range. Columns in which nothing is left keep
their old direction.

Not guaranteed is that a single rank's memory shrinks: what is orthogonal to all P̂, or cancels in the sum of
ranks, waits. What is sent of the mean M̄ is its best approximation within the span of M̄·Q.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.comm.base import Comm, Round
from gradwire.exchange.base import WHOLE, ExchangeLaws, Finish
from gradwire.exchange.low_rank import arrange, check_rank, factor_type
from gradwire.kernels import left_products, orthonormalise, outer_products, right_products
from gradwire.moment import Moment


@dataclass(frozen=True)
class PowerSgd:
    """Two all-reduces: r·rows of every matrix with what travels raw, then r·columns of every matrix."""

    rank: int
    laws = ExchangeLaws(contractive=True, may_overflow=True, grain=WHOLE)
    memory = None

    def start(self, x: Tensor, mean: Tensor, comm: Comm, at: Moment) -> Finish:
        """Reads every matrix three times and writes it once."""
        unit, dtype, weight = arrange(x.numel(), at.parts, self.rank), factor_type(x.dtype), 1.0 / comm.world
        kept = unit.right.recall(at, dtype, x.device)
        buffer = x.new_empty(unit.left.numel + unit.raw_numel, dtype=dtype)
        left, raw = buffer[: unit.left.numel], buffer[unit.left.numel :]
        left_products(x, unit.places, self.rank, left, kept)
        left *= weight
        unit.take_raw(x, raw, weight)
        pending = comm.all_reduce(buffer) if buffer.numel() else None
        right = x.new_empty(unit.right.numel, dtype=dtype)
        if right.numel() and pending is not None:
            pending.wait()
            orthonormalise(left, unit.left.spans, self.rank)
            right_products(x, unit.places, self.rank, left, right)
            right *= weight
            pending = comm.all_reduce(right)

        def finish() -> None:
            if pending is not None:
                pending.wait()
            unit.land_raw(raw, mean)
            outer_products(mean, unit.places, self.rank, left, right)
            unit.right.keep(right, kept, at)

        return finish

    def rounds(self, numel: int, dtype: torch.dtype, at: Moment) -> tuple[Round, ...]:
        unit = arrange(numel, at.parts, self.rank)
        sizes = (unit.left.numel + unit.raw_numel, unit.right.numel)
        return tuple(Round("all_reduce", size, factor_type(dtype)) for size in sizes if size)


def power_sgd(rank: int = 1) -> PowerSgd:
    """The mean's approximation of `rank`, by one step of power iteration from the last step's factors.

    >>> import torch
    >>> from gradwire.moment import Moment, Part
    >>> at = Moment(0, 0, 0, world=2, parts=(Part("weight", (64, 128), 0, 64 * 128),))
    >>> [each.numel for each in power_sgd(2).rounds(64 * 128, torch.float32, at)]
    [128, 256]
    """
    return PowerSgd(check_rank(rank))

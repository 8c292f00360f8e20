"""ACP-SGD: PowerSGD whose factors take turns.

Zhang, Zhang, Shi, Chu and Li 2023, "Evaluation and optimization of gradient compression for distributed deep
learning".

In even steps Q from the step before is orthonormal and P = M·Q is summed over ranks, in odd steps the other
way round with Q = Mᵀ·P. The mean is P·Qᵀ. One all-reduce per step of half of PowerSGD's traffic; nothing
waits in between, so the wire of one unit overlaps with the products of the next. Two steps are one step of
power iteration.

Differences from the paper: what all ranks have summed is orthonormalised when it is kept, not before its next
use, which is the same; columns in which nothing is left keep their old direction. As in the paper a rank
leaves M less its own product, an orthogonal projection of what came. What the `power_sgd` next door does not
guarantee is not guaranteed here either.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.comm.base import Comm, Round
from gradwire.exchange.base import WHOLE, ExchangeLaws, Finish
from gradwire.exchange.low_rank import arrange, check_rank, factor_type
from gradwire.kernels import left_products, outer_products, right_products
from gradwire.moment import Moment


@dataclass(frozen=True)
class AcpSgd:
    """One all-reduce: r·rows of every matrix in even steps, r·columns in odd ones, and what is raw."""

    rank: int
    laws = ExchangeLaws(contractive=True, may_overflow=True, grain=WHOLE)
    memory = None

    def start(self, x: Tensor, mean: Tensor, comm: Comm, at: Moment) -> Finish:
        """Reads and writes every matrix once in even steps, twice in odd ones."""
        unit, dtype, weight = arrange(x.numel(), at.parts, self.rank), factor_type(x.dtype), 1.0 / comm.world
        even = at.step % 2 == 0
        sent, fixed = (unit.left, unit.right) if even else (unit.right, unit.left)
        basis, before = fixed.recall(at, dtype, x.device), sent.recall(at, dtype, x.device)
        buffer = x.new_empty(sent.numel + unit.raw_numel, dtype=dtype)
        factor, raw = buffer[: sent.numel], buffer[sent.numel :]
        left, right = (factor, basis) if even else (basis, factor)
        if even:
            left_products(x, unit.places, self.rank, left, right, subtract=True)
        else:
            right_products(x, unit.places, self.rank, left, right)
        factor *= weight
        unit.take_raw(x, raw, weight)
        pending = comm.all_reduce(buffer) if buffer.numel() else None

        def finish() -> None:
            if pending is not None:
                pending.wait()
            unit.land_raw(raw, mean)
            outer_products(mean, unit.places, self.rank, left, right)
            sent.keep(factor, before, at)

        return finish

    def rounds(self, numel: int, dtype: torch.dtype, at: Moment) -> tuple[Round, ...]:
        unit = arrange(numel, at.parts, self.rank)
        size = (unit.left if at.step % 2 == 0 else unit.right).numel + unit.raw_numel
        return (Round("all_reduce", size, factor_type(dtype)),) if size else ()


def acp_sgd(rank: int = 1) -> AcpSgd:
    """The mean's approximation of `rank`, one factor per step.

    >>> import torch
    >>> from gradwire.moment import Moment, Part
    >>> at = Moment(3, 0, 0, world=2, parts=(Part("weight", (64, 128), 0, 64 * 128),))
    >>> [each.numel for each in acp_sgd(2).rounds(64 * 128, torch.float32, at)]
    [256]
    """
    return AcpSgd(check_rank(rank))

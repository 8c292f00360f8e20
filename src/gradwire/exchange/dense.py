"""Plain all-reduce of the gradient itself: the reference for everything else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codec.cast import cast_for_sum, wire_type
from gradwire.comm.base import Algorithm, Comm, Round, check_algorithm
from gradwire.exchange.base import Decode
from gradwire.laws import Laws
from gradwire.unit.context import ExchangeContext


@dataclass(frozen=True)
class Dense:
    """Multiply by 1/W, then sum: with the library's all-reduce bit-identical to DDP on any world.

    Another `algorithm` adds in another order. Where parameters have a shorter type than the one in which
    their gradients are summed (`ExchangeContext.narrow`), values travel in the shorter type, as DDP's would,
    and the rounding error stays unsent.
    """

    algorithm: Algorithm = "library"
    laws = Laws(contractive=True, in_place=True, stays_on_device=True, total=True, fixed_rounds=True)
    memory = None

    def start(self, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> Decode:
        """One all-reduce of `numel` elements."""
        if (wire := wire_type(None, x.dtype, ctx)) != x.dtype:
            return self._start_narrow(x, mean, comm, wire)
        torch.mul(x, 1.0 / comm.world, out=mean)
        if mean.data_ptr() != x.data_ptr():
            x.zero_()
        return comm.all_reduce(mean, self.algorithm).wait

    def _start_narrow(self, x: Tensor, mean: Tensor, comm: Comm, wire: torch.dtype) -> Decode:
        share = x * (1.0 / comm.world)
        payload = cast_for_sum(share, comm.world, wire)
        torch.sub(share, payload, out=x).mul_(comm.world)
        pending = comm.all_reduce(payload, self.algorithm)

        def decode() -> None:
            pending.wait()
            mean.copy_(payload)

        return decode

    def rounds(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[Round, ...]:
        return (Round("all_reduce", numel, wire_type(None, dtype, ctx), algorithm=self.algorithm),)


def dense(algorithm: Algorithm = "library") -> Dense:
    """Plain all-reduce, by the library or by hops of our own; raises `ValueError` for an unknown `algorithm`.

    >>> from gradwire.exchange.dense import dense
    >>> dense().laws.contractive
    True
    """
    return Dense(check_algorithm(algorithm))

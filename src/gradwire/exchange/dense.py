"""Plain all-reduce of the gradient itself: the reference for everything else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.comm.base import Algorithm, Comm, Round, check_algorithm
from gradwire.exchange.base import Finish
from gradwire.memory import Memory
from gradwire.moment import Moment


@dataclass(frozen=True)
class Dense:
    """Multiply by 1/W, then sum: the order that makes it bit-identical to DDP on any world.

    That is the library's all-reduce; another `algorithm` adds in another order.
    """

    algorithm: Algorithm = "library"
    grain: int = 1
    conserves: bool = True
    contractive: bool = True
    in_place: bool = True
    may_overflow: bool = False
    memory: Memory | None = None

    def start(self, x: Tensor, mean: Tensor, comm: Comm, at: Moment) -> Finish:
        """See `Exchange.start`. One all-reduce of `numel` elements."""
        torch.mul(x, 1.0 / comm.world, out=mean)
        if mean.data_ptr() != x.data_ptr():
            x.zero_()
        return comm.all_reduce(mean, self.algorithm).wait

    def rounds(self, numel: int, dtype: torch.dtype, at: Moment) -> tuple[Round, ...]:
        """See `Exchange.rounds`."""
        return (Round("all_reduce", numel, dtype, algorithm=self.algorithm),)


def dense(algorithm: Algorithm = "library") -> Dense:
    """Plain all-reduce, as the library does it or by hops of our own.

    >>> from gradwire.exchange import dense
    >>> dense().contractive
    True
    """
    return Dense(check_algorithm(algorithm))

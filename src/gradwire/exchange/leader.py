"""One rank's choice of elements for all ranks, then an all-reduce of the values alone.

Traffic per rank does not grow with the world (ScaleCom, Chen et al. 2020, section 3: CLT-k; AR-Topk in
"Flexible communication …", Tyagi and Swany 2024, section III).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from gradwire.codec.cast import check_wire_type, wire_type
from gradwire.codec.select.base import Selector, check_fixed_size
from gradwire.comm.base import Comm, Round
from gradwire.exchange.base import ExchangeLaws, Finish
from gradwire.exchange.shares import take_share
from gradwire.exchange.spread import spread_indices, spread_round
from gradwire.kernels import put
from gradwire.moment import Moment

Elect = Literal["round_robin", "norm"]


@dataclass(frozen=True)
class Leader:
    """The leader's indices are spread by an all-reduce to which all others contribute zeros.

    With a `dtype`, values travel in that type where it is shorter than the gradient's own; what rounding
    drops stays unsent like everything else, and what is too large for the type arrives in several steps.
    """

    selector: Selector
    elect: Elect = "round_robin"
    dtype: torch.dtype | None = None
    memory = None

    @property
    def laws(self) -> ExchangeLaws:
        """Contractive as the selector: on the leader exactly, elsewhere as far as choices overlap."""
        return ExchangeLaws(contractive=self.selector.laws.contractive)

    def start(self, x: Tensor, mean: Tensor, comm: Comm, at: Moment) -> Finish:
        """Two all-reduces (indices, values), three when norms elect the leader."""
        indices = self._spread(x, self._leader(x, comm, at), comm, at)
        values = take_share(x, indices, comm.world, wire_type(self.dtype, x.dtype, at))
        pending = comm.all_reduce(values)

        def finish() -> None:
            pending.wait()
            put(mean, indices, values.to(mean.dtype))

        return finish

    def _leader(self, x: Tensor, comm: Comm, at: Moment) -> int:
        if self.elect == "round_robin":
            return at.step % comm.world
        norms = x.new_zeros(comm.world, dtype=torch.float32)
        norms[comm.rank] = torch.linalg.vector_norm(x)
        comm.all_reduce(norms).wait()
        # With a NaN any rank may lead; all ranks see the same norms, and the verdict rejects the step.
        return int(norms.argmax())

    def _spread(self, x: Tensor, leader: int, comm: Comm, at: Moment) -> Tensor:
        own = self.selector.select(x, at) if comm.rank == leader else None
        return spread_indices(own, self.selector.count(x.numel(), at), x, comm)

    def rounds(self, numel: int, dtype: torch.dtype, at: Moment) -> tuple[Round, ...]:
        count = self.selector.count(numel, at)
        election = () if self.elect == "round_robin" else (Round("all_reduce", at.world, torch.float32),)
        values = Round("all_reduce", count, wire_type(self.dtype, dtype, at))
        return (*election, spread_round(count, numel), values)


def leader(selector: Selector, elect: Elect = "round_robin", dtype: torch.dtype | None = None) -> Leader:
    """Let one rank choose for all: in turn, or the one whose gradient has the largest norm.

    `dtype` (float16 or bfloat16) shortens the values on the wire.
    """
    if elect not in get_args(Elect):
        raise ValueError(f"elect={elect!r} is none of {', '.join(get_args(Elect))}")
    return Leader(check_fixed_size(selector), elect, check_wire_type(dtype))

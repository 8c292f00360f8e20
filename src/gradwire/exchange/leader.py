"""One rank's choice of elements for everybody, then an all-reduce of the values alone.

Traffic per rank does not grow with the world (ScaleCom, Chen et al. 2020, section 3: CLT-k; AR-Topk in
"Flexible communication …", Tyagi and Swany 2024, section III).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from gradwire.codec.select import Selector
from gradwire.comm.base import Comm, Round
from gradwire.errors import WireError
from gradwire.exchange.base import Finish
from gradwire.kernels import put, take
from gradwire.memory import Memory
from gradwire.moment import Moment

Elect = Literal["round_robin", "norm"]


@dataclass(frozen=True)
class Leader:
    """The leader's indices are spread by an all-reduce to which all others contribute zeros.

    That is a scatter-all-gather broadcast: 2(N-1)/N of the payload in time, against log N for a tree,
    and it needs no root, so that a rank which fails can still keep the agreed order.
    """

    selector: Selector
    elect: Elect = "round_robin"
    grain: int = 1
    memory: Memory | None = None
    in_place: bool = False
    may_overflow: bool = False

    @property
    def contractive(self) -> bool:
        """As the selector: for the leader exactly, for the others as far as their choices overlap."""
        return self.selector.contractive

    def start(self, x: Tensor, mean: Tensor, comm: Comm, at: Moment) -> Finish:
        """See `Exchange.start`. Two all-reduces (indices, values), three when norms elect the leader."""
        indices = self._spread(x, self._leader(x, comm, at), comm, at)
        values = take(x, indices, 1.0 / comm.world)
        pending = comm.all_reduce(values)

        def finish() -> None:
            pending.wait()
            put(mean, indices, values)

        return finish

    def _leader(self, x: Tensor, comm: Comm, at: Moment) -> int:
        if self.elect == "round_robin":
            return at.step % comm.world
        norms = x.new_zeros(comm.world, dtype=torch.float32)
        norms[comm.rank] = torch.linalg.vector_norm(x)
        comm.all_reduce(norms).wait()
        # A rank with NaN leads to whatever; all ranks see the same norms, and the verdict rejects the step.
        return int(norms.argmax())

    def _spread(self, x: Tensor, leader: int, comm: Comm, at: Moment) -> Tensor:
        if comm.rank == leader:
            indices = self.selector.select(x, at).int()
        else:
            indices = torch.zeros(self.selector.count(x.numel()), dtype=torch.int32, device=x.device)
        comm.all_reduce(indices).wait()
        _check_range(indices, x.numel())
        return indices

    def rounds(self, numel: int, dtype: torch.dtype, at: Moment) -> tuple[Round, ...]:
        """See `Exchange.rounds`."""
        count = self.selector.count(numel)
        election = () if self.elect == "round_robin" else (Round("all_reduce", at.world, torch.float32),)
        return (*election, Round("all_reduce", count, torch.int32), Round("all_reduce", count, dtype))


def _check_range(indices: Tensor, numel: int) -> None:
    """The kernels do not check bounds; what comes from a peer is checked here, once."""
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < numel:
        raise WireError(f"the leader sent indices outside 0 … {numel - 1}")


def leader(selector: Selector, elect: Elect = "round_robin") -> Leader:
    """Let one rank choose for all: in turn, or the one whose gradient has the largest norm."""
    if elect not in get_args(Elect):
        raise ValueError(f"elect={elect!r} is none of {', '.join(get_args(Elect))}")
    return Leader(selector, elect)

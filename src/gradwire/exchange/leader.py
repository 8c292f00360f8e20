"""One rank's choice of elements for all ranks, then an all-reduce of the values alone.

Traffic per rank does not grow with the world (ScaleCom, Chen et al. 2020, section 2: CLT-k). Its two steps
come first, because other exchanges use them: the leader's indices to all ranks, and each rank's share of the
mean at these indices.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor

from gradwire.codec.cast import cast_for_sum, check_wire_type, wire_type
from gradwire.codec.indices import index_words, pack_indices, unpack_indices
from gradwire.codec.select.base import Selector, check_fixed_size
from gradwire.comm.base import Broadcasting, Comm, Round
from gradwire.exchange.base import Decode
from gradwire.exchange.round_robin import Order, check_order, round_robin
from gradwire.kernels.dispatch import LOOKING, Kernels
from gradwire.kernels.places import put, scatter, take
from gradwire.laws import Laws, phase_of
from gradwire.unit.context import ExchangeContext


def leader_in_turn(ctx: ExchangeContext, order: Order = "random") -> int:
    """Rank that leads in this step, if ranks take turns; the same answer on all ranks.

    By default it is not the step's number modulo the number of ranks: a unit that has gradients in every
    second step would have the same leaders for ever. In the order "paper" it is.
    """
    return round_robin(ctx, ctx.world, order, whose="leader")


def leads(norms: Tensor, rank: int) -> bool | Tensor:
    """True if `rank` has the largest of `norms` (world,); of equal ones the lowest rank leads.

    For norms on a device the result is a bool tensor () there, which the host need not read. With a NaN any
    rank may lead: all ranks see the same norms, and the status vote rejects the step.
    """
    is_largest = norms.argmax() == rank
    return bool(is_largest) if norms.is_cpu else is_largest


def spread_indices(
    own: Callable[[], Tensor],
    is_leader: bool | Tensor,
    count: int,
    like: Tensor,
    comm: Comm,
    ctx: ExchangeContext,
) -> Tensor:
    """Send the leader's ascending indices (count,) to all ranks. One all-reduce, waited for.

    All ranks but the leader contribute zeros to it. It moves 2(N-1)/N of the payload, but has no root, so a
    rank that fails before it knows the leader can still keep the agreed order.

    Args:
        own: selects indices; called on the leader, and on all ranks if only the device knows the leader.
        is_leader: whether this rank leads: a bool, or a tensor on the device.
        count: number of indices.
        like: the tensor (numel,) that they index.
        comm: the ranks.
        ctx: of the exchange, which is told if the indices that arrive are invalid.
    """
    words = _packed(own, is_leader, count, like)
    comm.all_reduce(words).wait()
    return unpack_indices(words, count, like.numel(), ctx.see, ctx.mark)


def spread_round(count: int, numel: int) -> Round:
    """The collective of `spread_indices`."""
    return Round("all_reduce", index_words(count, numel), torch.int32)


def broadcast_indices(
    own: Callable[[], Tensor],
    count: int,
    like: Tensor,
    comm: Comm,
    ctx: ExchangeContext,
    src: int,
    algorithm: Broadcasting,
) -> Tensor:
    """Send the ascending indices (count,) of rank `src` to all ranks. One broadcast, waited for.

    Args:
        own: selects indices; called on rank `src` only.
        count: number of indices.
        like: the tensor (numel,) that they index.
        comm: the ranks.
        ctx: of the exchange, which is told if the indices that arrive are invalid.
        src: the same on all ranks.
        algorithm: algorithm of the broadcast.
    """
    words = _packed(own, comm.rank == src, count, like)
    comm.broadcast(words, src, algorithm).wait()
    return unpack_indices(words, count, like.numel(), ctx.see, ctx.mark)


def broadcast_round(count: int, numel: int, src: int, algorithm: Broadcasting) -> Round:
    """The collective that `broadcast_indices` issues for `count` indices within `numel` elements, from rank
    `src`.
    """
    size = index_words(count, numel)
    return Round("broadcast", size, torch.int32, src=src, algorithm=algorithm)


def _packed(own: Callable[[], Tensor], is_leader: bool | Tensor, count: int, like: Tensor) -> Tensor:
    """The packed indices (words,) int32 of the leader; zeros on other ranks. The arguments are those of
    `broadcast_indices`; `is_leader` may be a bool on the device.
    """
    if is_leader is False:
        return torch.zeros(index_words(count, like.numel()), dtype=torch.int32, device=like.device)
    words = pack_indices(own(), like.numel())
    return words if is_leader is True else words * is_leader


def take_share(
    x: Tensor, indices: Tensor, world: int, dtype: torch.dtype, kernels: Kernels = LOOKING
) -> Tensor:
    """Take x/W, for `world` = W ranks, at `indices` (k,) out of x (numel,), as values (k,) of `dtype` to be
    summed over ranks. x becomes zero there.

    `dtype` is x's own or shorter; the rounding error goes back to x.
    """
    values = kernels[take](x, indices, 1.0 / world)
    if dtype == x.dtype:
        return values
    narrow = cast_for_sum(values, world, dtype)
    kernels[scatter](x, indices, values.sub_(narrow).mul_(world))
    return narrow


Elect = Literal["round_robin", "norm"]


@dataclass(frozen=True)
class Leader:
    """Exchange in which one rank, the leader, selects the indices for all ranks.

    An all-reduce spreads the indices: the leader contributes them, all others zeros. A second all-reduce sums
    x/W at these indices, in values of `dtype` if that is shorter than the gradient's own type. The mean is
    zero elsewhere. Unsent elements stay in x, as do rounding errors. A value too large for `dtype` arrives in
    several steps.

    Args:
        selector: selection of a number of elements that is known before the gradients are.
        elect: "round_robin" lets ranks lead in turn; "norm" lets the rank with the largest norm of x lead,
            which takes one more all-reduce, of W float32.
        dtype: type of the values on the wire; None is the gradient's own.
        order: order of the turns; "paper" is rank 0, 1, … by the step's number.
    """

    selector: Selector
    elect: Elect = "round_robin"
    dtype: torch.dtype | None = None
    order: Order = "random"
    memory = None

    @cached_property
    def laws(self) -> Laws:
        """Contractive if the selector is: no rank's unsent part exceeds its input. On the leader it shrinks
        as the selector promises, on other ranks as far as their own choice overlaps with the leader's.
        """
        laws = self.selector.laws
        return Laws(
            contractive=laws.contractive,
            stays_on_device=laws.stays_on_device,
            fixed_rounds=laws.fixed_rounds,  # all ranks add to the indices, not the leader alone
            repeats=laws.repeats,
        )

    def phase(self, ctx: ExchangeContext) -> Hashable | None:
        """The phase of the selector."""
        return phase_of(self.selector, ctx)

    def turn(self, ctx: ExchangeContext) -> bool:
        """Whether this rank leads, if ranks do so in turn: then it launches other kernels."""
        return self.elect == "round_robin" and ctx.rank == leader_in_turn(ctx, self.order)

    def start(self, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> Decode:
        """Issue two all-reduces (indices, values), or three if norms elect the leader."""
        count = self.selector.count(x.numel(), ctx)
        is_leader = self._leads(x, comm, ctx)
        indices = spread_indices(lambda: self.selector.select(x, ctx), is_leader, count, x, comm, ctx)
        wire = wire_type(self.dtype, x.dtype, ctx)
        values = take_share(x, indices, comm.world, wire, ctx.kernels)
        pending = comm.all_reduce(values)

        def decode() -> None:
            pending.wait()
            ctx.kernels[put](mean, indices, values.to(mean.dtype))

        return decode

    def _leads(self, x: Tensor, comm: Comm, ctx: ExchangeContext) -> bool | Tensor:
        if self.elect == "round_robin":
            return self.turn(ctx)
        norms = x.new_zeros(comm.world, dtype=torch.float32)
        norms[comm.rank] = torch.linalg.vector_norm(x)
        comm.all_reduce(norms).wait()
        return leads(norms, comm.rank)

    def rounds(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[Round, ...]:
        count = self.selector.count(numel, ctx)
        election = () if self.elect == "round_robin" else (Round("all_reduce", ctx.world, torch.float32),)
        values = Round("all_reduce", count, wire_type(self.dtype, dtype, ctx))
        return (*election, spread_round(count, numel), values)


def leader(
    selector: Selector,
    elect: Elect = "round_robin",
    dtype: torch.dtype | None = None,
    order: Order = "random",
) -> Leader:
    """Let one rank choose for all: in turn, or the one whose gradient has the largest norm.

    Args:
        selector: chooses elements on the leader, a number of them that follows from the unit's size.
        elect: "round_robin" or "norm".
        dtype: float16 or bfloat16, which shortens the values on the wire; `None` sends them as they are.
        order: "random" draws the order of turns anew every three cycles; "paper" is the step's number modulo
            the number of ranks.

    Raises `ValueError` for a selector without a fixed number of elements, an unknown `elect` or `order`, or
    another `dtype`.
    """
    if elect not in get_args(Elect):
        raise ValueError(f"elect={elect!r} is none of {', '.join(get_args(Elect))}")
    return Leader(check_fixed_size(selector), elect, check_wire_type(dtype), check_order(order))

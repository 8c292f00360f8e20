"""AR-Topk: one rank's top-k indices for all ranks, values by an all-reduce of a chosen algorithm.

Tyagi and Swany 2023, "Flexible communication for optimal distributed learning over unpredictable networks",
algorithm 1. The leader is each rank in turn, the one with the largest variance, or whichever serves better.
Section 3-B leaves the choice between the first two to the user; to switch by what is observed is the paper's
future work (section 5). Here the *gain* decides: how much of what all ranks have they send, (Σ‖sent‖/Σ‖x‖)².
The paper finds its gain, ‖sent‖²/‖x‖², to follow accuracy. It is known in the step itself, because norms ride
on the values' all-reduce as two elements more (norms, not squares: 16 bits must hold them). In cycles of 16N
steps each way is tried for 2N, of which the first N let the memories settle, and the better one leads the
other 12N.

Differences from the paper:

- the sum is divided by N, which algorithm 1 forgets (equation 1a has it);
- in turn, only the leader chooses: no other choice would be looked at;
- the rank that begins a cycle is drawn anew every three cycles of N steps, unless the order is "paper"
  (`gradwire.exchange.round_robin`);
- indices are coded (5 bits at c = 0.1, 8.5 at 0.01) instead of 32 or 64 bits each. Where all ranks know the
  leader beforehand they are broadcast, by a scatter and an all-gather unless told otherwise; those of an
  elected leader are summed with zeros (`spread_indices`);
- values may travel in 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor

from gradwire.codec.cast import check_wire_type, wire_type
from gradwire.codec.select.base import Selector, check_fixed_size
from gradwire.comm.base import Algorithm, Broadcasting, Comm, Round, check_algorithm
from gradwire.exchange.base import Decode
from gradwire.exchange.leader import (
    broadcast_indices,
    broadcast_round,
    leader_in_turn,
    leads,
    spread_indices,
    spread_round,
    take_share,
)
from gradwire.exchange.round_robin import Order, check_order
from gradwire.exchange.state import GAINS, LED
from gradwire.kernels.places import put
from gradwire.kernels.uploads import sent_to
from gradwire.laws import Laws, joint_phase, phase_of
from gradwire.unit.context import ExchangeContext

Election = Literal["round_robin", "variance", "auto"]

CYCLE, TRIAL = 16, 2
"""Steps per rank of a cycle, and of a trial within it."""

MARGIN = 1.02
"""Factor by which the gain of an election by variance must be larger: it costs one more round, and a choice
on every rank."""


def in_turn(elect: Election, ctx: ExchangeContext) -> bool:
    """True if ranks lead in turn in this step; the same answer on all ranks."""
    if elect != "auto":
        return elect == "round_robin"
    way, _counts = _trial(ctx)
    if way is not None:
        return way == 0
    gains = _recall(GAINS, ctx, 2)
    return not bool(gains[1] > MARGIN * gains[0])


def _trial(ctx: ExchangeContext) -> tuple[int | None, bool]:
    """Which election is on trial in this step: 0 in turn, 1 by variance, `None` for neither.

    Also returns whether the trial's gain counts: not while memories settle.
    """
    turn, step = divmod(ctx.step % (CYCLE * ctx.world), TRIAL * ctx.world)
    return (turn if turn < 2 else None), step >= (TRIAL - 1) * ctx.world


def norms_of(values: Tensor, comm: Comm) -> Tensor:
    """‖values‖ of every rank, (world,). One all-gather of one float, waited for."""
    norms = torch.empty(comm.world, 1, dtype=torch.float32, device=values.device)
    comm.all_gather(norms, torch.linalg.vector_norm(values).float().view(1)).wait()
    return norms.view(-1)


def election_round() -> Round:
    """The collective of `norms_of`."""
    return Round("all_gather", 1, torch.float32)


def gain(sent_norms: float, norms: float) -> float:
    """(Σ‖sent‖/Σ‖x‖)²: 1 if there was nothing to send, 0 if it is not finite.

    >>> gain(3.0, 5.0)
    0.36
    """
    if norms == 0.0:
        return 1.0
    share = sent_norms / norms
    return share * share if math.isfinite(share) else 0.0


def note(ctx: ExchangeContext, leader: int | Tensor, gained: float | None) -> None:
    """Keep which rank led this step, and during a trial the `gained` share. Both count once the step is
    committed.

    `leader` may be a tensor () on a device; then the counts are kept there.
    """
    led = _recall(LED, ctx, ctx.world)
    if isinstance(leader, Tensor):
        led = sent_to(led, leader.device)
    led += torch.arange(ctx.world, device=led.device) == leader
    _keep(LED, ctx, led)
    way, counts = _trial(ctx)
    if gained is not None and way is not None and counts:
        gains = _recall(GAINS, ctx, 2)
        is_first = ctx.step % (TRIAL * ctx.world) == (TRIAL - 1) * ctx.world
        gains[way] = gained / ctx.world + (0.0 if is_first else gains[way])
        _keep(GAINS, ctx, gains)


def _key(kind: str, ctx: ExchangeContext) -> tuple[str, str]:
    """Key under which a unit's numbers are kept. It contains the unit, because two may begin within one
    parameter.
    """
    return f"{kind}/{ctx.unit}", ctx.parts[0].name if ctx.parts else ""


def _recall(kind: str, ctx: ExchangeContext, size: int) -> Tensor:
    """Copy of the numbers (size,) kept under `kind`, float64; zeros at first, and after the number of ranks
    has changed.
    """
    kept = ctx.kept.get(*_key(kind, ctx))
    if kept is None or kept.numel() != size:
        return torch.zeros(size, dtype=torch.float64, device="cpu")
    return kept.clone()


def _keep(kind: str, ctx: ExchangeContext, tensor: Tensor) -> None:
    ctx.kept.put(*_key(kind, ctx), tensor)


@dataclass(frozen=True)
class ArTopK:
    """Exchange in which one rank's choice of elements holds for all; the values are all-reduced.

    It takes two collectives (indices, values), and a third if variance elects the leader. A rank's traffic
    does not grow with the number of ranks.
    """

    selector: Selector
    elect: Election = "round_robin"
    dtype: torch.dtype | None = None
    algorithm: Algorithm = "library"
    broadcast: Broadcasting = "scatter"
    order: Order = "random"
    memory = None

    @cached_property
    def laws(self) -> Laws:
        """Contractive if the selector is: no rank's unsent part exceeds its input. On the leader it shrinks
        as the selector promises, on other ranks as far as their own choice overlaps with the leader's.
        """
        laws = self.selector.laws
        # The host reads the gain of a step, which decides the election a few steps later.
        stays = laws.stays_on_device and self.elect != "auto"
        fixed = laws.fixed_rounds and self.elect == "variance"
        return Laws(contractive=laws.contractive, stays_on_device=stays, fixed_rounds=fixed)

    def phase(self, ctx: ExchangeContext) -> Hashable | None:
        """Rank that leads in turn, which is the root of the broadcast; or "elected"."""
        leader = leader_in_turn(ctx, self.order) if in_turn(self.elect, ctx) else "elected"
        return joint_phase(leader, phase_of(self.selector, ctx))

    def start(self, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> Decode:
        """Issue a broadcast and an all-reduce; or, to elect the leader, an all-gather and two all-reduces."""
        indices, leader = self._lead(x, comm, ctx)
        norm = torch.linalg.vector_norm(x) if self.elect == "auto" else None
        wire = wire_type(self.dtype, x.dtype, ctx)
        message = take_share(x, indices, comm.world, wire, ctx.kernels)
        if norm is not None:
            norms = torch.stack([torch.linalg.vector_norm(message), (norm / comm.world).to(message.dtype)])
            message = torch.cat([message, norms])
        pending = comm.all_reduce(message, self.algorithm)

        def decode() -> None:
            pending.wait()
            ctx.kernels[put](mean, indices, message[: indices.numel()].to(mean.dtype))
            note(ctx, leader, None if norm is None else gain(*message[-2:].tolist()))

        return decode

    def _lead(self, x: Tensor, comm: Comm, ctx: ExchangeContext) -> tuple[Tensor, int | Tensor]:
        """Find the leader, and let it choose. Returns the indices (k,) at which all ranks send, and the rank
        that chose them.
        """
        turn, count = leader_in_turn(ctx, self.order), self.selector.count(x.numel(), ctx)
        if in_turn(self.elect, ctx):
            places = broadcast_indices(
                lambda: self.selector.select(x, ctx), count, x, comm, ctx, turn, self.broadcast
            )
            return places, turn
        own = self.selector.select(x, ctx)
        norms = norms_of(x[own], comm)
        is_leader = leads(norms, comm.rank)
        return spread_indices(lambda: own, is_leader, count, x, comm, ctx), norms.argmax()

    def rounds(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[Round, ...]:
        count, wire = self.selector.count(numel, ctx), wire_type(self.dtype, dtype, ctx)
        sent = count + (2 if self.elect == "auto" else 0)
        values = Round("all_reduce", sent, wire, algorithm=self.algorithm)
        if in_turn(self.elect, ctx):
            return broadcast_round(count, numel, leader_in_turn(ctx, self.order), self.broadcast), values
        return election_round(), spread_round(count, numel), values


def ar_topk(
    selector: Selector,
    elect: Election = "round_robin",
    dtype: torch.dtype | None = None,
    algorithm: Algorithm = "library",
    broadcast: Broadcasting = "scatter",
    order: Order = "random",
) -> ArTopK:
    """One rank chooses for all: in turn (STAR), by variance (VAR), or whichever of the two serves better.

    Args:
        selector: chooses elements on the leader, a number of them that follows from the unit's size.
        elect: "round_robin", "variance", or "auto" for whichever serves better.
        dtype: float16 or bfloat16, which shortens the values on the wire; `None` sends them as they are.
        algorithm: algorithm of the values' all-reduce.
        broadcast: algorithm of the indices' broadcast.
        order: order of the turns: "random" is drawn anew every three cycles, "paper" is the step's number
            modulo the number of ranks.

    Raises `ValueError` for a selector without a fixed number of elements, and for other values.

    >>> from gradwire.codec.select.topk import top_k
    >>> exchange = ar_topk(top_k(0.1), "variance", algorithm="tree")
    >>> [each.verb for each in exchange.rounds(1000, torch.float32, ExchangeContext(0, 0, 0, world=4))]
    ['all_gather', 'all_reduce', 'all_reduce']
    """
    if elect not in get_args(Election):
        raise ValueError(f"elect={elect!r} is none of {', '.join(get_args(Election))}")
    if broadcast not in get_args(Broadcasting):
        raise ValueError(f"broadcast={broadcast!r} is none of {', '.join(get_args(Broadcasting))}")
    return ArTopK(
        check_fixed_size(selector),
        elect,
        check_wire_type(dtype),
        check_algorithm(algorithm),
        broadcast,
        check_order(order),
    )

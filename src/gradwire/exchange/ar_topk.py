"""AR-Topk: one rank's top-k places for all ranks, values by an all-reduce of a chosen algorithm.

Tyagi and Swany 2024, "Flexible communication for optimal distributed learning over unpredictable networks",
algorithm 1. Differences from the paper:

- the sum is divided by N, which algorithm 1 forgets;
- in turn, only the leader chooses: no other choice would be looked at;
- places are coded (5 bits at c = 0.1, 8.5 at 0.01) instead of 32 or 64 bits each; of a leader whom all know
  beforehand they are broadcast, by a scatter and an all-gather unless told otherwise, while an elected
  one's are summed with zeros (see `gradwire.exchange.spread`);
- values may travel in 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from gradwire.codec.cast import check_wire_type, wire_type
from gradwire.codec.select.base import Selector, check_fixed_size
from gradwire.comm.base import Algorithm, Broadcasting, Comm, Round, check_algorithm
from gradwire.exchange.base import ExchangeLaws, Finish
from gradwire.exchange.election import Election, election_round, gain, in_turn, note, strongest
from gradwire.exchange.shares import take_share
from gradwire.exchange.spread import broadcast_indices, broadcast_round, spread_indices, spread_round
from gradwire.kernels import put
from gradwire.moment import Moment


@dataclass(frozen=True)
class ArTopK:
    """Two rounds (places, values), three where variance elects the leader; as many bytes on any world."""

    selector: Selector
    elect: Election = "round_robin"
    dtype: torch.dtype | None = None
    algorithm: Algorithm = "library"
    broadcast: Broadcasting = "scatter"
    memory = None

    @property
    def laws(self) -> ExchangeLaws:
        """Contractive as the selector: on the leader exactly, elsewhere as far as choices overlap."""
        return ExchangeLaws(contractive=self.selector.laws.contractive)

    def start(self, x: Tensor, mean: Tensor, comm: Comm, at: Moment) -> Finish:
        """A broadcast and an all-reduce, or all-gather and two all-reduces."""
        indices, leader = self._lead(x, comm, at)
        norm = torch.linalg.vector_norm(x) if self.elect == "auto" else None
        message = take_share(x, indices, comm.world, wire_type(self.dtype, x.dtype, at))
        if norm is not None:
            norms = torch.stack([torch.linalg.vector_norm(message), (norm / comm.world).to(message.dtype)])
            message = torch.cat([message, norms])
        pending = comm.all_reduce(message, self.algorithm)

        def finish() -> None:
            pending.wait()
            put(mean, indices, message[: indices.numel()].to(mean.dtype))
            note(at, leader, None if norm is None else gain(*message[-2:].tolist()))

        return finish

    def _lead(self, x: Tensor, comm: Comm, at: Moment) -> tuple[Tensor, int]:
        """The places where all ranks send, and the rank that has chosen them."""
        turn, count = at.step % comm.world, self.selector.count(x.numel(), at)
        if in_turn(self.elect, at):
            own = self.selector.select(x, at) if comm.rank == turn else None
            return broadcast_indices(own, count, x, comm, turn, self.broadcast), turn
        own = self.selector.select(x, at)
        leader = strongest(x[own], comm)
        return spread_indices(own if comm.rank == leader else None, count, x, comm), leader

    def rounds(self, numel: int, dtype: torch.dtype, at: Moment) -> tuple[Round, ...]:
        count, wire = self.selector.count(numel, at), wire_type(self.dtype, dtype, at)
        sent = count + (2 if self.elect == "auto" else 0)
        values = Round("all_reduce", sent, wire, algorithm=self.algorithm)
        if in_turn(self.elect, at):
            return broadcast_round(count, numel, at.step % at.world, self.broadcast), values
        return election_round(), spread_round(count, numel), values


def ar_topk(
    selector: Selector,
    elect: Election = "round_robin",
    dtype: torch.dtype | None = None,
    algorithm: Algorithm = "library",
    broadcast: Broadcasting = "scatter",
) -> ArTopK:
    """One rank chooses for all: in turn (STAR), by variance (VAR), or whichever of the two serves better.

    `dtype` (float16 or bfloat16) shortens the values on the wire; `algorithm` is how they are summed.

    >>> from gradwire.codec.select.topk import top_k
    >>> exchange = ar_topk(top_k(0.1), "variance", algorithm="tree")
    >>> [each.verb for each in exchange.rounds(1000, torch.float32, Moment(0, 0, 0, world=4))]
    ['all_gather', 'all_reduce', 'all_reduce']
    """
    if elect not in get_args(Election):
        raise ValueError(f"elect={elect!r} is none of {', '.join(get_args(Election))}")
    if broadcast not in get_args(Broadcasting):
        raise ValueError(f"broadcast={broadcast!r} is none of {', '.join(get_args(Broadcasting))}")
    return ArTopK(
        check_fixed_size(selector), elect, check_wire_type(dtype), check_algorithm(algorithm), broadcast
    )

"""gTop-k: a tree merges the ranks' own top-k two by two into one choice for all. Traffic grows with the
logarithm of the number of ranks.

Shi, Wang, Zhao, Tang, Wang, Huang and Chu 2019, "A distributed synchronous SGD algorithm with global top-k
sparsification for low bandwidth networks", algorithm gTopKAllReduce: in each of log2 N rounds the partner's
k sums are added to one's own, and the k largest of the merged set go on.

Differences from the paper:

- The tree elects the places alone, and an all-reduce adds up what *every* rank has there. The paper's mean
  is the sum that reaches the root: where a place is dropped in one branch and survives through another, the
  first branch's part is in no sum and, since the place is among the final ones, in no residual either. Here
  nothing is lost, and places cost what places with the root's values would.
- No rank keeps what others contributed, though a merging rank knows what it drops.
- Places and values of a round are one message, places in their shortest form; the final places are spread
  by an all-reduce of zeros, which needs no root. Any world: a rank without a partner waits.
- The choice is made per unit, not over the fused gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codec.select.base import check_ratio, count_kept
from gradwire.codec.sparse import SparseLayout
from gradwire.comm.base import Comm, Round
from gradwire.exchange.base import Decode
from gradwire.exchange.compose import remember
from gradwire.exchange.leader import spread_indices, spread_round
from gradwire.kernels.dispatch import Kernels
from gradwire.kernels.places import put, take
from gradwire.kernels.topk import topk_indices
from gradwire.laws import Laws
from gradwire.recipes.base import Composition, register
from gradwire.unit.context import ExchangeContext


@dataclass(frozen=True)
class GTopK:
    """Traffic per rank: log2 N times k places and values, then 2(N-1)/N times as much."""

    ratio: float
    """Guaranteed: on each rank, the unsent part is x without k elements, never larger than x. No smaller
    share is guaranteed: elements that cancel in the ranks' sum stay in the memories, grow while ranks
    disagree, and occupy places among their k."""

    laws = Laws(contractive=True, fixed_rounds=True)
    memory = None

    def start(self, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> Decode:
        """ceil(log2 N) shifts (places and values), two all-reduces."""
        count = count_kept(self.ratio, x.numel())
        if count == 0:
            return lambda: None
        elected = self._elect(x, SparseLayout(count, x.numel(), x.dtype), comm, ctx.kernels)
        indices = spread_indices(lambda: elected, comm.rank == 0, count, x, comm, ctx)
        values = ctx.kernels[take](x, indices, 1.0 / comm.world)
        pending = comm.all_reduce(values)

        def decode() -> None:
            pending.wait()
            ctx.kernels[put](mean, indices, values)

        return decode

    def _elect(self, x: Tensor, chosen: SparseLayout, comm: Comm, kernels: Kernels) -> Tensor:
        """Elect the places of the largest sums. Returns the places (k,) that reached this rank; those of rank
        0 are the choice of all.

        A shift in each of ⌈log2 N⌉ rounds. `chosen` is the layout of k of the elements of x.
        """
        places = kernels[topk_indices](x, chosen.count)
        # 1/N: a sum of N numbers near the end of the range must not be taken for Inf.
        values = x[places] * (1.0 / comm.world)
        for by in _strides(comm.world):
            payload = chosen.write(places, values)
            received = torch.empty_like(payload)
            # All ranks take part, so that the order of rounds depends on no rank. Only merges that can reach
            # rank 0 are made.
            comm.shift(received, payload, -by).wait()
            if comm.rank % (2 * by) == 0 and comm.rank + by < comm.world:
                places, values = _merged(places, values, *chosen.read(received), kernels)
        return places

    def rounds(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[Round, ...]:
        count = count_kept(self.ratio, numel)
        if count == 0:
            return ()
        size = SparseLayout(count, numel, dtype).shape.bytes
        tree = (Round("shift", size, torch.uint8, -by) for by in _strides(ctx.world))
        return (*tree, spread_round(count, numel), Round("all_reduce", count, dtype))


def _strides(world: int) -> tuple[int, ...]:
    """1, 2, 4 … below `world`: how far partners are apart."""
    return tuple(2**j for j in range((world - 1).bit_length()))


def _merged(
    places: Tensor, values: Tensor, others: Tensor, theirs: Tensor, kernels: Kernels
) -> tuple[Tensor, Tensor]:
    """Add two sparse vectors of k values, and keep the k largest sums. Returns their ascending places (k,)
    and the sums (k,).

    `places` and `values` are those of one vector, `others` and `theirs` those of the other.
    """
    union, at = torch.unique(torch.cat([places, others.long()]), return_inverse=True)
    sums = values.new_zeros(union.numel())
    sums.index_add_(0, at[: places.numel()], values)
    sums.index_add_(0, at[places.numel() :], theirs)
    kept = kernels[topk_indices](sums, places.numel())
    return union[kept], sums[kept]


def gtop_k(ratio: float) -> GTopK:
    """A tree of merged top-k elects the share `ratio` of places; all ranks send their values there.

    >>> from gradwire.unit.context import ExchangeContext
    >>> ctx = ExchangeContext(0, 0, 0, world=5)
    >>> [round_.by for round_ in gtop_k(0.01).rounds(1000, torch.float32, ctx)[:3]]
    [-1, -2, -4]
    """
    return GTopK(check_ratio(ratio))


@register
def gtopk(ratio: float = 0.01) -> Composition:
    """The top-k of a tree of merged top-k with error feedback: traffic grows with the world's logarithm.

    Travels: merged choices of places up a tree, and all ranks' values at the winner's.
    Paper: Shi et al. 2019, "A distributed synchronous SGD algorithm with global top-k sparsification".
    Use when: comparing with it: a leader's choice costs less and serves as well.

    Args:
        ratio: share of the elements to send, above 0 and at most 1.
    """
    return Composition(remember(gtop_k(ratio)))

"""Ok-Topk: a sparse all-reduce whose traffic does not grow with the world. The unit is cut into one region
per rank, whose owner adds up what the ranks chose there and hands the largest sums to all.

Li and Hoefler 2022, "Near-optimal sparse allreduce for distributed deep learning", section 3.1: regions are
cut such that each gets as many of the chosen elements. As in the paper, what a rank sent and the final
choice leaves out stays with it. N ranks pay 2N² words beside those that grow with k, so small units on many
ranks exceed the paper's bound of 6k words (4096 elements at 1 % on 8 ranks: 7k).

Differences from the paper:

- Sizes are fixed, so that no round waits for sizes to be exchanged. A rank sends each owner at most `slack`
  times its even share, the largest; an owner keeps its even share of the k largest sums. The paper
  thresholds the sums for the whole unit and balances the pieces by a further round.
- Choice and region bounds are exact and made anew each step and per unit; the paper estimates thresholds
  and re-evaluates bounds every tau steps, because its exact choice was slow.
- One all-to-all of one message per pair, not point-to-point messages in a rotated order.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from gradwire.codec.select.base import Selector
from gradwire.codec.select.topk import top_k
from gradwire.comm.base import Comm, Round
from gradwire.errors import WireError
from gradwire.exchange.base import Decode
from gradwire.exchange.compose import remember
from gradwire.kernels.dispatch import Kernels
from gradwire.kernels.payload import Buffer
from gradwire.kernels.places import put
from gradwire.kernels.topk import topk_indices
from gradwire.laws import Laws, phase_of
from gradwire.recipes.base import Composition, register
from gradwire.unit.context import ExchangeContext


@dataclass(frozen=True)
class OkTopK:
    """Sparse all-reduce in which rank r owns region r of the unit.

    Every rank selects k of its elements and sends each one to the owner of its region. An owner sums them and
    sends its largest sums to all ranks; the mean is zero elsewhere. The unit has N regions, for N ranks.

    Traffic per rank in words of 4 bytes, for float32:

    - bounds of the regions: 4(N - 1);
    - selected elements to the owners: (N - 1)(1 + 2·ceil(slack·k/N)), of which 1 is their count;
    - largest sums to all ranks: (N - 1)(1 + 2·ceil(k/N)).

    With a slack of 2 this is 6k(N - 1)/N plus a part that does not depend on k. It is below the paper's bound
    of 6k if k is above about 2N².

    Args:
        selector: each rank's own selection.
        slack: elements that an owner takes from one rank at most, as a multiple of k/N.
    """

    selector: Selector
    slack: float = 2.0
    memory = None

    @cached_property
    def laws(self) -> Laws:
        """Contractive if the selector is.

        Guaranteed: on each rank, the unsent part is x without some elements, never larger than x. No smaller
        share is guaranteed: elements that cancel in the ranks' sum stay in the memories, grow while ranks
        disagree, and occupy places among their k.
        """
        laws = self.selector.laws
        return Laws(contractive=laws.contractive, fixed_rounds=laws.fixed_rounds)

    def phase(self, ctx: ExchangeContext) -> Hashable | None:
        """The phase of the selector."""
        return phase_of(self.selector, ctx)

    def start(self, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> Decode:
        """All-reduce (bounds), all-to-all (elements), all-gather (sums).

        `mean` is scratch until the end.
        """
        if x.numel() == 0:
            return lambda: None
        to_owner, to_all = self._slots(x.numel(), x.dtype, ctx)
        chosen = self.selector.select(x, ctx)
        bounds = _bounds(chosen, x.numel(), comm)
        sent = _fitting(chosen, bounds, x, to_owner.capacity, ctx.kernels)
        received = _to_owners(sent, x, to_owner, comm)
        start, stop = bounds[comm.rank : comm.rank + 2]
        own = _largest_sums(received, to_owner, to_all, mean, start, stop, ctx.kernels)
        gathered = own.new_empty(comm.world, to_all.bytes)
        pending = comm.all_gather(gathered, own)

        def decode() -> None:
            pending.wait()
            _land(gathered, to_all, bounds, torch.cat(sent), x, mean, ctx.kernels)

        return decode

    def _slots(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[Slots, Slots]:
        """Layouts of the message from a rank to an owner, and of that from an owner to all ranks, for a unit
        of `numel` elements of type `dtype`. Raises `ValueError` beyond 2^31 elements.
        """
        if numel > 2**31:
            raise ValueError(
                f"a unit of {numel} elements is too large: indices travel in 32 bits. Cut it, or use topk"
            )
        count = self.selector.count(numel, ctx)
        capacity = min(count, math.ceil(self.slack * count / ctx.world))
        return Slots(capacity, dtype), Slots(-(-count // ctx.world), dtype)

    def rounds(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[Round, ...]:
        if numel == 0:
            return ()
        to_owner, to_all = self._slots(numel, dtype, ctx)
        return (
            Round("all_reduce", ctx.world, torch.int64),
            Round("all_to_all", ctx.world * to_owner.bytes, torch.uint8),
            Round("all_gather", to_all.bytes, torch.uint8),
        )


def _bounds(chosen: Tensor, numel: int, comm: Comm) -> list[int]:
    """Starts of the N regions and the end of the last one (N + 1,), ascending, equal on all ranks. One
    all-reduce.

    `chosen` are this rank's ascending indices among `numel` elements. Each start is the mean over ranks of
    the position that splits a rank's selection evenly. The sum is one of integers: exact in any order. Raises
    `WireError` if the starts do not ascend.
    """
    parts, count = torch.arange(comm.world, device=chosen.device), chosen.numel()
    # A selector may choose nothing at all.
    starts = chosen[parts * count // comm.world] if count else parts * numel // comm.world
    starts[0] = 0
    comm.all_reduce(starts).wait()
    bounds = [*(starts // comm.world).tolist(), numel]
    if bounds[0] != 0 or any(start > stop for start, stop in pairwise(bounds)):
        raise WireError(f"the regions that ranks agree on do not ascend from 0 to {numel}: {bounds}")
    return bounds


def _fitting(
    chosen: Tensor, bounds: Sequence[int], x: Tensor, capacity: int, kernels: Kernels
) -> list[Tensor]:
    """Per region, the `chosen` indices that lie in it; if they are more than `capacity`, those at which x is
    largest. `bounds` (N + 1,) are the regions'.
    """
    splits = torch.searchsorted(chosen, torch.tensor(bounds, device=chosen.device)).tolist()
    inside = [chosen[start:stop] for start, stop in pairwise(splits)]
    return [
        places if places.numel() <= capacity else places[kernels[topk_indices](x[places], capacity)]
        for places in inside
    ]


def _to_owners(sent: Sequence[Tensor], x: Tensor, slots: Slots, comm: Comm) -> Tensor:
    """Send x/N at the places sent[r] to rank r, laid out as `slots`. One all-to-all. Returns what the ranks
    sent here, uint8 (N, bytes).
    """
    rows = torch.zeros(comm.world, slots.bytes, dtype=torch.uint8, device=x.device)
    for row, places in zip(rows, sent, strict=True):
        slots.write(row, places, x[places] * (1.0 / comm.world))
    received = torch.empty_like(rows)
    comm.all_to_all(received, rows).wait()
    return received


def _largest_sums(
    received: Tensor,
    to_owner: Slots,
    to_all: Slots,
    scratch: Tensor,
    start: int,
    stop: int,
    kernels: Kernels,
) -> Tensor:
    """Add up the messages for this rank's region, elements start … stop - 1, and select the largest sums.

    Args:
        received: uint8 (N, bytes), laid out as `to_owner`.
        to_owner, to_all: layouts of messages to an owner, and to all ranks.
        scratch: (numel,), overwritten in the region.
        start, stop: the region.
        kernels: kernels for the device.

    Returns the payload (bytes,) for all ranks, laid out as `to_all`.
    """
    region = scratch[start:stop].zero_()
    for row in received:
        places, values = to_owner.read(row, start, stop)
        region.index_add_(0, places.long() - start, values)
    kept = kernels[topk_indices](region, min(to_all.capacity, stop - start))
    payload = received.new_zeros(to_all.bytes)
    to_all.write(payload, kept + start, region[kept])
    return payload


def _land(
    gathered: Tensor,
    slots: Slots,
    bounds: Sequence[int],
    sent: Tensor,
    x: Tensor,
    mean: Tensor,
    kernels: Kernels,
) -> None:
    """Write all owners' sums to `mean`, and remove from x the sent elements that are in one of them.

    Args:
        gathered: uint8 (N, bytes), one payload from each owner.
        slots: their layout.
        bounds: (N + 1,), the regions.
        sent: indices of the elements that this rank has sent.
        x: (numel,), keeps the other elements.
        mean: (numel,), written.
        kernels: kernels for the device.
    """
    parts = [slots.read(row, *region) for row, region in zip(gathered, pairwise(bounds), strict=True)]
    places, sums = (torch.cat(part) for part in zip(*parts, strict=True))
    kernels[put](mean, places, torch.ones_like(sums))
    x[sent[mean[sent] != 0]] = 0.0
    kernels[put](mean, places, sums)


def ok_topk(selector: Selector, slack: float = 2.0) -> OkTopK:
    """Sum what the selectors of all ranks choose, region by region, and keep the largest sums.

    `slack` is how many times its even share a rank may send to one owner; what does not fit stays unsent.
    At 1 everything uneven waits, at N nothing does.

    Raises `ValueError` for `slack` below 1.

    >>> from gradwire.codec.select.topk import top_k
    >>> ok_topk(top_k(0.01)).slack
    2.0
    """
    if not 1.0 <= slack < math.inf:
        raise ValueError(f"slack={slack} must be a number of at least 1; 2 leaves room for uneven choices")
    return OkTopK(selector, slack)


@dataclass(frozen=True)
class Slots:
    """Buffer for at most `capacity` places below 2^31 and values of `dtype`: their number, places, values.

    A buffer of zeros, as sent by a rank whose encoding failed, is empty.

    >>> slots = Slots(capacity=3, dtype=torch.float32)
    >>> payload = torch.zeros(slots.bytes, dtype=torch.uint8)
    >>> slots.write(payload, torch.tensor([7, 9]), torch.tensor([1.0, 2.0]))
    >>> slots.read(payload, 5, 10)
    (tensor([7, 9], dtype=torch.int32), tensor([1., 2.]))
    """

    capacity: int
    dtype: torch.dtype

    @property
    def _buffer(self) -> Buffer:
        return Buffer(1 + self.capacity, self.capacity, self.dtype)

    @property
    def bytes(self) -> int:
        return self._buffer.bytes

    def write(self, payload: Tensor, places: Tensor, values: Tensor) -> None:
        """Fill a zeroed `payload` (bytes,) uint8 with `places` (count,) and `values` (count,)."""
        count = places.numel()
        words, room = self._buffer.parts(payload)
        words[0] = count
        words[1 : 1 + count] = places
        room[:count] = values

    def read(self, payload: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Places (count,) int32 and values (count,), as views; a place outside start … stop - 1 or an
        impossible count raise `WireError`."""
        words, values = self._buffer.parts(payload)
        count = int(words[0])
        if not 0 <= count <= self.capacity:
            raise WireError(f"a peer sent {count} values where {self.capacity} fit")
        places = words[1 : 1 + count]
        if count and not start <= int(places.min()) <= int(places.max()) < stop:
            raise WireError(f"a peer sent places outside {start} … {stop - 1}")
        return places, values[:count]


@register
def oktopk(ratio: float = 0.01) -> Composition:
    """Every rank's own top-k, summed by the owner of each region; the largest sums go to all ranks.

    Travels: every rank's own k elements to the owners of regions, and the owners' largest sums to all: in all
        about 6k words of 4 bytes per rank, whatever the number of ranks.
    Paper: Li and Hoefler 2022, "Near-optimal sparse allreduce for distributed deep learning".
    Use when: there are many ranks and their own choices differ.

    Args:
        ratio: share of the elements to send, above 0 and at most 1.
    """
    return Composition(remember(ok_topk(top_k(ratio))))

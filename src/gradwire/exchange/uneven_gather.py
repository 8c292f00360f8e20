"""All-gather for selectors without a fixed size: all ranks send as many elements as the largest choice of any
rank.

A length that depends on the data must be known to all ranks before it reaches a collective. So counts are
gathered first. A peer's count is accepted up to the bound that the selector's configuration gives.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gradwire.codec.cast import check_wire_type, wire_type
from gradwire.codec.select.base import Selector
from gradwire.codec.select.threshold import fill_up
from gradwire.codec.sparse import SparseLayout
from gradwire.comm.base import DONE, Comm, Pending, Round
from gradwire.errors import TransportError, WireError
from gradwire.exchange.base import Decode
from gradwire.laws import Laws, phase_of
from gradwire.unit.context import ExchangeContext


@dataclass(frozen=True)
class Agreed:
    """Two all-gathers: one count per rank, then payloads of the largest count.

    A rank that has chosen fewer elements fills its payload with others. Counts are sent plus one, so that 0
    means a rank that failed. If a rank has failed, or none has chosen anything, no payload is sent. A failure
    after the counts is raised by `decode`, because peers wait for a payload.
    """

    selector: Selector
    dtype: torch.dtype | None = None
    memory = None

    @cached_property
    def laws(self) -> Laws:
        """Contractive if the selector is; conserves, because what is not chosen stays in `x`."""
        laws = self.selector.laws
        return Laws(contractive=laws.contractive, fixed_rounds=laws.fixed_rounds)

    def phase(self, ctx: ExchangeContext) -> Hashable | None:
        """The phase of the selector."""
        return phase_of(self.selector, ctx)

    def start(self, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> Decode:
        failures: list[BaseException] = []
        chosen = self.selector.select(x, ctx)
        count = self._largest(chosen.numel(), x, comm, ctx)
        mean.zero_()
        pending: Pending = DONE
        layout = SparseLayout(count, x.numel(), wire_type(self.dtype, x.dtype, ctx))
        payloads = _room(comm.world, layout.shape.bytes, x)
        if count > 0:
            pending = comm.all_gather(payloads, _take(x, chosen, layout, ctx, failures))

        def decode() -> None:
            pending.wait()
            for error in failures:
                raise error
            for payload in payloads if count > 0 else ():
                layout.add(payload, mean, 1.0 / comm.world, ctx.see, ctx.kernels)

        return decode

    def _largest(self, mine: int, x: Tensor, comm: Comm, ctx: ExchangeContext) -> int:
        """Gather the counts of all ranks, `mine` on this one, and return the largest; 0 if a rank has failed.
        One all-gather.

        Raises `WireError` if a count is beyond what the selector may choose of x.
        """
        told = torch.empty(comm.world, 1, dtype=torch.int64, device=x.device)
        comm.all_gather(told, torch.tensor([mine + 1], device=x.device)).wait()
        counts = told.view(-1) - 1
        largest, bound = int(counts.max()), self.selector.count(x.numel(), ctx)
        if not -1 <= int(counts.min()) <= largest <= bound:
            raise WireError(f"a peer announces {counts.tolist()} elements, outside 0 … {bound}")
        return largest if int(counts.min()) >= 0 else 0

    def rounds(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[Round, ...]:
        """An all-gather of counts, and one of payloads, which is announced at its largest size."""
        layout = SparseLayout(self.selector.count(numel, ctx), numel, wire_type(self.dtype, dtype, ctx))
        payload = Round("all_gather", layout.shape.bytes, torch.uint8, at_most=True)
        return Round("all_gather", 1, torch.int64), payload


def _room(world: int, size: int, x: Tensor) -> Tensor:
    """Allocate zeros (world, size) uint8 for all ranks' payloads; raises `TransportError` if memory is
    lacking.
    """
    try:
        return torch.zeros(world, size, dtype=torch.uint8, device=x.device)
    except (MemoryError, RuntimeError) as error:
        # Zeros of the announced size would not fit what the peers issue: nothing can be issued any more.
        raise TransportError(f"no memory for {world} payloads of {size} bytes") from error


def _take(
    x: Tensor, chosen: Tensor, layout: SparseLayout, ctx: ExchangeContext, failures: list[BaseException]
) -> Tensor:
    """Take this rank's `chosen` elements out of x, filled up to the number in `layout`. Returns the payload,
    uint8 (bytes,). If that fails, append the error to `failures` and return zeros.
    """
    try:
        indices = fill_up(chosen, layout.count, layout.numel, ctx)
        payload = layout.take(x, indices, ctx.kernels)
    except BaseException as error:
        failures.append(error)
        return torch.zeros(layout.shape.bytes, dtype=torch.uint8, device=x.device)
    return payload


def agreed(selector: Selector, dtype: torch.dtype | None = None) -> Agreed:
    """All-gather the elements that `selector` chooses, without a fixed number of them.

    >>> from gradwire.codec.select.threshold import reused_threshold
    >>> exchange = agreed(reused_threshold(0.01))
    >>> [each.verb for each in exchange.rounds(1000, torch.float32, ExchangeContext(0, 0, 0, world=4))]
    ['all_gather', 'all_gather']
    """
    return Agreed(selector, check_wire_type(dtype))

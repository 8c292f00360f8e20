"""All-gather of as many elements as the rank with the most has chosen: for selectors of no fixed size.

A length that depends on the data must be known to all ranks before it reaches a collective: counts travel
first, and a peer's count is believed up to the bound that the selector's configuration gives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codec.cast import check_wire_type, wire_type
from gradwire.codec.select.base import Selector
from gradwire.codec.select.threshold import fill_up
from gradwire.codec.sparse import SparseLayout
from gradwire.comm.base import DONE, Comm, Pending, Round
from gradwire.errors import TransportError, WireError
from gradwire.exchange.base import ExchangeLaws, Finish
from gradwire.moment import Moment


@dataclass(frozen=True)
class Agreed:
    """Two all-gathers: one count per rank, then payloads for the largest of them.

    Room that a rank has paid for and does not need carries further elements. When no rank has chosen
    anything, or one brings the zero of a rank that failed, nothing else travels: counts are sent as one more.
    What fails after that is raised in the end, because peers wait for a payload.
    """

    selector: Selector
    dtype: torch.dtype | None = None
    memory = None

    @property
    def laws(self) -> ExchangeLaws:
        """Contractive as the selector is."""
        return ExchangeLaws(contractive=self.selector.laws.contractive)

    def start(self, x: Tensor, mean: Tensor, comm: Comm, at: Moment) -> Finish:
        failures: list[BaseException] = []
        chosen = self.selector.select(x, at)
        count = self._largest(chosen.numel(), x, comm, at)
        mean.zero_()
        pending: Pending = DONE
        layout = SparseLayout(count, x.numel(), wire_type(self.dtype, x.dtype, at))
        payloads = _room(comm.world, layout.buffer.bytes, x)
        if count > 0:
            pending = comm.all_gather(payloads, _take(x, chosen, layout, at, failures))

        def finish() -> None:
            pending.wait()
            for error in failures:
                raise error
            for payload in payloads if count > 0 else ():
                layout.add(payload, mean, 1.0 / comm.world, at.see)

        return finish

    def _largest(self, mine: int, x: Tensor, comm: Comm, at: Moment) -> int:
        """How many elements every rank sends; none, if one has failed."""
        told = torch.empty(comm.world, 1, dtype=torch.int64, device=x.device)
        comm.all_gather(told, torch.tensor([mine + 1], device=x.device)).wait()
        counts = told.view(-1) - 1
        largest, bound = int(counts.max()), self.selector.count(x.numel(), at)
        if not -1 <= int(counts.min()) <= largest <= bound:
            raise WireError(f"a peer announces {counts.tolist()} elements, outside 0 … {bound}")
        return largest if int(counts.min()) >= 0 else 0

    def rounds(self, numel: int, dtype: torch.dtype, at: Moment) -> tuple[Round, ...]:
        """The second is an upper bound."""
        layout = SparseLayout(self.selector.count(numel, at), numel, wire_type(self.dtype, dtype, at))
        payload = Round("all_gather", layout.buffer.bytes, torch.uint8, at_most=True)
        return Round("all_gather", 1, torch.int64), payload


def _room(world: int, size: int, x: Tensor) -> Tensor:
    """Memory (world, size) for what the ranks have agreed to send."""
    try:
        return torch.zeros(world, size, dtype=torch.uint8, device=x.device)
    except (MemoryError, RuntimeError) as error:
        # Zeros of the announced size would not fit what the peers issue: nothing can be issued any more.
        raise TransportError(f"no memory for {world} payloads of {size} bytes") from error


def _take(
    x: Tensor, chosen: Tensor, layout: SparseLayout, at: Moment, failures: list[BaseException]
) -> Tensor:
    """The payload of this rank, which is taken from x; zeros after a failure."""
    try:
        indices = fill_up(chosen, layout.count, layout.numel, at)
        payload = layout.take(x, indices)
    except BaseException as error:
        failures.append(error)
        return torch.zeros(layout.buffer.bytes, dtype=torch.uint8, device=x.device)
    return payload


def agreed(selector: Selector, dtype: torch.dtype | None = None) -> Agreed:
    """All-gather what `selector` chooses, however much that is; values in float16 or bfloat16 on request."""
    return Agreed(selector, check_wire_type(dtype))

"""The step's last all-reduce: small dense gradients, and the verdict's table behind them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.comm import Metered
from gradwire.ddp.verdict import Row, Verdict

SMALL_BYTES = 64 * 1024
"""Below this, a run of dense gradients is cheaper in the tail than in a collective of its own."""


class Tail:
    """One float32 buffer: every region's gradient times 1/W, then one row per rank.

    Types up to 32 bits are summed in float32, which is never less precise than DDP's own sum.
    """

    def __init__(self, regions: list[Tensor], row: Row, comm: Metered, device: torch.device) -> None:
        self._regions = regions
        self._world = comm.world
        self.comm = comm
        self._numel = sum(region.numel() for region in regions)
        size = self._numel + comm.world * row.width
        self.buffer = torch.empty(size, dtype=torch.float32, device=device)
        if regions:
            # In one call: there may be hundreds of them.
            torch.cat([*regions], out=self.buffer[: self._numel]).mul_(1.0 / comm.world)
        row.write(self._table, comm.rank)
        self._pending = comm.all_reduce(self.buffer)

    @property
    def _table(self) -> Tensor:
        return self.buffer[self._numel :].view(self._world, -1)

    def _staged(self) -> tuple[Tensor, ...]:
        sizes = [region.numel() for region in self._regions]
        return torch.split(self.buffer[: self._numel], sizes)

    def then(self, callback: Callable[[], None]) -> None:
        """See `Pending.then`."""
        self._pending.then(callback)

    def verdict(self) -> Verdict:
        """What the ranks said. Raises `TransportError` when the all-reduce failed."""
        self._pending.wait()
        return Verdict.read(self._table)

    def is_finite(self) -> bool:
        """Whether the mean of the small gradients is finite; the same answer on all ranks."""
        return bool(self.buffer[: self._numel].isfinite().all())

    def land(self) -> None:
        """Write the means back to where the gradients came from."""
        if self._regions:
            # In one call, as above.
            torch._foreach_copy_(self._regions, self._staged())

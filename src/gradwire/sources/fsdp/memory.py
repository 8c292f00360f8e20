"""Unsent gradient of one module: the rounding errors of the sums that a rank scattered.

It is unsharded, because every rank rounds the rows that it sends to all others: the size of a shard times the
number of ranks. If ranks of a node sum first, a rank rounds rows for one rank of each node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gradwire.unit.context import Fates


class Unsent:
    """Unsent gradient as rows (targets, elements), one for each rank to which it belongs.

    With `can_go_back`, the earlier state is kept until it is known whether an optimizer has used a scatter.
    That doubles the memory.
    """

    def __init__(
        self,
        columns: Mapping[str, slice],
        targets: Sequence[int],
        world: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        can_go_back: bool,
    ) -> None:
        """Allocate the memory of one module, with zeros.

        Args:
            columns: elements of a row that belong to each parameter.
            targets: ascending ranks, of which each has a row.
            world: the number of ranks.
            dtype, device: type and place of the memory.
            can_go_back: whether the earlier state is kept.
        """
        self.columns, self._world = columns, world
        self.places = torch.tensor(list(targets), device=device)
        """The ranks that rows are meant for."""
        self.elements = max(each.stop for each in columns.values())
        self._latest = torch.zeros(len(targets), self.elements, dtype=dtype, device=device)
        self._before = torch.zeros_like(self._latest) if can_go_back else None
        self._is_pending = self._is_empty = False

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        return self._latest.nbytes * (1 if self._before is None else 2)

    @property
    def is_done(self) -> bool:
        """True if everything was sent without a memory, and an optimizer has used it."""
        return self._is_empty and not self._is_pending

    def roll_back(self, fates: Fates | None) -> None:
        """Make the last scatters final, undo them, or keep that open, by parameter; `None`: all are final."""
        if not self._is_pending:
            return
        if fates is None or self._before is None:
            self._is_pending = False
            return
        for name, column in self.columns.items():
            latest, before = self._latest[:, column], self._before[:, column]
            if name in fates.dropped:
                latest.copy_(before)
                self._is_empty = False
            elif name not in fates.open:
                before.copy_(latest)
        self._is_pending = not fates.open.isdisjoint(self.columns)

    def add_to(self, rows: Tensor, scale: Tensor | None) -> None:
        """rows (targets, elements) += unsent gradient, times the loss scale."""
        rows.add_(self._latest if scale is None else self._latest * scale.to(rows.dtype))

    def keep(self, left: Tensor | None, scale: Tensor | None) -> None:
        """Remember the rounding errors of rows (targets, elements), where they are finite; `None` means none.

        In blocks with NaN or Inf, the earlier unsent gradient stays.
        """
        known, self._is_empty = self._latest, left is None
        if self._before is not None and not self._is_pending:
            self._latest, self._before = self._before, self._latest
        self._is_pending = True
        if left is None:
            self._latest.zero_()
            return
        rows = left if scale is None else left / scale.to(left.dtype)
        self._latest.copy_(torch.where(rows.isfinite(), rows, known))

    def committed(self, name: str) -> Tensor:
        """A parameter's rows (targets, elements), without scatters that no optimizer has used; a view."""
        plane = self._before if self._is_pending and self._before is not None else self._latest
        return plane[:, self.columns[name]]

    def of_all(self, name: str) -> Tensor:
        """As `committed`, with rows (world, elements) for all ranks: zeros for ranks that are no targets."""
        rows = self.committed(name)
        return rows.new_zeros(self._world, rows.shape[1]).index_copy_(0, self.places, rows)

    def clear(self) -> None:
        """Set the unsent gradient to zero, and drop pending states."""
        self._latest.zero_()
        self._is_pending = self._is_empty = False

"""Findings of kernels in the gradients of a step, which stay on the device."""

from __future__ import annotations

import torch
from torch import Tensor


class Marks:
    """Marks of a flat buffer with `count` slots: int32 (2 · count + 2,).

    The first 2 · count + 1 are those of `gradwire.kernels.compensation.compensate_marked`, the last one is
    that of `gradwire.kernels.blocks.land_shards`. The last two concern the whole flat buffer, and are 0 as
    long as everything is finite.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._count, self._device = count, device
        self._values: Tensor | None = None
        self._are_open = False

    def begun(self) -> Tensor:
        """Marks of the running step, int32 (2 · count + 2,), for kernels to set; cleared at the first call in
        a step.
        """
        if self._values is None:
            self._values = torch.empty(2 * self._count + 2, dtype=torch.int32, device=self._device)
        if not self._are_open:
            self._values.zero_()
            self._are_open = True
        return self._values

    def close(self) -> Tensor | None:
        """End the marks of the running step. Returns them, int32 (2 · count + 2,), or `None` if `begun` was
        not called in this step.
        """
        was_open, self._are_open = self._are_open, False
        return self._values if was_open else None

    def idle(self, values: Tensor) -> list[int]:
        """Numbers of the idle slots, by marks that are on the host."""
        flags = values[self._count : 2 * self._count].tolist()
        return [number for number, is_idle in enumerate(flags) if is_idle]

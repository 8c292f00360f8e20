"""Findings of kernels in a step, which stay on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from gradwire.step.flat_buffers import FlatBuffer
from gradwire.unit.parameters import Slot


class Marks:
    """Marks of all slots of a layout, and of the step: int32 (2 · slots + 1,).

    Kernels set them as `gradwire.kernels.compensation.compensate_marked` says. The last one is that of the
    whole step: 0 as long as gradients, means and what peers have sent are sound.
    """

    def __init__(self, flat_buffers: Sequence[FlatBuffer], device: torch.device) -> None:
        self._flat_buffers, self._device = flat_buffers, device
        self._slots = sum(len(each.slots) for each in flat_buffers)
        self.values = torch.empty(0, dtype=torch.int32, device=device)
        """In the same memory for all steps."""

    def begin(self) -> Tensor:
        """Clear them for a step; returns the last one, int32 (1,)."""
        if not self.values.numel():  # not before the first step, to whose stream the memory belongs
            self.values = torch.empty(2 * self._slots + 1, dtype=torch.int32, device=self._device)
        return self.values.zero_()[-1:]

    def idle(self, values: Tensor) -> Iterator[tuple[FlatBuffer, list[Slot]]]:
        """Yield each flat buffer with its idle slots, by `values` that are on the host."""
        flags = iter(values[self._slots : -1].tolist())
        for each in self._flat_buffers:
            yield each, [slot for slot in each.slots if next(flags)]

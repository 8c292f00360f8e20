"""A memory's planes, as the flat buffers keep them."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.memory import UNSENT, Gradients, Memory


class Compensation:
    """`size` elements of committed and working planes, all zero at first."""

    def __init__(self, memory: Memory, size: int) -> None:
        self.memory = memory
        self.committed = {name: torch.zeros(size) for name in memory.planes}
        self.working = {name: torch.zeros(size) for name in dict.fromkeys((UNSENT, *memory.planes))}

    def compensate(self, grad: Tensor, step: int = 0, world: int = 1) -> Tensor:
        """The error-fed gradient."""
        self.memory.compensate(self.working, self.committed, Gradients.of(grad), step, world)
        return self.working[UNSENT]

    def commit(self) -> None:
        """What the exchange has left becomes the memory."""
        self.memory.update(self.working, self.committed)
        for name in self.memory.planes:
            self.committed[name], self.working[name] = self.working[name], self.committed[name]

    @property
    def unsent(self) -> Tensor:
        """The committed plane of that name."""
        return self.committed[UNSENT]

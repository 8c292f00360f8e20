"""What a memory promises.

A memory owns no buffers. The arena holds two sets of planes per element: `committed` (what the last good
step left) and `working` (this step's). Nothing touches `committed` before the verdict, so a step that is
not committed leaves no trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from gradwire.kernels import Folded

UNSENT = "unsent"
"""The plane of which every step has a working copy: what the exchange takes, and where it leaves what it does
not send. Committed it is only where that is remembered."""

Planes = Mapping[str, Tensor]
"""Tensors (numel,) by the names of `Memory.planes`; working ones in float32 or float64."""


class Memory(Protocol):
    """The element-wise state of an exchange.

    - `planes`: names of the planes that are committed; `UNSENT` comes first where it is one of them.
    - `weight`: how much gradient one unit of the committed plane `UNSENT` stands for.
    - `covers_momentum`: it applies momentum itself, so the optimizer must not.
    """

    @property
    def planes(self) -> tuple[str, ...]: ...
    @property
    def weight(self) -> float: ...
    @property
    def covers_momentum(self) -> bool: ...

    def fold(
        self, working: Planes, committed: Planes, grad: Tensor, scale: float, step: int, world: int
    ) -> Folded:
        """Write the error-fed gradient of one parameter to working[UNSENT]; `grad` counts times `scale`."""
        ...

    def settle(self, working: Planes, committed: Planes) -> None:
        """Turn what the exchange left in working[UNSENT] into the next memory, in the working planes."""
        ...

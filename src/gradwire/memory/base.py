"""What a memory promises.

A memory owns no buffers. The arena holds two sets of planes per element: `committed` (what the last good
step left) and `working` (this step's). Nothing touches `committed` before the verdict, so a step that is
not committed leaves no trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

from gradwire.kernels import Folded, Pieces, whole

UNSENT = "unsent"
"""The plane of which every step has a working copy: what the exchange takes, and where it leaves what it does
not send. Committed it is only where that is remembered."""

MOMENTUM = "momentum"
"""The plane of a momentum that a rank keeps by itself."""

Planes = Mapping[str, Tensor]
"""Tensors (numel,) by the names of `Memory.planes`; working ones in float32 or float64, or
in the gradient's own type (`Memory.as_arrived`)."""


class Gradients(NamedTuple):
    """What arrived together: a bucket (numel,), where its parameters lie in it and in planes; a factor."""

    bucket: Tensor
    pieces: Pieces
    scale: float = 1.0

    @classmethod
    def of(cls, gradient: Tensor, scale: float = 1.0) -> Gradients:
        """A single parameter's (numel,), for planes of its size."""
        return cls(gradient, whole(gradient.numel()), scale)


class Memory(Protocol):
    """The element-wise state of an exchange.

    - `planes`: names of the planes that are committed; `UNSENT` comes first where it is one of them.
    - `weight`: how much gradient one unit of the committed plane `UNSENT` stands for.
    - `covers_momentum`: it applies momentum itself, so the optimizer must not.
    - `as_arrived`: its planes have the gradient's own type, and a loss scale stays in. All others add up in
      float32 or float64, without it.
    - `whole`: values travel in the type of the planes, not in a shorter one that parameters have: nothing of
      what is sent stays.
    """

    @property
    def planes(self) -> tuple[str, ...]: ...
    @property
    def weight(self) -> float: ...
    @property
    def covers_momentum(self) -> bool: ...
    @property
    def as_arrived(self) -> bool: ...
    @property
    def whole(self) -> bool: ...

    def fold(self, working: Planes, committed: Planes, grads: Gradients, step: int, world: int) -> Folded:
        """Write the error-fed gradients to working[UNSENT], where `grads` says."""
        ...

    def settle(self, working: Planes, committed: Planes) -> None:
        """Turn what the exchange left in working[UNSENT] into the next memory, in the working planes."""
        ...

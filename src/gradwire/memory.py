"""Memories, which keep the unsent part of a gradient: late, not lost.

A memory owns no buffers. Flat buffers hold two sets of planes per element: `committed` (what the last good
step left) and `working` (this step's). Nothing touches `committed` before the status vote, so a step that is
not committed leaves no trace.

- `Residual` is error feedback: Seide et al. 2014, "1-bit stochastic gradient descent"; Stich et al. 2018,
  "Sparsified SGD with memory". Its scheduled coefficient is COVAP's (Meng et al. 2023, section III-D).
- `LowPass` filters the residual: ScaleCom, Chen et al. 2020, section 2, equation 5.
- `NoMemory` drops the unsent part. It is for exchanges that are right in the mean (QSGD of few bits,
  TernGrad). With them, error feedback would diverge or pile up many gradients. Their errors must average out
  over ranks and steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from gradwire.kernels.compensation import Findings, compensate
from gradwire.kernels.dispatch import LOOKING, Kernels
from gradwire.kernels.pieces import Pieces, whole

UNSENT = "unsent"
"""The plane of which every step has a working copy: what the exchange takes, and where it leaves what it does
not send. It is committed only where that is remembered."""

MOMENTUM = "momentum"
"""The plane of a momentum that a rank keeps by itself."""

Planes = Mapping[str, Tensor]
"""Tensors (numel,) by the names of `Memory.planes`; working ones in float32 or float64, or
in the gradient's own type (`Memory.as_arrived`)."""


class Gradients(NamedTuple):
    """Gradients that arrived together: a bucket (numel,), places of parameters in it and in planes; a
    factor; and the kernels for planes."""

    bucket: Tensor
    pieces: Pieces
    scale: float = 1.0
    kernels: Kernels = LOOKING

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
    - `stays_on_device`: where planes are on a device, neither `compensate` nor `update` makes the host wait
      for it.
    - `whole`: values travel in the type of the planes, not in a shorter one that parameters have: nothing of
      what is sent stays.

    One may also say that it `adds`: its `compensate` does no more than to add its `coefficient` of what is
    unsent and the gradient. Kernels on a device can then do more in the same pass.
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
    def stays_on_device(self) -> bool: ...
    @property
    def whole(self) -> bool: ...

    def coefficient(self, step: int) -> float:
        """Factor by which the memory is multiplied when the gradient of `step` is added."""
        ...

    def compensate(
        self, working: Planes, committed: Planes, grads: Gradients, step: int, world: int
    ) -> Findings:
        """Add the unsent gradient to the gradients of a step: the input of its exchange.

        Args:
            working: planes of the running step, written; working[UNSENT] receives the sums.
            committed: planes of the last committed exchange, read only.
            grads: the gradients of a bucket, and their places in the planes.
            step: the present step, on which the memory's coefficient may depend.
            world: the number of ranks.

        Returns the idle slots, and whether everything is finite.
        """
        ...

    def update(self, working: Planes, committed: Planes) -> None:
        """Turn the rest in working[UNSENT] after the exchange into the next memory, in the working planes."""
        ...


@dataclass(frozen=True)
class Residual:
    """Error feedback: x = c·m + g is exchanged, and the unsent part of x is the next memory m.

    The coefficient is c = min(start + ⌊step / every⌋ · rise, 1). By default c is 1 in all steps, which is
    plain error feedback. With `whole`, gradients of 16-bit parameters are exchanged in float32, so that a
    step that sends every element leaves nothing.

    >>> Residual(start=0.5, rise=0.1, every=50).coefficient(120)
    0.7
    """

    start: float = 1.0
    rise: float = 0.0
    every: int = 1
    whole: bool = field(default=False, repr=False)
    planes = (UNSENT,)
    weight = 1.0
    covers_momentum = False
    as_arrived = False
    stays_on_device = True
    adds = True

    def __post_init__(self) -> None:
        if not 0.0 <= self.start <= 1.0:
            raise ValueError(f"start={self.start} is outside 0 … 1; 1 is plain error feedback")
        if self.every < 1:
            raise ValueError(f"every={self.every} must be at least 1 step")

    def coefficient(self, step: int) -> float:
        return min(round(self.start + (step // self.every) * self.rise, 9), 1.0)

    def compensate(
        self, working: Planes, committed: Planes, grads: Gradients, step: int, world: int
    ) -> Findings:
        weights = self.coefficient(step), grads.scale
        return grads.kernels[compensate](
            working[UNSENT], committed[UNSENT], grads.bucket, *weights, grads.pieces
        )

    def update(self, working: Planes, committed: Planes) -> None:
        """The unsent part becomes the memory, as it is."""


@dataclass(frozen=True)
class LowPass:
    """x = m + g, and the share β of the unsent part replaces as much of m: m ← (1 − β)·m + β·unsent.

    Per coordinate, Σ sent + m_T/β = Σ g + m_0/β holds exactly. So a memory of m stands for m/β of gradient,
    and a flush hands over m/β.

    β = 1 is plain error feedback; the paper has 0.1 to 0.3 for learning rates scaled up with the batch.

    >>> LowPass(0.25).weight
    4.0
    """

    beta: float
    planes = (UNSENT,)
    covers_momentum = False
    as_arrived = False
    stays_on_device = True
    whole = False
    adds = True

    def __post_init__(self) -> None:
        if not 0.0 < self.beta <= 1.0:
            raise ValueError(f"beta={self.beta} is outside (0, 1]; 1 is plain error feedback")

    @property
    def weight(self) -> float:
        return 1.0 / self.beta

    def coefficient(self, step: int) -> float:
        return 1.0

    def compensate(
        self, working: Planes, committed: Planes, grads: Gradients, step: int, world: int
    ) -> Findings:
        weights = 1.0, grads.scale
        return grads.kernels[compensate](
            working[UNSENT], committed[UNSENT], grads.bucket, *weights, grads.pieces
        )

    def update(self, working: Planes, committed: Planes) -> None:
        if self.beta < 1.0:
            old = committed[UNSENT].to(working[UNSENT].dtype)
            torch.lerp(old, working[UNSENT], self.beta, out=working[UNSENT])


@dataclass(frozen=True)
class NoMemory:
    """x = g, and the unsent part of x is dropped.

    With `as_arrived` x has the gradient's own type, and the loss scale in it.
    """

    as_arrived: bool = False
    planes = ()
    weight = 1.0
    covers_momentum = False
    stays_on_device = True
    whole = False
    adds = True

    def coefficient(self, step: int) -> float:
        return 0.0

    def compensate(
        self, working: Planes, committed: Planes, grads: Gradients, step: int, world: int
    ) -> Findings:
        return grads.kernels[compensate](working[UNSENT], None, grads.bucket, 1.0, grads.scale, grads.pieces)

    def update(self, working: Planes, committed: Planes) -> None:
        """Do nothing: there is no memory."""

"""The optimizers of a replica that takes local steps, which end with its model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import nn

from gradwire.sources.unwrap import Optimizers

OuterFactory: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes the optimizer of the shared parameters, which it is given."""


class LocalOptimizers:
    """The optimizers of one replica.

    The model's hooks and the wire hold this object; sources refer to it weakly. A hook of the user's on an
    optimizer may refer to the model, and the thread that refers to the source ends with the model.
    """

    def __init__(self, given: object, make: OuterFactory) -> None:
        """`given` are the user's optimizers, as `outer` takes them. `make` makes the outer optimizer."""
        self.given, self.make = given, make
        """`given` until `LocalSteps.check` looks for optimizers in it: these go once others take over."""
        self.inner: Optimizers = ()
        """Optimizers that make the local steps."""
        self.outer: torch.optim.Optimizer
        """Optimizer of the shared parameters, from `LocalSteps.check` on."""

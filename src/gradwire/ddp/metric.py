"""What is said aloud when a recipe goes by an optimizer, and there is none."""

from __future__ import annotations

import warnings

import torch

from gradwire.ddp.layout import Layout
from gradwire.exchange.base import parts
from gradwire.exchange.gcomp import Gcomp


def warn_without_optimizer(layout: Layout, optimizer: torch.optim.Optimizer | None) -> None:
    """Warn, in the name of whoever called `attach`, if something goes by an optimizer that was not given."""
    if optimizer is not None:
        return
    made_of = [part for lane in layout.lanes for part in parts(lane.exchange)]
    if any(isinstance(part, Gcomp) and part.asks_optimizer for part in made_of):
        warnings.warn(
            f"{layout.main.text} drops what the optimizer cannot see, and was given none: gradients are sent "
            "without loss, in 0.7 to 0.9 of the bytes. Pass gradwire.attach(ddp, optimizer, …).",
            stacklevel=4,
        )
    if any(lane.memory.covers_momentum for lane in layout.lanes):
        warnings.warn(
            f"{layout.main.text} applies momentum itself, before gradients are sent, and was given no "
            "optimizer to check: it must be torch.optim.SGD(momentum=0), or momentum is applied twice. Pass "
            "gradwire.attach(ddp, optimizer, …).",
            stacklevel=4,
        )

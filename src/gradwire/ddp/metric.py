"""What is said aloud when a recipe goes by an optimizer, and there is none."""

from __future__ import annotations

import warnings

import torch

from gradwire.ddp.layout import Layout
from gradwire.exchange import Exchange
from gradwire.exchange.gcomp import Gcomp


def warn_without_optimizer(layout: Layout, optimizer: torch.optim.Optimizer | None) -> None:
    """Warn if a lane's exchange goes by an optimizer that was not given."""
    lanes = [lane for lane in layout.lanes if _asks_optimizer(lane.exchange)]
    if lanes and optimizer is None:
        warnings.warn(
            f"{layout.main.text} drops what the optimizer cannot see, and was given none: gradients are sent "
            "without loss, in about 0.8 of the bytes. Pass gradwire.attach(ddp, optimizer, …).",
            stacklevel=3,
        )


def _asks_optimizer(exchange: Exchange) -> bool:
    if isinstance(exchange, Gcomp):
        return exchange.asks_optimizer
    return hasattr(exchange, "inner") and _asks_optimizer(exchange.inner)

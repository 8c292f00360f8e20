"""Whether a layout suits the model's optimizer: warnings where none is given, momentum applied once."""

from __future__ import annotations

import warnings

import torch

from gradwire.arena import Lane
from gradwire.engine.layout import Layout


def warn_without_optimizer(layout: Layout, optimizer: torch.optim.Optimizer | None) -> None:
    """Warn, in the name of the caller of `attach`, if something goes by an optimizer that was not given."""
    if optimizer is not None:
        return
    if any(lane.exchange.laws.asks_optimizer for lane in layout.lanes):
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


def check_momentum(layout: Layout, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise `ValueError` where momentum would be applied twice, or to some parameters only.

    Without an optimizer nothing is known, and nothing is checked.
    """
    covering = [lane for lane in layout.lanes if lane.memory.covers_momentum]
    if not covering or optimizer is None:
        return
    plain_sgd = isinstance(optimizer, torch.optim.SGD)
    if not plain_sgd or any(group["momentum"] for group in optimizer.param_groups):
        raise ValueError(
            f"{layout.main.text} applies momentum itself, before gradients are sent: give it "
            f"torch.optim.SGD(momentum=0), not {type(optimizer).__name__} with a momentum or averages of its "
            "own, or set the recipe's momentum=0"
        )
    without = _others(layout, covering)
    if without:
        raise ValueError(
            f"momentum is applied before gradients are sent, but not to {without[0]!r}, which the policy "
            "sends by a recipe without: send it by one with the same momentum, or set the recipe's momentum=0"
        )


def _others(layout: Layout, covering: list[Lane]) -> list[str]:
    outside = [slot.spec for lane in layout.lanes if lane not in covering for slot in lane.slots]
    return [*layout.direct, *(spec.name for spec in outside)]

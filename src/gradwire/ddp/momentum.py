"""Momentum is applied once: by the optimizer, or by a memory on every rank before gradients are sent."""

from __future__ import annotations

import torch

from gradwire.arena import Lane
from gradwire.ddp.layout import Layout


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

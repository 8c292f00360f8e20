"""A rank alone has nothing to send, so it compresses nothing: its gradients are dense, whatever the recipe.

Recipes that do more than compress go on as they are: where the optimizer would miss the momentum that is
applied before gradients are sent (`dgc`, `signum`), or is tuned to signs (`signsgd(scale="none")`).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from gradwire.comm import Comm
from gradwire.engine.layout import Layout, build
from gradwire.exchange.compose import remember
from gradwire.exchange.dense import dense
from gradwire.memory import Residual
from gradwire.recipes.dense import dense as plain


def is_alone(comm: Comm) -> bool:
    """Whether there is nobody to send to."""
    return comm.world == 1


def only_compresses(layout: Layout) -> bool:
    """Whether dense gradients can stand for what `layout` hands to the optimizer."""
    return not (layout.does_more or any(lane.memory.covers_momentum for lane in layout.lanes))


def uncompressed(
    asked: Layout, device: torch.device, memory_dtype: torch.dtype | None, *, owing: bool
) -> Layout:
    """What runs instead of `asked`. With `owing` there is a memory for all, of which the first gradient of a
    parameter takes everything along; nothing is left in it."""
    dense_ = replace(plain(), exchange=remember(dense(), Residual(whole=True)) if owing else dense())
    ran = build(asked.specs, dense_, lambda _: None, device, memory_dtype)
    return replace(ran, main=replace(asked.main, watch=None), alone=True)

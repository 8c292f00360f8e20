"""Scenes of FSDP2's own traffic, in which a rank is killed in the middle of a collective of the others."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradwire
from tests.process.scenes_fsdp import loss_of, sharded, train

VICTIM = 1


def killed(where: str) -> dict[str, Any]:
    """After two steps one rank is killed, in front of a gather or a scatter; what the others raise."""
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    gradwire.attach(model, optimizer, "int4", gather="int8")
    train(model, optimizer, range(2))
    linear: nn.Module = model.blocks[0][0]  # type: ignore[index,union-attr,assignment]

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == VICTIM and where == "gather":
        linear.register_forward_pre_hook(die)  # the next block is gathered by the others
    elif dist.get_rank() == VICTIM:
        linear.register_full_backward_hook(die)  # this block is scattered by the others
    start_s = time.monotonic()
    error: Exception | None = None
    try:
        loss_of(model, 2).backward()
    except Exception as raised:
        error = raised
    return {"error": type(error).__name__, "text": str(error), "after_s": time.monotonic() - start_s}


SCENES: dict[str, Callable[[], Any]] = {where: partial(killed, where) for where in ("gather", "scatter")}

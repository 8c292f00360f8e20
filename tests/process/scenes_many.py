"""Scenes of more ranks than send the verdict to each other directly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.comm import ProcessGroupComm
from tests.laws.test_status_vote import told
from tests.support.models import digest, optimizer_of, perceptron, train


def verdicts() -> list[str]:
    """Every odd row of every rank."""
    return told(ProcessGroupComm(dist.group.WORLD))


def trains() -> dict[str, Any]:
    """Steps with a verdict each."""
    ddp = DistributedDataParallel(perceptron())
    optimizer = optimizer_of(ddp)
    wire = gradwire.attach(ddp, optimizer, "topk(ratio=0.1)")
    train(ddp, optimizer, range(5))
    report = wire.report()
    sent = (report.wire_bytes_per_step, report.metered_bytes_per_step)
    return {"digest": digest(ddp), "step": report.step, "sent": sent}


SCENES: dict[str, Callable[[], Any]] = {"verdicts": verdicts, "trains": trains}

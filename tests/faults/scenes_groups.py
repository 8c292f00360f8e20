"""A rank's misfortune on a process group of our own, under plain collectives and under DDP."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire_lab.emulate import EmulatedLink, delayed_group
from gradwire_lab.emulate.link import WIRE_VARIABLE, WireFile

UNLUCKY = 1
NUMEL = 30_000


def _seen(action: Callable[[], object]) -> list[str]:
    try:
        action()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def _model(group: dist.ProcessGroup) -> DistributedDataParallel:
    return DistributedDataParallel(nn.Linear(200, 200), process_group=group)


def _train(ddp: DistributedDataParallel) -> None:
    ddp(torch.ones(1, 200)).sum().backward()


def _sums(group: dist.ProcessGroup) -> dict[str, list[str]]:
    """What the caller of a sum sees, at once and later."""
    work = dist.all_reduce(torch.ones(NUMEL), group=group, async_op=True)
    return {
        "wait": _seen(work.wait),
        "all_reduce": _seen(lambda: dist.all_reduce(torch.ones(NUMEL), group=group)),
    }


def left_alone() -> dict[str, list[str]]:
    """What is seen by the rank whose only peer has been killed."""
    os.environ[WIRE_VARIABLE] = WireFile.create(EmulatedLink(1e9)).path
    group = dist.new_group(backend=delayed_group.register())
    plain, attached = _model(group), _model(group)
    wire = gradwire.attach(attached, recipe="topk")
    for ddp in 2 * (plain, attached):  # DDP's second step arranges its buckets anew
        _train(ddp)
    dist.barrier()
    if dist.get_rank() == UNLUCKY:
        os.kill(os.getpid(), signal.SIGKILL)
    # DDP before the others: it must survive the first error, not one that is there already.
    backward = _seen(lambda: _train(plain))
    reducer = _seen(lambda: _train(attached))
    del wire
    return _sums(group) | {"backward": backward, "attached": reducer}


SCENES: dict[str, Callable[[], Any]] = {"left alone": left_alone}

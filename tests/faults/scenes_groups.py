"""Scenes of a rank's misfortune on process groups of our own, under plain collectives and under DDP."""

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
from gradwire.exchange.gcomp import Frames
from gradwire.integrations import lossless_group
from gradwire.lab.emulate import EmulatedLink, delayed_group
from gradwire.lab.emulate.link import WireFile
from gradwire.lab.emulate.ranks import WIRE_VARIABLE

UNLUCKY = 1
NUMEL = 30_000  # large enough for frames


class Accident(Exception):
    """What a codec may raise."""


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


def failed_encode() -> dict[str, Any]:
    """A frame that one rank cannot make; and a sum after that."""
    group = dist.new_group(backend=lossless_group.register())
    ddp, honest = _model(group), Frames.encode
    _train(ddp)

    def broken(*_: Any) -> int:
        raise Accident("out of luck")

    if dist.get_rank() == UNLUCKY:
        Frames.encode = broken  # type: ignore[method-assign]
    seen = _sums(group) | {"backward": _seen(lambda: _train(ddp))}
    Frames.encode = honest  # type: ignore[method-assign]
    after = torch.ones(NUMEL)
    dist.all_reduce(after, group=group)
    return {"seen": seen, "after": after.unique().tolist()}


def left_alone() -> dict[str, dict[str, list[str]]]:
    """What is seen on every backend by the rank whose only peer has been killed."""
    os.environ[WIRE_VARIABLE] = WireFile.create(EmulatedLink(1e9)).path
    backends = {"lossless": lossless_group.register(), "delaying": delayed_group.register()}
    groups = {name: dist.new_group(backend=backend) for name, backend in backends.items()}
    plain = {name: _model(group) for name, group in groups.items()}
    attached = {name: _model(group) for name, group in groups.items()}
    wires = [gradwire.attach(ddp, recipe="topk") for ddp in attached.values()]
    for ddp in 2 * (*plain.values(), *attached.values()):  # DDP's second step arranges its buckets anew
        _train(ddp)
    dist.barrier()
    if dist.get_rank() == UNLUCKY:
        os.kill(os.getpid(), signal.SIGKILL)
    seen = {}
    for name, group in groups.items():
        # DDP before the others: it must survive the first error, not one that is there already.
        backward = _seen(lambda ddp=plain[name]: _train(ddp))  # type: ignore[misc]
        engine = _seen(lambda ddp=attached[name]: _train(ddp))  # type: ignore[misc]
        seen[name] = _sums(group) | {"backward": backward, "attached": engine}
    del wires
    return seen


SCENES: dict[str, Callable[[], Any]] = {"failed encode": failed_encode, "left alone": left_alone}

"""Scenes of host placement: models on a simulated device, ranks over gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from tests.support.models import batch, digest, optimizer_of, perceptron
from tests.support.recipes import EVERY_RECIPE
from tests.support.simulated import Simulated

STEPS, BAD = 8, 4


class Branches(nn.Module):
    """Normalised, so that there are buffers; of two branches each step takes one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(32, 64)
        self.normal = nn.BatchNorm1d(64)
        self.branches = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.head = nn.Linear(64, 8)

    def forward(self, inputs: Tensor, branch: int) -> Tensor:
        return self.head(torch.tanh(self.branches[branch](torch.tanh(self.normal(self.stem(inputs))))))


@contextmanager
def on(device: Simulated) -> Iterator[None]:
    """Models that are attached here have their gradients on `device`."""
    with patch("gradwire.attaching.device_at", lambda _where: device):
        yield


@contextmanager
def watched(device: Simulated, wire: gradwire.Wire) -> Iterator[None]:
    """The training thread computes on the device, and the engine's on the host."""
    held = ExitStack()
    worker = wire.attached.worker
    worker.call(lambda: held.enter_context(device.watching("host")))
    try:
        with device.watching("device"):
            yield
    finally:
        worker.call(held.close)


def run(recipe: str, device: Simulated | None) -> dict[str, Any]:
    """Train; in step `BAD` a gradient is NaN on rank 1, and the scaler skips."""
    ddp = DistributedDataParallel(Branches(), find_unused_parameters=True, bucket_cap_mb=0.01)
    optimizer = optimizer_of(ddp, lr=0.1)
    with ExitStack() as held:
        if device is not None:
            held.enter_context(on(device))
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        wire = gradwire.attach(ddp, optimizer, recipe, scaler=scaler)
        if device is not None:
            held.enter_context(watched(device, wire))
        for step in range(STEPS):
            inputs, targets = batch(step)
            if step == BAD and dist.get_rank() == 1:
                inputs[0, 0] = torch.nan
            optimizer.zero_grad()
            scaler.scale(nn.functional.mse_loss(ddp(inputs, step // 3 % 2), targets)).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad(set_to_none=False)
        wire.flush()
        scaler.step(optimizer)
    report = wire.report()
    return {
        "digest": digest(ddp),
        "buffers": [each.double().sum().item() for each in ddp.buffers()],
        "step": report.step,
        "skipped": report.skipped_steps,
        "pinned": report.pinned_bytes,
        "copied_s": report.copied_s,
        "placement": report.placement,
    }


def trains(recipe: str) -> dict[str, Any]:
    """On the device and on the CPU, with what the race finder has found."""
    device = Simulated()
    there = run(recipe, device)
    here = run(recipe, None)
    parameters = sum(p.numel() for p in Branches().parameters())
    return {
        "there": there,
        "here": here,
        "races": device.races[:5],
        "operators": device.operators,
        "gradient_bytes": 4 * parameters,
    }


def deaf(*calls: str) -> dict[str, Any]:
    """The same without what some calls order."""
    device = Simulated(*calls)
    run("topk(ratio=0.1)", device)
    return {"races": len(device.races)}


def _error_of(act: Callable[[], object]) -> dict[str, str]:
    try:
        act()
    except Exception as error:
        return {"kind": type(error).__name__, "text": str(error)}
    return {"kind": "none", "text": ""}


def captured() -> dict[str, Any]:
    """Rank 1 captures its second backward pass into a graph; after that training goes on."""
    device = Simulated()
    ddp = DistributedDataParallel(perceptron())
    with on(device):
        wire = gradwire.attach(ddp, recipe="int8")

    def step(number: int) -> None:
        inputs, targets = batch(number)
        ddp.zero_grad()
        nn.functional.mse_loss(ddp(inputs), targets).backward()

    step(0)
    device.capturing = dist.get_rank() == 1
    error = _error_of(partial(step, 1))
    device.capturing = False
    step(2)
    return {**error, "step": wire.report().step}


def mixed_world() -> dict[str, Any]:
    """Gradients of rank 1 are on a device, and those of rank 0 are not."""
    ddp = DistributedDataParallel(perceptron())
    with ExitStack() as held:
        if dist.get_rank() == 1:
            held.enter_context(on(Simulated()))
        return _error_of(lambda: gradwire.attach(ddp, recipe="int8"))


def mixed_placements() -> dict[str, Any]:
    """Ranks ask for different ones."""
    ddp = DistributedDataParallel(perceptron())
    asked: Any = ("host", "auto")[dist.get_rank()]
    return _error_of(lambda: gradwire.attach(ddp, recipe="int8", placement=asked))


def unreachable() -> dict[str, Any]:
    """The model's group carries no tensors on the CPU, and rank 1 cannot make a group beside it."""
    ddp = DistributedDataParallel(perceptron())
    new_group = dist.new_group

    def refused(*args: Any, **options: Any) -> dist.ProcessGroup:
        group = new_group(*args, **options)
        if dist.get_rank() == 1:
            raise RuntimeError("connectFullMesh failed")
        assert isinstance(group, dist.ProcessGroup)
        return group

    with (
        on(Simulated()),
        patch("gradwire.comm.groups.carries_cpu", lambda _group: False),
    ):
        with (
            patch("torch.distributed.new_group", refused),
            patch("gradwire.comm.groups._known", lambda _terms: []),
        ):
            error = _error_of(lambda: gradwire.attach(ddp, recipe="int8"))
        wire = gradwire.attach(ddp, recipe="int8")
    inputs, targets = batch(0)
    nn.functional.mse_loss(ddp(inputs), targets).backward()
    return {**error, "step": wire.report().step}


TRAINED = ("dense", "fp16", "topk", "int8", "powersgd", "covap", "dgc", "efsignsgd", "gcomp", "threshold")
CALLS = (("wait_event",), ("synchronize",), ("set_result", "join"))
"""Either of the last two is enough for DDP, which waits for futures in the stream that has joined."""

SCENES: dict[str, Callable[[], Any]] = {
    **{f"trains {name}": partial(trains, EVERY_RECIPE[name]) for name in TRAINED},
    **{f"deaf to {' and '.join(calls)}": partial(deaf, *calls) for calls in CALLS},
    "captured": captured,
    "mixed world": mixed_world,
    "mixed placements": mixed_placements,
    "unreachable": unreachable,
}

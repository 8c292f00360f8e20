"""Scenes of placements: models on a simulated device, ranks over gloo.

Where gloo stands for a backend whose collectives are work in streams, they are done before they are waited
for all the same, which no order that is missing can change; the race finder sees that it is missing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire._api.configuration import PlacementName
from gradwire.agreement.board import Board
from tests.support.depth import drawn
from tests.support.models import batch, digest, optimizer_of, perceptron
from tests.support.ranks import TIMEOUT_S
from tests.support.simulated import Home, Near, Simulated
from tests.support.world import lose_groups

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
def on(device: Simulated, *, streams: bool = False) -> Iterator[None]:
    """Models that are attached here have their gradients on `device`; groups may pass for NCCL's."""
    streamed = frozenset({"gloo"} if streams else ())
    with (
        patch("gradwire._api.attach.device_at", lambda _where: device),
        patch("gradwire.comm.groups.STREAMED", streamed),
    ):
        yield


@contextmanager
def watched(device: Simulated, wire: gradwire.Wire) -> Iterator[None]:
    """The training thread computes on the device, and the reducer's where the memory is."""
    held, worker = ExitStack(), wire.attached.worker
    home: Home = "host" if wire.report().placement == "host" else "device"
    worker.call(lambda: held.enter_context(device.watching(home)))
    try:
        with device.watching("device"):
            yield
    finally:
        worker.call(held.close)


def run(
    recipe: str,
    device: Simulated | None,
    asked: PlacementName = "auto",
    *,
    streams: bool = False,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train; in step `BAD` a gradient is NaN on rank 1, and the scaler skips. `options` are for `attach`.

    `group` is the model's.
    """
    ddp = DistributedDataParallel(
        Branches(), find_unused_parameters=True, bucket_cap_mb=0.01, process_group=group
    )
    optimizer = optimizer_of(ddp, lr=0.1)
    with ExitStack() as held:
        if device is not None:
            held.enter_context(on(device, streams=streams))
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        wire = gradwire.attach(ddp, optimizer, recipe, scaler=scaler, placement=asked, **options)
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
        "why": report.placement_why,
        "per node": report.per_node,
        "sent": (report.metered_bytes_per_step, report.inside_bytes_per_step),
    }


def trains(
    recipe: str, asked: PlacementName = "host", *, streams: bool = False, **options: Any
) -> dict[str, Any]:
    """On the device and on the CPU, with what the race finder has found."""
    device = Simulated() if asked == "host" else Near()
    there = run(recipe, device, asked, streams=streams, **options)
    here = run(recipe, None, **options)
    parameters = sum(p.numel() for p in Branches().parameters())
    return {
        "there": there,
        "here": here,
        "races": device.races[:5],
        "operators": device.operators,
        "gradient_bytes": 4 * parameters,
    }


def _error_of(act: Callable[[], object]) -> dict[str, str]:
    try:
        act()
    except Exception as error:
        return {"kind": type(error).__name__, "text": str(error)}
    return {"kind": "none", "text": ""}


def _captured_at(
    capturing: int | None, device: Simulated | None, asked: PlacementName = "auto", *, streams: bool = False
) -> dict[str, Any]:
    """Train; what a step does that is captured into a graph, before it is taken without one."""
    model = perceptron()
    optimizer = optimizer_of(model, lr=0.1)
    with ExitStack() as held:
        if device is not None:
            held.enter_context(on(device, streams=streams))
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        wire = gradwire.attach(
            model, optimizer, "topk(ratio=0.1)", scaler=scaler, replicas=dist.group.WORLD, placement=asked
        )
    found: dict[str, Any] = {}

    def step(number: int) -> None:
        inputs, targets = batch(number)
        optimizer.zero_grad()
        scaler.scale(nn.functional.mse_loss(model(inputs), targets)).backward()

    for number in range(4):
        if number == capturing and device is not None:
            device.capturing = True
            found = _error_of(partial(step, number))
            device.capturing = False
        step(number)
        scaler.step(optimizer)
        scaler.update()
    return {**found, "digest": digest(model), "step": wire.report().step}


def captured(asked: PlacementName, *, streams: bool = False) -> dict[str, Any]:
    """A graph on all ranks, while over streams the step before is not committed."""
    device = Simulated() if asked == "host" else Near()
    there = _captured_at(2, device, asked, streams=streams)
    return {"there": there, "here": _captured_at(None, None)}


def captured_by_one() -> dict[str, Any]:
    """A graph on rank 1, while rank 0 is in the step. Nothing of the model can be used after that."""
    device = Near()
    ddp = DistributedDataParallel(perceptron())
    with on(device):
        gradwire.attach(ddp, recipe="int8")
    inputs, targets = batch(0)
    loss = nn.functional.mse_loss(ddp(inputs), targets)
    device.capturing = dist.get_rank() == 1
    error = _error_of(loss.backward)
    lose_groups()
    return error


def mixed_world() -> dict[str, Any]:
    """Gradients of rank 1 are on a device, and those of rank 0 are not."""
    ddp = DistributedDataParallel(perceptron())
    with ExitStack() as held:
        if dist.get_rank() == 1:
            held.enter_context(on(Simulated()))
        return _error_of(lambda: gradwire.attach(ddp, recipe="int8"))


def mixed_units() -> dict[str, Any]:
    """Rank 1 would cut its gradients into smaller units, as another gradwire of the same version might."""
    ddp = DistributedDataParallel(perceptron())
    with ExitStack() as held:
        held.enter_context(on(Near(), streams=True))
        if dist.get_rank() == 1:
            for module in ("step.layout", "_api.configuration"):
                held.enter_context(patch(f"gradwire.{module}.largest_unit", lambda **_where: 1 << 10))
        return _error_of(partial(_one_step, ddp))


def _one_step(ddp: DistributedDataParallel) -> None:
    gradwire.attach(ddp, recipe="topk(ratio=0.1)")
    inputs, targets = batch(0)
    nn.functional.mse_loss(ddp(inputs), targets).backward()


def mixed_placements() -> dict[str, Any]:
    """Ranks ask for different ones."""
    ddp = DistributedDataParallel(perceptron())
    asked: Any = ("host", "auto")[dist.get_rank()]
    return _error_of(lambda: gradwire.attach(ddp, recipe="int8", placement=asked))


def _with(timeout_s: float) -> Any:
    """A group for a model. If no other has its timeout, no group of another scene serves beside it."""
    return dist.new_group(timeout=timedelta(seconds=timeout_s))


def unreachable() -> dict[str, Any]:
    """The model's group carries no tensors on the CPU, and gloo finds no interface on rank 1."""
    timeout_s = TIMEOUT_S - 1
    ddp = DistributedDataParallel(perceptron(), process_group=_with(timeout_s))
    names, start_s = dist.distributed_c10d._world.pg_names, time.monotonic()
    before = len(names)
    with (
        on(Simulated()),
        patch("gradwire.comm.groups.carries_cpu", lambda _group: False),
    ):
        with patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": ("lo", "nowhere")[dist.get_rank()]}):
            error = _error_of(lambda: gradwire.attach(ddp, recipe="int8"))
        took_s, after = time.monotonic() - start_s, len(names)
        wire = gradwire.attach(ddp, recipe="int8", placement="host")
    inputs, targets = batch(0)
    nn.functional.mse_loss(ddp(inputs), targets).backward()
    return {
        **error,
        "took": took_s / timeout_s,
        "left": after - before,
        "made": len(names) - after,
        "timeout": Board.of(wire.attached.backward.reducer.env.control.group).timeout_s / timeout_s,
        "step": wire.report().step,
    }


def measures() -> dict[str, Any]:
    """A recipe that measures dense steps first: what it knows of links, and where it runs then."""
    device = Near()
    ddp = DistributedDataParallel(perceptron())
    with on(device, streams=True):
        wire = gradwire.attach(ddp, recipe="covap", placement="device")
    for step in range(12):
        inputs, targets = batch(step)
        ddp.zero_grad()
        nn.functional.mse_loss(ddp(inputs), targets).backward()
    report = wire.report()
    assert report.facts is not None, "decided within 12 steps"
    return {
        "placement": report.placement,
        "settled": wire.settled,
        "allreduce_s": report.facts["allreduce_s"],
        "beta_s": report.facts["network"]["link"]["beta_s"],
    }


def without_gloo() -> dict[str, Any]:
    """As `unreachable`, but the model's group carries tensors of the device: then it carries all."""
    model, new_group, made = _with(TIMEOUT_S - 2), dist.new_group, []

    def refused_once(*args: Any, **options: Any) -> dist.ProcessGroup:
        group = new_group(*args, **options)
        assert isinstance(group, dist.ProcessGroup)
        made.append(group)
        if len(made) == 1 and dist.get_rank() == 1:
            raise RuntimeError("connectFullMesh failed")
        return group

    def trained(asked: PlacementName) -> dict[str, Any]:
        made.clear()
        with patch("torch.distributed.new_group", refused_once):
            return run("topk(ratio=0.1)", Near(), asked, streams=True, group=model)

    with patch("gradwire.comm.groups.carries_cpu", lambda _group: False):
        error = _error_of(lambda: trained("host"))
        there = trained("auto")
    return {**error, "there": there, "here": run("topk(ratio=0.1)", None)}


HOSTS = ("dense", "fp16", "topk", "int8", "powersgd", "covap", "dgc", "efsignsgd", "gcomp", "threshold")
TRAINED = drawn(HOSTS, 1, "trained by way of the host")
STAGED = drawn(("dense", "topk", "int8", "powersgd", "threshold"), 1, "staged")
STREAMED = drawn(("dense", "fp16", "topk", "int8", "powersgd", "covap", "gcomp"), 1, "streamed")

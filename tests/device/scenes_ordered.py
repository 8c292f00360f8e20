"""What gradwire does in streams, in one process: each scene returns what it has found wrong.

Together they rely on every order that gradwire makes, which `test_orders.py` shows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

import gradwire
from gradwire._api.attach import _transferred
from gradwire._api.configuration import PlacementName
from gradwire.comm import ThreadComm, run_ranks
from gradwire.measure.clock import clock_of, stopwatch_for
from gradwire.placement import Accelerator, CopyTransfer, StreamTransfer, TransferredBuffer
from gradwire.placement.device import fetch
from gradwire.sources.buffer_means import BufferMeans
from gradwire.sources.buffers import BufferBroadcast
from gradwire.sources.ddp.source import DDPBuckets
from gradwire.sources.fsdp.modules import begin_anew
from gradwire.step.environment import ReducerEnvironment
from gradwire.step.step import Step
from gradwire.tools.guard import Guard
from gradwire.unit.context import Replicated
from tests.device.scenes_placed import Branches, on, watched
from tests.device.test_staging import Transport
from tests.support.models import batch, optimizer_of, perceptron
from tests.support.simulated import Near, Simulated

STEPS = 3


def trained(recipe: str, asked: PlacementName = "host", *, streams: bool = False) -> list[str]:
    """A training with a loss scale, buffers, a state, a report and a flush."""
    device = Simulated() if asked == "host" else Near()
    ddp = DistributedDataParallel(Branches(), find_unused_parameters=True, bucket_cap_mb=0.01)
    optimizer = optimizer_of(ddp)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with on(device, streams=streams):
        wire = gradwire.attach(ddp, optimizer, recipe, scaler=scaler, placement=asked)
    with watched(device, wire):
        for step in range(STEPS):
            inputs, targets = batch(step)
            optimizer.zero_grad()
            scaler.scale(nn.functional.mse_loss(ddp(inputs, step % 2), targets)).backward()
            scaler.step(optimizer)
            scaler.update()
        wire.report()
        wire.load_state_dict(wire.state_dict())
        optimizer.zero_grad(set_to_none=False)
        wire.flush()
        scaler.step(optimizer)
    return device.races


def watched_alone(asked: PlacementName = "host", *, streams: bool = False) -> list[str]:
    """A training in which nobody but gradwire waits for the device: no scaler, and no future."""
    device = Simulated("set_result") if asked == "host" else Near("set_result")
    ddp = DistributedDataParallel(perceptron())
    optimizer = optimizer_of(ddp)
    with on(device, streams=streams):
        wire = gradwire.attach(ddp, optimizer, "topk(ratio=0.1)", placement=asked)
    with watched(device, wire):
        for step in range(STEPS):
            inputs, targets = batch(step)
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(inputs), targets).backward()
            optimizer.step()
            wire.report()
    return [*device.races, *idle(device)]


def compared() -> list[str]:
    """As a step opens, before anything of it is there, a guard reads what the optimizer has just written."""
    device, opened, start, before = Near(), threading.Event(), StreamTransfer.start, Guard.before

    def late(self: StreamTransfer, key: Hashable, source: Tensor) -> TransferredBuffer:
        there = start(self, key, source)

        def ready() -> None:
            assert opened.wait(10.0), "nobody waits for it before the step has been opened"
            there.ready()

        return TransferredBuffer(there.buffer, ready)

    def noted(self: Guard, step: Step, env: ReducerEnvironment) -> None:
        before(self, step, env)
        opened.set()

    ddp = DistributedDataParallel(perceptron())
    optimizer = optimizer_of(ddp)
    with on(device):
        wire = gradwire.attach(ddp, optimizer, "topk(ratio=0.1)", placement="device", guard_every=1)
    with (
        patch.object(StreamTransfer, "start", late),
        patch.object(Guard, "before", noted),
        watched(device, wire),
    ):
        for step in range(STEPS):
            opened.clear()
            inputs, targets = batch(step)
            optimizer.zero_grad()
            nn.functional.mse_loss(ddp(inputs), targets).backward()
            optimizer.step()
    return device.races


def interrupted() -> list[str]:
    """The user catches an interrupt of the wait at the end of a backward pass, and goes on."""
    device, model = Near(), perceptron()
    with on(device):
        wire = gradwire.attach(model, optimizer_of(model), "topk(ratio=0.1)")
    with watched(device, wire):
        inputs, targets = batch(0)
        loss = nn.functional.mse_loss(model(inputs), targets)
        with (
            patch.object(wire.attached.worker, "wait", side_effect=KeyboardInterrupt),
            suppress(KeyboardInterrupt),
        ):
            loss.backward()
        model(inputs)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.add_(1)
    return device.races


def promised() -> list[str]:
    """A rank that has finished under `join()`: DDP's hook runs outside a backward pass."""
    device = Simulated()
    ddp = DistributedDataParallel(perceptron())
    with on(device):
        wire = gradwire.attach(ddp, optimizer_of(ddp), "topk(ratio=0.1)", placement="host")
    source, backward = wire.attached.source, wire.attached.backward
    assert isinstance(source, DDPBuckets)
    with watched(device, wire):
        values = torch.ones(sum(spec.numel for spec in source.specs))
        bucket: Any = SimpleNamespace(
            index=lambda: 0,
            is_last=lambda: True,
            buffer=lambda: values,
            parameters=lambda: list(ddp.parameters()),
        )
        source.on_bucket(backward, bucket).wait()
        values.add_(1)
    return device.races


def moved() -> list[str]:
    """A state that the device has only just computed is loaded."""
    device = Near()
    ddp = DistributedDataParallel(perceptron())
    with on(device, streams=True):
        wire = gradwire.attach(ddp, optimizer_of(ddp), "topk(ratio=0.1)")
    with watched(device, wire):
        inputs, targets = batch(0)
        nn.functional.mse_loss(ddp(inputs), targets).backward()
        state = wire.state_dict()
        state = tree_map_only(Tensor, lambda each: torch.zeros(each.shape, dtype=each.dtype), state)
        wire.load_state_dict(state)
    return device.races


def buffers() -> list[str]:
    """Buffers go by way of the host from the first rank to another, which reads them at once."""

    def rank(comm: ThreadComm) -> list[str]:
        device = Simulated()
        transfer = CopyTransfer(device)
        with device.watching():
            held = [torch.full((8,), float(comm.rank))]
            carried = BufferBroadcast(held, comm.rank)
            carried.pack(transfer)
            carried.send(Transport(comm))
            carried.wait()
            carried.land()
            held[0].add_(1)
        return device.races

    return [each for found in run_ranks(2, rank) for each in found]


def means() -> list[str]:
    """Buffers are averaged by way of the host, and read at once."""

    def rank(comm: ThreadComm) -> list[str]:
        device = Simulated()
        with device.watching():
            held = {"mean": torch.full((8,), float(comm.rank))}
            averaged = BufferMeans(lambda: held, torch.device("cpu"))
            averaged.begin()
            averaged.pack(CopyTransfer(device), counts=True)
            averaged.send(Transport(comm))
            averaged.wait()
            averaged.land()
            held["mean"].add_(1)
        return device.races

    return [each for found in run_ranks(2, rank) for each in found]


def looked_at() -> list[str]:
    """A parameter is cut and read by way of the host, twice, as GComp asks for it."""
    device = Simulated()
    copies = CopyTransfer(device)
    with device.watching():
        whole = torch.ones(8)
        copies.follow()

        def replicas(_name: str) -> Replicated:
            return Replicated(whole[2:6] + 1, {}, {}, torch.optim.SGD)

        found = _transferred(replicas, lambda: copies)("a")
        assert found is not None
        found.parameter.add_(1)
    return device.races


def looked_at_there() -> list[str]:
    """A parameter is cut for the reducer, which works on the device."""
    device = Near()
    transfer = StreamTransfer(device)
    with device.watching():
        whole = torch.ones(8)
        transfer.follow()

        def replicas(_name: str) -> Replicated:
            return Replicated(whole[2:6] + 1, {}, {}, torch.optim.SGD)

        found = _transferred(replicas, lambda: transfer)("a")
        assert found is not None
        with transfer.working():
            found.parameter.add_(1)
    return device.races


def brought_again() -> list[str]:
    """A tensor is copied out anew while a mean of the step before is still being copied in.

    Nobody but the copies themselves has waited in between.
    """
    device = Simulated()
    copies = CopyTransfer(device)
    with device.watching():
        source = torch.ones(8)
        for _step in range(2):
            brought = copies.start(0, source)
            brought.ready()
            with device.watching("host"):
                brought.buffer[:4].mul_(2)
            brought.copy_back_early(0, 4)
    return device.races


def poisoned() -> list[str]:
    """A step fails when a part of the mean has been copied back; the gradient is read once it has ended."""
    device = Simulated()
    copies = CopyTransfer(device)
    with device.watching():
        source = torch.ones(8)
        brought = copies.start(0, source)
        brought.ready()
        with device.watching("host"):
            brought.buffer[:4].mul_(2)
        brought.copy_back_early(0, 4)
        brought.poison()
        brought.copy_back()
        copies.join()
        is_poisoned = bool(source.isnan().all())
    return device.races if is_poisoned else [*device.races, "something is left"]


def broken_off() -> list[str]:
    """FSDP2 before `reset_iter_state` scatters gradients in a stream as a pass breaks off.

    Their memory is used again at once.
    """
    device = Simulated()
    with pytest.MonkeyPatch.context() as patched:
        patched.delattr(FSDPModule, "reset_iter_state", raising=False)
        model: Any = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,)))
        state = model._get_fsdp_state()
        model(torch.ones(1, 2))  # which makes it the root
        state._device_handle = SimpleNamespace(current_stream=device.current)
        with device.watching():
            gradients, scatters = torch.ones(4), device.new_stream()
            scatters.wait_stream(device.current())
            with device.using(scatters):
                gradients.clone()
            state._comm_ctx.reduce_scatter_state = SimpleNamespace(event=scatters.record_event())
            begin_anew(model)
            gradients.add_(1)
    return device.races


def timed() -> list[str]:
    """Clocks wait for the device: the host may use what was copied before they were read."""
    device, wrong = Near(), []
    for read in (clock_of(device), partial(_by_events, stopwatch_for(device))):
        stream = device.new_stream()
        with device.watching(), device.using(stream):
            memory = device.pinned(torch.empty(4))
            memory.copy_(torch.ones(4), non_blocking=True)
            read()
            memory.numpy()
        wrong += device.races
    return wrong


def _by_events(watch: Any) -> float:
    return float(watch.seconds(watch.mark(), watch.mark()))


def fetched() -> list[str]:
    """The host reads a number of the device."""
    device = Near()
    with device.watching():
        assert float(fetch(device, torch.ones(4).sum())()) == 4.0
    return device.races


def examined() -> list[str]:
    """Recipes are examined in a stream that delays no other."""
    device = Near()

    def job() -> None:
        with device.watching():
            torch.ones(4).add_(1)

    with device.using(device.new_stream()):
        job()
    return [*device.races, *idle(device)]


def accelerated() -> list[str]:
    """A thread whose current device is the first uses a stream of the second."""
    with pytest.MonkeyPatch.context() as patched:
        current = accelerators(patched)
        with Accelerator(torch.device("cuda", 1)).using("copies 1"):
            within = (getattr(current, "stream", None), getattr(current, "device", 0))
        after = (getattr(current, "stream", None), getattr(current, "device", 0))
        seen = within, after, current.contexts
        Accelerator(torch.device("cuda", 1)).stay()  # as a thread of ours does first
        stays = getattr(current, "device", 0) == 1
    is_right = seen == (("copies 1", 1), ("own 1", 0), {1}) and stays
    return [] if is_right else [f"{within}, then {after}, and stays: {stays}"]


def slept() -> list[str]:
    """An event that the host awaits blocks, which only CUDA's own do; other accelerators have torch's."""
    recorded = list[Any]()

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            self.blocking = blocking

        def record(self, stream: object) -> None:
            recorded.append((self.blocking, stream))

    place = {"stream_id": 3, "device_index": 1, "device_type": 1}
    stream = SimpleNamespace(**place, record_event=lambda: recorded.append("torch's own"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "Event", Event)
        patched.setattr(torch.cuda, "Stream", lambda **same: same)
        for kind in ("cuda", "xpu"):
            Accelerator(torch.device(kind, 1)).awaited(stream)
    return [] if recorded == [(True, place), "torch's own"] else [str(recorded)]


def accelerators(patched: pytest.MonkeyPatch) -> threading.local:
    """What `torch.accelerator` has as current on each thread; a stream is on the device of its last digit.

    `contexts` are the devices on which this thread has made a context, which takes memory there for good.
    """
    current = threading.local()
    current.contexts = set()

    def set_device(number: int) -> int:
        before, current.device = getattr(current, "device", 0), number
        current.contexts.add(number) if hasattr(current, "contexts") else None
        return before

    def go_back(number: int) -> int:
        before, current.device = current.device, number
        return before

    def set_stream(stream: str) -> None:
        set_device(int(stream[-1]))
        current.stream = stream

    patched.setattr(
        "torch._C._accelerator_getStream", lambda index: getattr(current, "stream", f"own {index}")
    )
    patched.setattr("torch._C._accelerator_setStream", set_stream)
    patched.setattr("torch.accelerator.current_device_index", lambda: getattr(current, "device", 0))
    patched.setattr("torch.accelerator.set_device_index", lambda where: set_device(where.index))
    patched.setattr("torch._C._accelerator_exchangeDevice", set_device)
    patched.setattr("torch._C._accelerator_maybeExchangeDevice", go_back)
    return current


def idle(device: Simulated) -> list[str]:
    """Work of gradwire's that is in no stream of its own is in the way of the computation."""
    return [] if device.busy else ["no stream has done anything but the default one"]


SCENES: dict[str, Callable[[], list[str]]] = {
    "fetched": fetched,
    "examined": examined,
    "accelerated": accelerated,
    "slept": slept,
    "timed": timed,
    "looked at": looked_at,
    "looked at there": looked_at_there,
    "brought again": brought_again,
    "poisoned": poisoned,
    "buffers": buffers,
    "means": means,
    "by way of the host": partial(watched_alone),
    "staged": partial(watched_alone, "auto"),
    "streamed": partial(watched_alone, "auto", streams=True),
    "compared": compared,
    "promised": promised,
    "interrupted": interrupted,
    "broken off": broken_off,
    "moved": moved,
    "scaled, by way of the host": partial(trained, "topk(ratio=0.1)"),
    "scaled, staged": partial(trained, "topk(ratio=0.1)", "auto"),
    "scaled, streamed": partial(trained, "topk(ratio=0.1)", "auto", streams=True),
    "read by the codec": partial(trained, "gcomp"),
}

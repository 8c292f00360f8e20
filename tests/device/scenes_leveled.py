"""Scenes of two levels on a simulated device: two nodes of two ranks over gloo, which passes for NCCL."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.errors import PeerFailed
from gradwire.sources.nodes.level import Packing
from tests.device.scenes_placed import on, watched
from tests.device.scenes_resumed import Training
from tests.support.depth import drawn
from tests.support.models import batch, digest, optimizer_of, perceptron
from tests.support.ranks import TIMEOUT_S
from tests.support.simulated import Near, Simulated
from tests.support.states import own_state

NODES = ((0, 1), (2, 3))
STREAMED = drawn(("dense", "int8", "topk", "powersgd"), 2, "streamed on nodes")


def _moved(device: Simulated | None) -> dict[str, Any]:
    """What runs next reads numbers on the host, and what runs after that does not."""
    training, seen, kept = Training("topk(ratio=0.1)", device, "stream", nodes=NODES), [], []
    for number, text in enumerate(("topk(ratio=0.1)", "threshold(threshold=0.01)", "topk(ratio=0.2)")):
        before = own_state(training.wire)["memory"]
        training.wire.switch(text)
        after = own_state(training.wire)["memory"]
        kept.append(all(torch.equal(after[name], values) for name, values in before.items()))
        training.steps(range(2 * number + 2, 2 * number + 4))
        seen.append(training.wire.report().placement)
    return {"digest": digest(training.model), "seen": seen, "kept": kept}


def moves() -> dict[str, Any]:
    """On the device and on the CPU."""
    return {"there": _moved(Near()), "here": _moved(None)}


def without_room() -> dict[str, Any]:
    """Rank 1 cannot pack what its neighbour gets, once; `fails` otherwise."""
    training, honest = Training("int8", Near(), "stream", nodes=NODES), Packing.pack
    found = []
    for left in ([], [MemoryError("no room")] * (dist.get_rank() == 1), []):

        def pack(packing: Packing, buffer: Tensor, left: list[Exception] = left) -> Tensor:
            if left:
                raise left.pop()
            return honest(packing, buffer)

        with patch.object(Packing, "pack", pack):
            try:
                training.step(2)
                found.append("")
            except (MemoryError, PeerFailed) as error:
                found.append(type(error).__name__)
    return {"found": found, "digest": digest(training.model), "step": training.wire.report().step}


def with_groups_apart() -> dict[str, Any]:
    """As on NCCL, one backend carries tensors of the device, and gloo those on the CPU."""
    dist.Backend.register_backend("near", _gloo, devices=["cpu"])
    # With a timeout of its own, so that no groups of other scenes serve.
    own = dist.new_group(backend="near", timeout=timedelta(seconds=TIMEOUT_S - 1))
    groups = len(dist.distributed_c10d._world.pg_names)
    ddp = DistributedDataParallel(perceptron(), process_group=own)
    device = Near()
    with (
        on(device),
        patch("gradwire.comm.groups.STREAMED", frozenset({"near"})),
        patch("gradwire.comm.groups.carries_cpu", lambda group: dist.get_backend(group) == "gloo"),
    ):
        wire = gradwire.attach(ddp, optimizer_of(ddp), "int8", nodes=NODES)
        groups = len(dist.distributed_c10d._world.pg_names) - groups
        inputs, targets = batch(0)
        with watched(device, wire):
            nn.functional.mse_loss(ddp(inputs), targets).backward()
        again = gradwire.attach(DistributedDataParallel(perceptron(), process_group=own), None, "int8")
    return {
        "placement": wire.report().placement,
        "step": wire.report().step,
        "groups": groups,
        "flat": again.report().placement,
        "races": device.races[:5],
    }


def _gloo(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)

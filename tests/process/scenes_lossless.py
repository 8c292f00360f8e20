"""Scenes of training by lossless and near-lossless all-reduces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from tests.support.models import batch, digest, perceptron, train
from tests.support.states import own_state

KINDS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda module: torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9),
    "adamw": lambda module: torch.optim.AdamW(module.parameters(), lr=1e-3),
}


def training_is_ddps() -> dict[str, list[str]]:
    """Fingerprints after sixty steps, past a change of tables, of DDP and of gcomp(mode='lossless')."""
    found: dict[str, list[str]] = {}
    for name, build in KINDS.items():
        for recipe in (None, "gcomp(mode='lossless')"):
            ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.02)
            optimizer = build(ddp)
            if recipe is not None:
                gradwire.attach(ddp, optimizer, recipe)
            train(ddp, optimizer, range(60))
            found.setdefault(name, []).append(digest(ddp))
    return found


def near_by_optimizer() -> dict[str, Any]:
    """Replicas, bytes, and how far sixty steps end from DDP's, relative to how far they went."""
    found: dict[str, Any] = {}
    for name, build in KINDS.items():
        ends, start = [], perceptron().state_dict()
        for recipe in (None, "gcomp", "gcomp(mode='levels')"):
            ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.02)
            optimizer = build(ddp)
            wire = None if recipe is None else gradwire.attach(ddp, optimizer, recipe)
            train(ddp, optimizer, range(60))
            ends.append(nn.utils.parameters_to_vector(ddp.parameters()).detach())
            if wire is not None:
                found[f"{name} {recipe}"] = {"digest": digest(ddp), "ratio": wire.report().ratio}
        way = (ends[0] - torch.cat([each.reshape(-1) for each in start.values()])).norm()
        for recipe, end in zip(("gcomp", "gcomp(mode='levels')"), ends[1:], strict=True):
            found[f"{name} {recipe}"]["away"] = float((end - ends[0]).norm() / way)
    return found


def loss_scales() -> list[str]:
    """Fingerprints after sixty steps of near-lossless training, without a loss scale and with 2^12."""
    found = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=10**6)):
        ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.02)
        optimizer = KINDS["adamw"](ddp)
        gradwire.attach(ddp, optimizer, "gcomp", scaler=scaler)
        if scaler is None:
            train(ddp, optimizer, range(60))
        else:
            train_scaled(ddp, optimizer, scaler, range(60))
        found.append(digest(ddp))
    return found


def train_scaled(
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    steps: range,
) -> None:
    """As `train`, with losses scaled and gradients scaled back."""
    for step in steps:
        inputs, targets = batch(step)
        optimizer.zero_grad()
        scaler.scale(nn.functional.mse_loss(ddp(inputs), targets)).backward()
        scaler.step(optimizer)
        scaler.update()


def resumed() -> bool:
    """Whether a run that is saved and loaded goes on with its tables, to the last bit."""

    def fresh() -> tuple[DistributedDataParallel, torch.optim.Optimizer, Any]:
        ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.02)
        optimizer = KINDS["adamw"](ddp)
        return ddp, optimizer, gradwire.attach(ddp, optimizer, "gcomp(refresh=4)")

    ddp, optimizer, wire = fresh()
    train(ddp, optimizer, range(6))
    saved = ddp.state_dict(), optimizer.state_dict(), own_state(wire)
    saved = torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, saved)
    train(ddp, optimizer, range(6, 12))
    other, its_optimizer, its_wire = fresh()
    other.load_state_dict(saved[0])
    its_optimizer.load_state_dict(saved[1])
    its_wire.load_state_dict(saved[2])
    assert any(kind.startswith("symbols") for kind in saved[2]["kept"])
    train(other, its_optimizer, range(6, 12))
    return digest(ddp) == digest(other)


SCENES: dict[str, Callable[[], Any]] = {
    "training": training_is_ddps,
    "near": near_by_optimizer,
    "loss scales": loss_scales,
    "resumed": resumed,
}

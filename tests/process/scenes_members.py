"""Scenes of rounds among members: a fixed set of them beside `replicas=`, by all kinds of recipes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire
from gradwire.agreement.agree import checksum
from gradwire.step.fates import local
from tests.process.scenes_outer import EVERY, shared, steps, values
from tests.support.models import perceptron

ROUNDS = 4


def _trained(model: nn.Module, recipe: str, delay: int, seed: int, **who: Any) -> dict[str, Any]:
    """Digests of this replica's parameters and of θ₀ after each round, and bytes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wire = gradwire.outer(model, optimizer, recipe, every=EVERY, delay=delay, **who)
    seen = []
    for round_ in range(ROUNDS):
        first = 100 * seed + EVERY * round_
        steps(model, optimizer, range(first, first + EVERY))
        seen += [_digest(shared(wire, model)), _digest(values(model))]
    steps(model, optimizer, range(90, 90 + delay))  # in which the last round lands
    seen.append(_digest(values(model)))
    report = wire.report()
    return {"seen": seen, "bytes": report.wire_bytes, "rounds": report.step}


def _digest(tensors: list[torch.Tensor]) -> str:
    return str([checksum(local(each)) for each in tensors])


def plain(recipe: str, delay: int) -> dict[str, Any]:
    """Two replicas of a rank each."""
    group = dist.group.WORLD
    one = _trained(perceptron(dist.get_rank()), recipe, delay, dist.get_rank(), replicas=group)
    members = gradwire.members.fixed(group, address="127.0.0.1")
    other = _trained(perceptron(dist.get_rank()), recipe, delay, dist.get_rank(), members=members)
    return {"same": one == other, "moves": len(set(one["seen"])) > 2, "rounds": one["rounds"]}


def inside(kind: str, recipe: str, delay: int) -> dict[str, Any]:
    """Two replicas of two ranks each, by DDP or FSDP2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "ranks"))
    replica = mesh.get_local_rank("replicas")

    def made() -> nn.Module:
        module = perceptron(replica)
        if kind == "ddp":
            return nn.parallel.DistributedDataParallel(module, process_group=mesh.get_group("ranks"))
        fully_shard(module, mesh=mesh["ranks"])
        return module

    one = _trained(made(), recipe, delay, replica, replicas=mesh["replicas"])
    members = gradwire.members.fixed(mesh["replicas"], address="127.0.0.1")
    other = _trained(made(), recipe, delay, replica, members=members)
    return {"same": one == other, "moves": len(set(one["seen"])) > 2, "rounds": one["rounds"]}


RECIPES = ("diloco", "int4", "sparseloco", "powersgd(rank=2)", "topk(ratio=0.1)")
SCENES: dict[str, Callable[[], Any]] = {
    f"{recipe}, {delay}": partial(plain, recipe, delay) for recipe in RECIPES for delay in (0, 2)
}
INSIDE: dict[str, Callable[[], Any]] = {
    f"{kind}, {recipe}, {delay}": partial(inside, kind, recipe, delay)
    for kind in ("ddp", "fsdp")
    for recipe in ("diloco", "int4")
    for delay in (0, 2)
}
SCENES |= INSIDE

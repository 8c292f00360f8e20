"""Scenes of rounds over a folder, beside those of a process group."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.agreement.agree import checksum
from gradwire.members.bucket import meet, member
from gradwire.step.optimizers import local
from tests.process.scenes_outer import EVERY, shared, values
from tests.support.models import SHAPE, batch, perceptron

ROUNDS = 4


class Normed(nn.Module):
    """A perceptron with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = perceptron(0)
        self.norm = nn.BatchNorm1d(SHAPE[0])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(self.norm(inputs))
        return found


def _folder() -> str:
    """A folder that all ranks know."""
    told = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(told, src=0)
    return str(told[0])


def _digest(tensors: list[torch.Tensor]) -> str:
    return str([checksum(local(each)) for each in tensors])


def _trained(model: nn.Module, recipe: str, delay: int, data: int, **who: Any) -> list[list[torch.Tensor]]:
    """θ₀ and this replica's parameters and buffers after each round; `data` are a rank's."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wire = gradwire.outer(model, optimizer, recipe, every=EVERY, delay=delay, **who)
    seen = []

    def look(*tensors: list[torch.Tensor]) -> None:
        seen.extend([local(each).clone() for each in some] for some in tensors)

    def take(numbers: range) -> None:
        for step in numbers:
            inputs, targets = batch(step, data)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()

    for round_ in range(ROUNDS):
        take(range(EVERY * round_, EVERY * round_ + EVERY))
        look(shared(wire, model), values(model), list(model.buffers()))
    take(range(90, 90 + delay))  # in which the last round lands
    look(shared(wire, model))
    wire.detach()
    return seen


def _compared(
    one: list[list[torch.Tensor]], other: list[list[torch.Tensor]], atol: float = 0.0
) -> dict[str, Any]:
    pairs = [pair for some in zip(one, other, strict=True) for pair in zip(*some, strict=True)]
    same = all(torch.allclose(mine, theirs, rtol=0.0, atol=atol) for mine, theirs in pairs)
    return {"same": same, "moves": len(set(map(_digest, one))) > ROUNDS}


def beside(recipe: str, delay: int, make: Callable[[], nn.Module]) -> dict[str, Any]:
    """Replicas of one rank each: as ranks of a group, and as members that meet in a folder.

    All begin with equal parameters: over a store the first one that is there begins.
    """
    folder, rank = _folder(), dist.get_rank()
    one = _trained(make(), recipe, delay, rank, replicas=dist.group.WORLD)
    members = gradwire.members.store(folder, f"site-{rank}", at_least=dist.get_world_size(), beat_s=2.0)
    other = _trained(make(), recipe, delay, rank, members=members)
    return _compared(one, other)


def inside(
    kind: str, recipe: str, delay: int, make: Callable[[], nn.Module], atol: float = 0.0
) -> dict[str, Any]:
    """Two sites of two ranks each over a folder, beside replicas in a group. By DDP those have one rank: it
    has the data of both ranks of a site, which are the same.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "ranks"))
    folder, replica, place = _folder(), mesh.get_local_rank("replicas"), mesh.get_local_rank("ranks")
    data = replica if kind == "ddp" else dist.get_rank()
    model = make()
    if kind == "fsdp2":
        fully_shard(model, mesh=mesh["ranks"])
    one = _trained(model, recipe, delay, data, replicas=mesh["replicas"])
    dist.barrier()
    dist.destroy_process_group()
    store = f"file://{folder}/{replica}.store"
    dist.init_process_group("gloo", init_method=store, rank=place, world_size=2)
    model = make()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    members = gradwire.members.store(f"{folder}/run", f"site-{replica}", at_least=2, beat_s=2.0)
    other = _trained(model, recipe, delay, data, members=members)
    dist.barrier()  # a rank that leaves would end the other's group
    return _compared(one, other, atol)


def refused() -> list[str]:
    """What is said of recipes whose replicas answer each other."""
    found = []
    for recipe in ("int4", "powersgd(rank=2)", "leader_topk(ratio=0.1)", "threshold"):
        model = perceptron(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        members = gradwire.members.store(tempfile.mkdtemp(), "site-a")
        try:
            gradwire.outer(model, optimizer, recipe, every=EVERY, members=members)
        except ValueError as error:
            found.append(str(error))
    return found


def _site(model: nn.Module, name: str, **options: Any) -> Any:
    """The wire of a site, and its optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    at = {"at_least": 1, "beat_s": 2.0} | {
        key: options.pop(key) for key in ("at_least", "alone") if key in options
    }
    members = gradwire.members.store(f"{options.pop('folder')}/run", name, **at)
    return gradwire.outer(model, optimizer, "topk(ratio=0.2)", members=members, **options), optimizer


def _take(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def _raised(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def alone_and_another() -> dict[str, Any]:
    """A site of both ranks trains alone until there is one of a single rank, on its first rank."""
    folder, model, other = _folder(), DistributedDataParallel(perceptron(0)), perceptron(0)
    with patch.object(meet, "ALONE_S", 0.1):
        wire, optimizer = _site(model, "a", folder=folder, at_least=2, alone="train", every=2)
    _take(model, optimizer, 7)
    found = {"before": [wire.rounds, wire.attempts, [each.what for each in wire.events]]}
    if dist.get_rank() == 0:
        another, own = _site(other, "b", folder=folder, at_least=2, every=2)
        _take(other, own, 2)
        another.detach()
    steps = 0
    while not wire.rounds:
        time.sleep(0.05)  # its seal is read beside training
        _take(model, optimizer, 1)
        steps += 1
    found["after"] = [wire.rounds, list(wire.members), wire.report().rounds_committed, steps > 0]
    wire.detach()
    return found


def paced() -> list[int]:
    """Attempted steps after each round by time, of ranks with other clocks: 1/8 s or 10 s a step."""
    clock, at, step_s = [0.0], list[int](), 0.125 if dist.get_rank() == 0 else 10.0
    model = DistributedDataParallel(perceptron(0))
    with patch.object(member, "now_s", lambda: clock[0]):
        wire, optimizer = _site(model, "a", folder=_folder(), every=2, every_seconds=1.0)
        for _ in range(18):
            clock[0] += step_s
            _take(model, optimizer, 1)
            at += [wire.attempts] if wire.rounds > len(at) else []
        wire.detach()
    return at


def asked_otherwise() -> list[str]:
    """What ranks of a site raise that were called with other arguments."""
    rank, found = dist.get_rank(), []
    for name, every, recipe in (
        ("a", 2 + rank, ""),
        (f"site-{rank}", 2, ""),
        ("a", 2, "int4" if rank else ""),
    ):
        model = DistributedDataParallel(perceptron(0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        members = gradwire.members.store(f"{_folder()}/run", name, at_least=1)
        make = partial(
            gradwire.outer, model, optimizer, recipe or "topk(ratio=0.2)", every=every, members=members
        )
        found.append(_raised(make))
        _take(model, optimizer, 2)
    return found


def named_twice() -> str:
    """What all ranks of a site raise when another process takes its name."""
    folder, model, other = _folder(), DistributedDataParallel(perceptron(0)), perceptron(0)
    _wire, optimizer = _site(model, "a", folder=folder, every=2)
    if dist.get_rank() == 0:
        _site(other, "a", folder=folder, every=2)[0].detach()
    dist.barrier()
    found = _raised(partial(_take, model, optimizer, 2))
    _wire.detach()
    return found


def saved() -> dict[str, Any]:
    """A site by FSDP2 goes on from its save, and another one from the folder alone."""
    folder, mesh = _folder(), init_device_mesh("cpu", (2,))

    def made(seed: int) -> nn.Module:
        model = perceptron(seed)
        fully_shard(model, mesh=mesh)
        return model

    model = made(0)
    wire, optimizer = _site(model, "a", folder=folder, every=2)
    _take(model, optimizer, 4)
    wire.save(f"{folder}/saves")
    before = _digest(shared(wire, model)), _digest(values(model))
    wire.detach()
    again = made(1)
    wire, optimizer = _site(again, "a", folder=folder, every=2, resume=f"{folder}/saves")
    resumed = _digest(shared(wire, again)), _digest(values(again))
    _take(again, optimizer, 2)
    after = _digest(shared(wire, again))
    found = {"same": resumed == before, "rounds": wire.rounds, "moves": after != before[0]}
    wire.detach()
    fresh = made(2)
    wire, _optimizer = _site(fresh, "a", folder=folder, every=2)
    found["from the folder"] = [_digest(shared(wire, fresh)) == after, wire.rounds]
    wire.detach()
    return found


RECIPES = ("sparseloco", "topk(ratio=0.1)", "int4(collective='all_gather')", "int8(collective='all_gather')")
SCENES: dict[str, Callable[[], Any]] = {
    f"{recipe}, {delay}": partial(beside, recipe, delay, lambda: perceptron(0))
    for recipe in (*RECIPES, "onebit", "diloco")
    for delay in (0, 2)
}
SCENES |= {"buffers": partial(beside, "diloco", 0, Normed), "refused": refused}
INSIDE: dict[str, Callable[[], Any]] = {
    f"{kind}, {recipe}, {delay}": partial(inside, kind, recipe, delay, lambda: perceptron(0))
    for kind in ("ddp", "fsdp2")
    for recipe in ("sparseloco", "int4(collective='all_gather')", "diloco")
    for delay in (0, 2)
}
SITE: dict[str, Callable[[], Any]] = {
    "alone": alone_and_another,
    "paced": paced,
    "asked otherwise": asked_otherwise,
    "named twice": named_twice,
    "saved": saved,
}
SCENES |= SITE
INSIDE["ddp, buffers"] = partial(inside, "ddp", "diloco", 0, Normed)
# Buffers of four ranks are added up in another order: those of a site first.
INSIDE["fsdp2, buffers"] = partial(inside, "fsdp2", "diloco", 0, Normed, 1e-6)
SCENES |= INSIDE

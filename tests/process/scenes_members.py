"""Scenes of rounds among members: a fixed set of them beside `replicas=`, by all kinds of recipes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire
from gradwire._api import connections
from gradwire.agreement.agree import checksum
from gradwire.comm import ProcessGroupComm
from gradwire.measure.connections import tried
from gradwire.members import Card, Roster
from gradwire.members.standing import Fixed
from gradwire.step.optimizers import local
from tests.process.scenes_outer import EVERY, shared, steps, values
from tests.support.models import perceptron

ROUNDS = 4
LOOK, LOOKS = 4, 12
"""Rounds from one look at losses to the next, and looks."""


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
    sent = {"bytes": report.wire_bytes, "by round": ROUNDS * report.wire_bytes_per_step}
    return sent | {"seen": seen, "rounds": report.step}


def _beside(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    found = {"same": one == other, "moves": len(set(one["seen"])) > 2, "rounds": one["rounds"]}
    return found | {"counted": one["bytes"] == one["by round"] > 0}


def _digest(tensors: list[torch.Tensor]) -> str:
    return str([checksum(local(each)) for each in tensors])


def plain(recipe: str, delay: int, kind: type[Fixed] = Fixed) -> dict[str, Any]:
    """Two replicas of a rank each; as ranks of a group, and as members of a `kind`."""
    group = dist.group.WORLD
    one = _trained(perceptron(dist.get_rank()), recipe, delay, dist.get_rank(), replicas=group)
    members = kind(group, "127.0.0.1")
    other = _trained(perceptron(dist.get_rank()), recipe, delay, dist.get_rank(), members=members)
    return _beside(one, other)


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
    return _beside(one, other)


class Anew(Fixed):
    """Members that stay, and connect anew before a round where they are told to."""

    is_broken = False

    def ask(self, card: Card) -> Roster:
        return super().ask(replace(card, meeting="") if self.is_broken else card)


class AlwaysAnew(Anew):
    """Members that connect anew before each round."""

    is_broken = True


def anew() -> dict[str, Any]:
    """Rounds, each in another meeting: files, threads and settings after the second and after the last."""
    members, model = Anew(dist.group.WORLD, "127.0.0.1"), perceptron(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    held = []
    # All links are taken to be long ones, which are measured by large messages.
    with (
        patch("gradwire.measure.connections.LONG_S", 0.0),
        patch.object(connections, "tried", Mock(wraps=tried)),
    ):
        wire = gradwire.outer(model, optimizer, "int4", every=1, members=members)
        wire.overlap, members.is_broken = False, True
        for step in range(9):
            steps(model, optimizer, range(step, step + 1))
            dist.barrier()
            held.append([len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task")])
        measured = connections.tried.call_count
    return {"held": held, "overlap": wire.overlap, "rounds": wire.rounds, "measured": measured}


def questions() -> list[int]:
    """Collectives of each of six rounds over long links, the last three of which are in fresh meetings."""
    members, model = Anew(dist.group.WORLD, "127.0.0.1"), perceptron(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    issue, counts = ProcessGroupComm.issue, [0]

    def counting(self: ProcessGroupComm, *round_: Any) -> Any:
        counts[-1] += self.world > 1
        return issue(self, *round_)

    with (
        patch("gradwire.measure.connections.LONG_S", 0.0),
        patch("gradwire._api.connections.LONG_S", 0.0),
        patch.object(ProcessGroupComm, "issue", counting),
    ):
        gradwire.outer(model, optimizer, "int4", every=1, members=members)
        for step in range(6):
            members.is_broken = step >= 3
            counts.append(0)
            steps(model, optimizer, range(step, step + 1))
    return counts[1:]


def paced(every_seconds: float) -> int:
    """Rounds in five times as many steps as the first one takes."""
    members, model = gradwire.members.fixed(dist.group.WORLD, address="127.0.0.1"), perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    how: dict[str, Any] = {"every": EVERY, "every_seconds": every_seconds, "members": members}
    wire = gradwire.outer(model, optimizer, "diloco", **how)
    steps(model, optimizer, range(5 * EVERY))
    return wire.rounds


def losses_that_rise() -> list[str]:
    """Signs that losses have risen, where the roster has changed just before."""
    members, model = Anew(dist.group.WORLD, "127.0.0.1"), perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with patch("gradwire.control.controller.EVERY", LOOK):
        wire = gradwire.outer(model, optimizer, "topk(ratio=0.5)", every=1, members=members)
        for step in range(LOOKS * LOOK + 1):
            members.is_broken = step == (LOOKS - 2) * LOOK
            wire.note_loss(2.0 if step > (LOOKS - 2) * LOOK else 1.0)
            steps(model, optimizer, range(step, step + 1))
    return [sign for _step, sign in wire.report().health]


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
ALSO: dict[str, Callable[[], Any]] = {
    "anew": anew,
    "moved": partial(plain, "topk(ratio=0.1)", 0, AlwaysAnew),
    "moved, with factors": partial(plain, "powersgd(rank=2)", 2, AlwaysAnew),
    "questions": questions,
    "hardly ever": partial(paced, 1e9),
    "as often as can be": partial(paced, 1e-9),
    "losses": losses_that_rise,
}
SCENES |= ALSO

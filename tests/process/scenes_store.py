"""Scenes of rounds over a folder, beside those of a process group."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gradwire
from gradwire.agreement.agree import checksum
from tests.process.scenes_outer import EVERY, shared, steps, values
from tests.support.models import SHAPE, perceptron

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
    return str([checksum(each) for each in tensors])


def _trained(model: nn.Module, recipe: str, delay: int, **who: Any) -> list[str]:
    """Digests of θ₀ and of this replica's parameters and buffers after each round."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wire = gradwire.outer(model, optimizer, recipe, every=EVERY, delay=delay, **who)
    seen = []
    for round_ in range(ROUNDS):
        first = 100 * dist.get_rank() + EVERY * round_
        steps(model, optimizer, range(first, first + EVERY))
        seen += [_digest(shared(wire, model)), _digest(values(model)), _digest(list(model.buffers()))]
    steps(model, optimizer, range(90, 90 + delay))  # in which the last round lands
    seen.append(_digest(shared(wire, model)))
    return seen


def beside(recipe: str, delay: int, make: Callable[[], nn.Module]) -> dict[str, Any]:
    """Replicas of one rank each: as ranks of a group, and as members that meet in a folder.

    All begin with equal parameters: over a store the first one that is there begins.
    """
    folder = _folder()
    one = _trained(make(), recipe, delay, replicas=dist.group.WORLD)
    name = f"site-{dist.get_rank()}"
    members = gradwire.members.store(folder, name, at_least=dist.get_world_size(), beat_s=2.0)
    other = _trained(make(), recipe, delay, members=members)
    return {"same": one == other, "moves": len(set(one)) > ROUNDS}


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


RECIPES = ("sparseloco", "topk(ratio=0.1)", "int4(collective='all_gather')", "int8(collective='all_gather')")
SCENES: dict[str, Callable[[], Any]] = {
    f"{recipe}, {delay}": partial(beside, recipe, delay, lambda: perceptron(0))
    for recipe in (*RECIPES, "onebit", "diloco")
    for delay in (0, 2)
}
SCENES |= {"buffers": partial(beside, "diloco", 0, Normed), "refused": refused}

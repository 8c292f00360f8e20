"""Loops of local steps, and what replicas hold, for scenes of `gradwire.outer`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict

import gradwire
from tests.support.bits import Checksums, checksums
from tests.support.models import batch
from tests.support.ranks import FOLDER

EVERY = 4
plain_sgd = partial(torch.optim.SGD, lr=1.0)
"""An outer optimizer that takes the mean as it is."""


def outer(model: nn.Module, optimizer: Any, recipe: str = "diloco", **options: Any) -> gradwire.OuterWire:
    return gradwire.outer(
        model, optimizer, recipe, **{"replicas": dist.group.WORLD, "every": EVERY} | options
    )


def loss_of(model: nn.Module, step: int, data: int | None = None) -> Tensor:
    """On the batch of a rank, its own if none is named."""
    inputs, targets = batch(step, data)
    dtype = next(model.parameters()).dtype
    return nn.functional.mse_loss(model(inputs.to(dtype)), targets.to(dtype))


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, numbers: Iterable[int], data: int | None = None
) -> None:
    for step in numbers:
        optimizer.zero_grad()
        loss_of(model, step, data).backward()
        optimizer.step()


def values(model: nn.Module) -> list[Tensor]:
    return [each.detach().clone() for each in model.parameters()]


def shared(wire: gradwire.OuterWire, model: nn.Module) -> list[Tensor]:
    with wire.shared_parameters():
        return values(model)


ROUNDS = 4


@dataclass(frozen=True)
class Run:
    """What a replica held after each of four rounds: θ₀, then its own parameters; and both at last. And what
    its wire told.
    """

    held: list[Checksums]
    buffers: tuple[float, ...]
    """After each round."""
    rounds: int
    sent_bytes: int
    bytes_by_round: float


def trained(model: nn.Module, recipe: str, delay: int, data: int | None = None, **who: Any) -> Run:
    """On the data of a rank, its own if none is named."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wire = gradwire.outer(model, optimizer, recipe, every=EVERY, delay=delay, **who)
    held, buffers = list[Checksums](), list[float]()

    def look() -> None:
        held.extend([checksums(shared(wire, model)), checksums(values(model))])

    for round_ in range(ROUNDS):
        steps(model, optimizer, range(EVERY * round_, EVERY * round_ + EVERY), data)
        look()
        buffers += [number for each in model.buffers() for number in each.flatten().tolist()]
    steps(model, optimizer, range(90, 90 + delay), data)  # in which the last round lands
    look()
    report = wire.report()
    wire.detach()
    return Run(held, tuple(buffers), report.step, report.wire_bytes, report.wire_bytes_per_step)


def theta0(wire: gradwire.OuterWire) -> list[Tensor]:
    """As the outer optimizer has them: at most in more bits than the model."""
    return [each.detach() for group in wire.outer_optimizer.param_groups for each in group["params"]]


def mean_of_all(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, tensor.contiguous(), group=group)
    return torch.stack(found).mean(0)


def apart(one: Iterable[Tensor], other: Iterable[Tensor]) -> float:
    """The largest distance between two elements at the same place; NaN where one is NaN."""
    return float(torch.stack([(a - b).abs().max() for a, b in zip(one, other, strict=True)]).max())


def distance(one: Iterable[Tensor], other: Iterable[Tensor]) -> float:
    """The Euclidean one between all elements."""
    return float(torch.cat([(a - b).flatten() for a, b in zip(one, other, strict=True)]).norm())


def normed(seed: int = 30) -> nn.Module:
    """A small model with buffers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 8))


def normed_and_wire(recipe: str, delay: int) -> tuple[nn.Module, torch.optim.Optimizer, gradwire.OuterWire]:
    model = normed(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, outer(model, optimizer, recipe, delay=delay)


def rested(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int) -> None:
    """Steps that learn nothing."""
    [group] = optimizer.param_groups
    rate, group["lr"] = group["lr"], 0.0
    steps(model, optimizer, range(first, first + count))
    group["lr"] = rate


State = dict[str, Tensor]
Way = Callable[[nn.Module, State], Any]
"""A way to load, which leaves the state as it is."""


def copied(state: State) -> State:
    return {name: each.clone() for name, each in state.items()}


def load_all(model: nn.Module, state: State) -> None:
    model.load_state_dict(copied(state))


def load_by_dcp(model: nn.Module, state: State) -> None:
    """DCP writes into the parameters themselves, and then loads them into themselves. A collective."""
    folder = common_folder()
    dcp.save({"model": copied(state)}, checkpoint_id=folder)
    dcp.load({"model": model}, checkpoint_id=folder)


def load_by_setting(model: nn.Module, state: State) -> None:
    set_model_state_dict(model, copied(state))  # type: ignore[arg-type]


class OwnDiLoCo:
    """DiLoCo by the paper's formulas, with torch's own collectives; a round's result lands `delay` later."""

    def __init__(self, model: nn.Module, delay: int = 0, group: dist.ProcessGroup | None = None) -> None:
        self.parameters, self.delay, self.group = list(model.parameters()), delay, group
        self.shared = values(model)
        self.momentum = [torch.zeros_like(each) for each in self.shared]
        self.sent: list[Tensor] = []
        self.count = 0

    @torch.no_grad()
    def after_step(self) -> None:
        self.count += 1
        if self.sent and self.count % EVERY == self.delay:
            self.land()
        if self.count % EVERY == 0:
            self.sent = [each.clone() for each in self.parameters]
            if self.delay == 0:
                self.land()

    def land(self) -> None:
        for parameter, start, m, sent in zip(
            self.parameters, self.shared, self.momentum, self.sent, strict=True
        ):
            delta = mean_of_all(start - sent, self.group)
            m.mul_(0.9).add_(delta)
            start.sub_(0.7 * (delta + 0.9 * m))
            parameter.add_(start - sent)
        self.sent = []


class ScheduleFree(torch.optim.SGD):
    """In the manner of schedulefree's: the model's parameters are others in evaluation."""

    def train(self) -> None:
        for group in self.param_groups:
            group["train_mode"] = True

    def eval(self) -> None:
        for group in self.param_groups:
            group["train_mode"] = False


def common_folder() -> str:
    """A new one that all ranks know, in that of their scenes."""
    told = [tempfile.mkdtemp(dir=os.environ[FOLDER]) if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(told, src=0)
    return str(told[0])

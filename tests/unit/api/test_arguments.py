"""Arguments of public calls in a world of one: what can be read once, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire
from gradwire.integrations.training import attached
from tests.support.looped import looped
from tests.support.models import batch, perceptron


@pytest.fixture(autouse=True)
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _attach(model: nn.Module, optimizer: Any, **options: Any) -> gradwire.Wire:
    return gradwire.attach(model, optimizer, **{"recipe": "dense", "replicas": dist.group.WORLD} | options)


def _outer(model: nn.Module, optimizer: Any, **options: Any) -> gradwire.OuterWire:
    return gradwire.outer(model, optimizer, **{"replicas": dist.group.WORLD, "every": 2} | options)


def _moving(model: nn.Module, optimizer: Any, **options: Any) -> gradwire.OuterWire:
    return gradwire.outer(
        model, optimizer, members=gradwire.members.fixed(dist.group.WORLD), every=2, **options
    )


def _switched(model: nn.Module, optimizer: Any) -> gradwire.Wire:
    wire = _attach(model, torch.optim.Adam(model.parameters()))
    wire.switch_optimizer(optimizer)
    return wire


WAYS: dict[str, Callable[[list[Any]], Any]] = {
    "generator": lambda several: (each for each in several),
    "iterator": iter,
    "tuple": tuple,
    "values": lambda several: dict(enumerate(several)).values(),
}


def _halves(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[:2], model[2:])]  # type: ignore[index]


@looped("take", [_attach, _switched])
@looped("way", WAYS)
def test_optimizers_may_be_read_once(take: Callable[..., gradwire.Wire], way: str) -> None:
    model = perceptron()
    halves = _halves(model)
    assert take(model, WAYS[way](halves)).attached.optimizers == tuple(halves)


@looped("take", [_outer, _moving])
@looped("way", WAYS)
def test_optimizers_of_local_steps_may_be_read_once(
    take: Callable[..., gradwire.OuterWire], way: str
) -> None:
    model = perceptron()
    halves = _halves(model)
    wire = take(model, WAYS[way](halves))
    model(batch(0)[0]).sum().backward()
    halves[0].step()
    assert wire.attempts == 0
    halves[1].step()
    assert wire.attempts == 1


@looped("way", WAYS)
def test_a_framework_may_hand_over_what_can_be_read_once(way: str) -> None:
    model = perceptron()
    halves = _halves(model)
    first = attached(None, 1, model, WAYS[way](halves), "dense")
    assert attached(first, 1, model, WAYS[way](halves[:1]), "dense") is first
    assert first.attached.optimizers == (halves[0],)


class Scaled(torch.optim.Optimizer):
    """As Accelerate wraps one: with the scaler, and without hooks of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        self.optimizer, self.scaler = optimizer, scaler


@looped("way", WAYS)
def test_the_scaler_is_found_in_whatever_holds_the_optimizers(way: str) -> None:
    model, scaler = perceptron(), torch.amp.GradScaler("cpu")
    optimizer = Scaled(torch.optim.SGD(model.parameters(), lr=0.1), scaler)
    assert _attach(model, WAYS[way]([optimizer])).attached.scaler is scaler

"""Arguments of public calls in a world of one: what can be read once, and what is refused by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
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


CLUSTER = {"rate_bit_per_s": 1e9, "step_s": 0.18, "candidates": ["dense", "int8"]}
FOUR: dict[str, Any] = {"plan": {"workers": 4}, "simulate": {"workers": (4,)}}
CALLS: dict[str, Callable[..., Any]] = {"plan": gradwire.plan, "simulate": gradwire.simulate}
NO_NUMBERS = ("4", True, [4], math.nan, {}, torch.tensor([0.5, 0.25]), np.bool_(True))
NO_COUNTS = (*NO_NUMBERS, None, -1, 0, 1.5, math.inf, 10**30, np.float64(4.5))
NO_SPANS = (*NO_NUMBERS, None, -1.0, -math.inf)
NO_SWITCHES = (None, 2, "yes", 0.5, [True], np.int64(2))
OF_BOTH: dict[str, tuple[Any, ...]] = {
    "rate_bit_per_s": (*NO_SPANS, 0.0),
    "step_s": (*NO_SPANS, 0.0, math.inf),
    "delay_s": (*NO_SPANS, math.inf),
    "backward_s": (*NO_NUMBERS, -1.0, 0.0, math.inf),
    "per_node": NO_COUNTS,
    "every": (*NO_NUMBERS, None, -1, 0, 1.5, math.inf, 10**30),
    "inside_bit_per_s": (*NO_NUMBERS, -1.0, 0.0),
    "overlap": NO_SWITCHES,
    "sharded": NO_SWITCHES,
    "candidates": ("int8", b"int8", 3, [3], [None], [], ["nope"], iter(())),
    "codecs": (3, "int8", {"int8": 1.0}, {"nope": None}, ["int8"]),
    "told": (3, "print", []),
}
OF_ONE: dict[str, dict[str, tuple[Any, ...]]] = {
    "plan": {"workers": (*NO_COUNTS, 10**18), "target": (*NO_SPANS, 0.0, 1.5), "cores": (None, 4, "x")},
    "simulate": {
        "workers": (8, None, "24", [], [2.5], [True], ["2"], [0], [-1], [10**18], [10**30], 2.5),
        "stragglers": (*NO_SPANS, math.inf, 1e6),
        "seed": (*NO_NUMBERS, None, -1, 1.5),
        "memory_bytes": NO_SPANS,
    },
}


@looped(
    ("call", "name", "value"),
    [
        (call, name, value)
        for call, own in OF_ONE.items()
        for name, values in (OF_BOTH | own).items()
        for value in values
    ],
)
def test_a_prediction_refuses_what_an_argument_cannot_be_by_its_name(
    call: str, name: str, value: Any
) -> None:
    beside = {"inside_bit_per_s": 1e10, "per_node": 2} if name == "per_node" else {}
    if name == "inside_bit_per_s":
        beside = {"per_node": 2}
    with pytest.raises(ValueError) as caught:  # noqa: PT011, the text is compared below
        CALLS[call]("resnet50", **(CLUSTER | FOUR[call] | beside | {name: value}))
    assert re.search(rf"\b{name}\b|nope", str(caught.value))


@looped("call", CALLS)
@looped("model", [None, 3, [], nn.Linear, "nope", torch.ones(2)])
def test_a_prediction_needs_a_model(call: str, model: Any) -> None:
    with pytest.raises(ValueError, match=r"model=|unknown model|no profile"):
        CALLS[call](model, **CLUSTER, **FOUR[call])


@looped(
    ("name", "value", "same"),
    [
        ("step_s", np.float32(0.5), 0.5),
        ("step_s", torch.tensor(0.5), 0.5),
        ("delay_s", np.int64(1), 1),
        ("every", np.int64(4), 4),
        ("per_node", torch.tensor(1), 1),
        ("overlap", np.bool_(False), False),
        ("candidates", lambda: iter(["dense", "int8"]), ["dense", "int8"]),
        ("candidates", {"int8": 1}.keys(), ["int8"]),
        ("rate_bit_per_s", 10**30, 1e30),
        ("rate_bit_per_s", math.inf, math.inf),
    ],
)
@looped("call", CALLS)
def test_numbers_of_other_libraries_and_iterators_count_as_pythons(
    call: str, name: str, value: Any, same: Any
) -> None:
    arguments = CLUSTER | FOUR[call]
    given = value() if callable(value) else value
    found, expected = (CALLS[call]("resnet50", **(arguments | {name: each})) for each in (given, same))
    assert found == expected
    json.dumps(found.as_dict())


@looped(
    "workers",
    [np.array([2, 4]), torch.tensor([2, 4]), range(2, 5, 2), {2, 4}, iter([4, 2]), [np.int64(2), 4]],
)
def test_numbers_of_workers_may_be_in_anything(workers: Any) -> None:
    found = gradwire.simulate("resnet50", **CLUSTER, workers=workers)
    assert found.workers == (2, 4)
    json.dumps(found.as_dict())

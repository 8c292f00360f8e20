"""Arguments of public calls in a world of one: what can be read once, and what is refused by name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire
from gradwire.integrations.training import attached
from gradwire.recipes.topk import topk
from tests.support.looped import looped
from tests.support.models import batch, perceptron

pytestmark = pytest.mark.usefixtures("world_of_one")


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


@pytest.mark.rest
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


NO_WHOLE_NUMBERS = (None, "4", True, 1.5, math.nan, math.inf, [4], torch.tensor([1, 2]))
NO_OBJECTS = (3, "x", object(), True)
NO_TIMES = ("4", True, -1, 0, math.nan, math.inf, 10**30, [4])
OF_ATTACH: dict[str, tuple[Any, ...]] = {
    "seed": NO_WHOLE_NUMBERS,
    "guard_every": (*NO_WHOLE_NUMBERS, -1),
    "target": (None, "x", True, math.nan, math.inf, -1, 0, [0.5]),
    "scaler": (*NO_OBJECTS, []),
    "process_group": (*NO_OBJECTS, []),
    "policy": (*NO_OBJECTS, {3: "int8"}, {None: "int8"}, {"*": 3}),
    "nodes": (3, "x", object(), True, [3], ["01"]),
    "memory_dtype": NO_OBJECTS,
    "placement": (*NO_OBJECTS, None),
    "checksums": (*NO_OBJECTS[:3], None),
    "cuda_graphs": (*NO_OBJECTS[:3], None),
    "skipped": (*NO_OBJECTS, None),
    "replicas": NO_OBJECTS,
}
OF_OUTER: dict[str, tuple[Any, ...]] = {
    "every": (*NO_WHOLE_NUMBERS, 0, -1),
    "delay": (*NO_WHOLE_NUMBERS, 2, -1),
    "seed": NO_WHOLE_NUMBERS,
    "guard_every": (*NO_WHOLE_NUMBERS, -1),
    "outer": (*NO_OBJECTS, []),
    "process_group": (*NO_OBJECTS, []),
    "memory_dtype": NO_OBJECTS,
    "placement": (*NO_OBJECTS, None),
    "checksums": (*NO_OBJECTS[:3], None),
    "timeout_s": (*NO_TIMES, None),
    "replicas": NO_OBJECTS,
    "members": NO_OBJECTS,
    "resume": ("x",),
}
OF_MOVING: dict[str, tuple[Any, ...]] = {
    "policy": OF_ATTACH["policy"],
    "every_seconds": tuple(each for each in NO_TIMES if each != 10**30),  # for a time that never comes
    "timeout_s": (*NO_TIMES, None),
    "resume": (3, True, b"x", []),
}


def _rows(take: Callable[..., Any], values: dict[str, tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [(take, name, value) for name, given in values.items() for value in given]


@looped(
    ("take", "name", "value"),
    [*_rows(_attach, OF_ATTACH), *_rows(_outer, OF_OUTER), *_rows(_moving, OF_MOVING)],
)
def test_a_model_is_not_attached_with_what_an_argument_cannot_be(
    take: Callable[..., Any], name: str, value: Any
) -> None:
    model = perceptron()
    beside = {"replicas": None} if name == "members" else {"recipe": "auto"} if name == "target" else {}
    with pytest.raises((ValueError, TypeError)) as caught:
        take(model, torch.optim.SGD(model.parameters(), lr=0.1), **(beside | {name: value}))
    assert name in str(caught.value)


@looped(
    ("take", "options"),
    [
        (_attach, {"seed": np.int64(4), "guard_every": torch.tensor(2), "checksums": np.bool_(True)}),
        (_attach, {"seed": 2**64 - 1}),
        (_attach, {"recipe": "auto", "target": np.float32(0.5)}),
        (
            _outer,
            {"seed": np.uint32(4), "every": np.int64(2), "delay": torch.tensor(1), "guard_every": np.int8(1)},
        ),
        (_moving, {"every_seconds": torch.tensor(0.5), "timeout_s": np.int64(60)}),
        (_moving, {"every_seconds": np.float64(0.5), "timeout_s": np.float32(60.0)}),
    ],
)
def test_a_model_is_attached_with_numbers_of_other_libraries(
    take: Callable[..., gradwire.Wire], options: dict[str, Any]
) -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wire = take(model, optimizer, **options)
    for step in range(4):
        optimizer.zero_grad()
        inputs, targets = batch(step)
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    assert wire.report().step >= 1


@looped("smallest", [None, "x", math.nan, True, [4]])
def test_a_size_is_a_number(smallest: Any) -> None:
    with pytest.raises(ValueError, match="smallest="):
        gradwire.by_size(smallest=smallest)


@looped("every", [None, "4", True, 0, -1, 1.5, math.nan])
@looped("take", [_attach, _outer])
def test_metrics_are_logged_every_so_many_passes(take: Callable[..., gradwire.Wire], every: Any) -> None:
    model = perceptron()
    wire = take(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="every="):
        wire.log_to(lambda _metrics, step: None, every=every)
    wire.log_to(lambda _metrics, step: None, every=np.int64(2))


@looped("loss", [None, "x", [1.0], torch.tensor([1.0, 2.0]), {}])
def test_a_loss_is_one_number(loss: Any) -> None:
    model = perceptron()
    wire = _attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="loss="):
        wire.note_loss(loss)
    for each in (1, 0.5, torch.tensor([0.5]), torch.ones((), requires_grad=True), np.float32(2.0)):
        wire.note_loss(each)


@looped("take", [_attach, _outer])
@looped("way", WAYS)
def test_states_may_be_read_once(take: Callable[..., gradwire.Wire], way: str) -> None:
    model = perceptron()
    wire = take(model, torch.optim.SGD(model.parameters(), lr=0.1))
    wire.load_state_dict(WAYS[way]([wire.state_dict()]))


@looped(
    ("name", "value"),
    [
        *(("lighthouse", value) for value in (None, 3, b"http://127.0.0.1:9")),
        *(("name", value) for value in (None, 3, True, ["site-a"])),
        *(("address", value) for value in (3, b"lo", ["lo"])),
        *(("quorum_s", value) for value in (*NO_TIMES, None)),
    ],
)
def test_members_are_not_looked_for_with_what_an_argument_cannot_be(name: str, value: Any) -> None:
    given = {"lighthouse": "http://127.0.0.1:9", "name": "site-a"} | {name: value}
    with pytest.raises(ValueError, match=f"{name}="):
        gradwire.members.torchft(**given)


@looped("address", [3, b"lo", ["lo"], True])
def test_an_address_is_a_word(address: Any) -> None:
    with pytest.raises(ValueError, match="address="):
        gradwire.members.fixed(dist.group.WORLD, address=address)


@looped(
    ("call", "name"),
    [(gradwire.plan, "plan"), (gradwire.simulate, "simulate"), (topk, "topk")],
)
def test_an_argument_that_there_is_not_is_refused_by_a_function_with_a_name(
    call: Callable[..., Any], name: str
) -> None:
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'bogus'"):
        call(bogus=1)


def test_graphs_where_there_are_none_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    model = perceptron()
    wire = _attach(model, torch.optim.SGD(model.parameters(), lr=0.1), cuda_graphs=True)
    wire.detach()
    assert "cuda_graphs=True changes nothing here: cpu has no graphs" in caplog.text

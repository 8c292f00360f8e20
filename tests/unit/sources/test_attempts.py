"""Attempted steps that `gradwire.outer` counts, one rank by itself."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from tests.support.models import batch, optimizer_of, perceptron

pytestmark = pytest.mark.usefixtures("world_of_one")


def outer(model: nn.Module, optimizer: torch.optim.Optimizer, every: int = 100) -> gradwire.OuterWire:
    return gradwire.outer(model, optimizer, "diloco", every=every, replicas=dist.group.WORLD)


def backward(model: nn.Module, step: int = 0) -> None:
    inputs, targets = batch(step)
    nn.functional.mse_loss(model(inputs), targets).backward()


def made(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    backward(model)
    optimizer.step()


def left_out(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    backward(model)


def test_a_step_that_is_left_out_counts_although_gradwire_writes_parameters_after_it() -> None:
    model = perceptron()
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer)
    made(model, optimizer)
    left_out(model, optimizer)
    with wire.shared_parameters():
        pass
    made(model, optimizer)
    left_out(model, optimizer)
    model.load_state_dict({name: each.clone() for name, each in model.state_dict().items()})
    made(model, optimizer)
    assert wire.attempts == 5


def test_both_halves_of_a_step_that_is_left_out_are_one_attempt() -> None:
    model = perceptron()
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer)
    made(model, optimizer)
    for _half in range(2):
        left_out(model, optimizer)
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
    made(model, optimizer)
    assert wire.attempts == 3


def test_a_step_that_some_have_made_before_others_take_over_is_one() -> None:
    model = perceptron()
    first, second = (optimizer_of(model[number]) for number in (0, 2))  # type: ignore[index]
    wire = gradwire.outer(model, [first, second], "diloco", every=100, replicas=dist.group.WORLD)
    backward(model)
    first.step()
    assert wire.attempts == 0, "the second one is still to step"
    wire.switch_optimizer(first)
    assert wire.attempts == 1
    made(model, first)
    assert wire.attempts == 2


def test_a_step_that_raises_ends_no_counting() -> None:
    model = perceptron()
    first, second = optimizer_of(model), optimizer_of(model)
    wire = outer(model, first)

    def closure() -> float:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        first.step(closure)
    wire.switch_optimizer(second)
    for _ in range(3):
        made(model, second)
    assert wire.attempts == 3


def test_an_optimizer_beside_the_one_given_makes_no_steps_of_its_own() -> None:
    model = perceptron()
    optimizer = optimizer_of(model)
    beside = torch.optim.SGD([next(model.parameters())], lr=1e-3)
    wire = outer(model, optimizer)
    for _ in range(4):
        made(model, optimizer)
        beside.step()
    backward(model)
    assert wire.attempts == 4


def test_an_optimizer_whose_groups_have_grown_is_not_stood_for_by_one_of_a_part() -> None:
    model = perceptron()
    first, *others = model.parameters()
    optimizer, beside = (torch.optim.SGD([first], lr=0.1) for _ in range(2))
    wire = outer(model, optimizer)
    optimizer.add_param_group({"params": others})
    backward(model)
    beside.step()
    assert wire.attempts == 0
    backward(model)
    assert wire.attempts == 1


def test_steps_of_an_optimizer_of_other_parameters_count() -> None:
    model = perceptron()
    first, *others = model.parameters()
    optimizer, second = torch.optim.SGD([first], lr=0.1), torch.optim.SGD(others, lr=0.1)
    wire = outer(model, optimizer)
    for _ in range(3):
        made(model, optimizer)
    for _ in range(5):
        model.zero_grad()
        made(model, second)
    model.zero_grad()
    backward(model)
    assert wire.attempts == 8


def halves_of(model: Any) -> list[torch.optim.Optimizer]:
    return [optimizer_of(model[:2]), optimizer_of(model[2:])]


def test_several_optimizers_make_one_step_and_one_of_them_makes_one_by_itself() -> None:
    model = perceptron()
    halves = halves_of(model)
    wire = gradwire.outer(model, halves, "diloco", every=100, replicas=dist.group.WORLD)
    for stepping in [halves] * 3 + [halves[:1]] * 2:
        model.zero_grad()
        backward(model)
        for each in stepping:
            each.step()
    backward(model)
    assert wire.attempts == 5


def test_optimizers_that_were_not_given_step_in_place_of_one_that_was() -> None:
    model = perceptron()
    wire = outer(model, optimizer_of(model))
    halves, around = halves_of(model), optimizer_of(model)
    for step in range(3):
        left_out(model, around)
        for each in halves:
            each.step()
        assert wire.attempts == 1 + step
    around.register_step_pre_hook(lambda *_: halves[0].step())
    for step in range(3, 6):
        made(model, around)
        assert wire.attempts == 1 + step
    wire.detach()
    around.step()
    assert wire.attempts == 6


def _clear_then_step(model: nn.Module, optimizer: torch.optim.Optimizer, _wire: gradwire.OuterWire) -> None:
    left_out(model, optimizer)
    optimizer.zero_grad()
    optimizer.step()


def _clear_to_zeros(model: nn.Module, optimizer: torch.optim.Optimizer, _wire: gradwire.OuterWire) -> None:
    left_out(model, optimizer)
    optimizer.zero_grad(set_to_none=False)


def _drop(model: nn.Module, optimizer: torch.optim.Optimizer, wire: gradwire.OuterWire) -> None:
    left_out(model, optimizer)
    wire.drop_step()


def _accumulate(model: nn.Module, optimizer: torch.optim.Optimizer, _wire: gradwire.OuterWire) -> None:
    left_out(model, optimizer)
    backward(model)
    optimizer.step()


def _step_another(model: nn.Module, _optimizer: torch.optim.Optimizer, _wire: gradwire.OuterWire) -> None:
    made(model, torch.optim.SGD(model.parameters(), lr=1e-3))


def _first_half(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    left_out(model, optimizer)
    with torch.no_grad():
        next(model.parameters()).add_(0.01)


def _sharpen(model: nn.Module, optimizer: torch.optim.Optimizer, _wire: gradwire.OuterWire) -> None:
    _first_half(model, optimizer)
    made(model, optimizer)


def _sharpen_by_inner(model: nn.Module, optimizer: torch.optim.Optimizer, wire: gradwire.OuterWire) -> None:
    """The sharpness-aware one was given, and the one inside it steps."""
    _first_half(model, optimizer)
    _step_another(model, optimizer, wire)


def _differentiate(model: nn.Module, optimizer: torch.optim.Optimizer, _wire: gradwire.OuterWire) -> None:
    torch.autograd.grad(model(batch(0)[0]).sum(), list(model.parameters()))
    made(model, optimizer)


def _close(model: nn.Module, optimizer: torch.optim.Optimizer, _wire: gradwire.OuterWire) -> None:
    def closure() -> float:
        for _pass in range(3):
            left_out(model, optimizer)
        return 0.0

    optimizer.step(closure)


def _overflow(model: nn.Module, optimizer: torch.optim.Optimizer, _wire: gradwire.OuterWire) -> None:
    scaler = torch.amp.GradScaler("cpu")
    optimizer.zero_grad()
    inputs, targets = batch(0)
    loss = nn.functional.mse_loss(model(inputs), targets) * torch.inf
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


WAYS = {
    "the optimizer steps": lambda model, optimizer, _wire: made(model, optimizer),
    "cleared, no step": lambda model, optimizer, _wire: left_out(model, optimizer),
    "cleared, then a step": _clear_then_step,
    "cleared to zeros": _clear_to_zeros,
    "dropped": _drop,
    "accumulated": _accumulate,
    "another optimizer steps": _step_another,
    "sharpness-aware": _sharpen,
    "sharpness-aware, the inner one steps": _sharpen_by_inner,
    "after a pass of autograd.grad": _differentiate,
    "in a closure": _close,
    "skipped by a scaler": _overflow,
}
"""Rows of the table in `docs/engineering/design.md`, "A step is what the optimizer makes"."""


@pytest.mark.parametrize("way", WAYS)
def test_each_way_of_the_table_is_one_attempted_step(way: str) -> None:
    model = perceptron()
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer)
    made(model, optimizer)
    for _ in range(2):
        WAYS[way](model, optimizer, wire)
    made(model, optimizer)
    assert wire.attempts == 4


def _no_hook(_optimizer: torch.optim.Optimizer, _model: nn.Module, _wire: gradwire.OuterWire) -> None: ...


def _averaged(optimizer: torch.optim.Optimizer, model: nn.Module, _wire: gradwire.OuterWire) -> None:
    optimizer.register_step_post_hook(lambda *_: model.training)


def _logged(optimizer: torch.optim.Optimizer, _model: nn.Module, wire: gradwire.OuterWire) -> None:
    optimizer.register_step_post_hook(lambda *_: repr(wire))


def _outer_averaged(_optimizer: torch.optim.Optimizer, model: nn.Module, wire: gradwire.OuterWire) -> None:
    wire.outer_optimizer.register_step_post_hook(lambda *_: model.training)


@pytest.mark.parametrize("refer", [_no_hook, _averaged, _logged, _outer_averaged])
@pytest.mark.parametrize("detaches", [False, True])
def test_a_model_goes_with_its_optimizers_although_hooks_on_them_refer_to_it(
    refer: Callable[..., None], detaches: bool
) -> None:
    model = perceptron()
    optimizer, gone = optimizer_of(model), weakref.ref(model)
    wire = outer(model, optimizer, every=2)
    refer(optimizer, model, wire)
    for _ in range(3):
        made(model, optimizer)
    if detaches:
        wire.detach()
    del model, optimizer, wire
    gc.collect()
    assert gone() is None


def test_a_model_goes_although_the_function_that_makes_the_outer_optimizer_refers_to_it() -> None:
    model = perceptron()
    optimizer, gone = optimizer_of(model), weakref.ref(model)

    def shared(given: list[nn.Parameter], beside: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(given, lr=1.0 if beside.training else 0.5)

    make = partial(shared, beside=model)
    wire = gradwire.outer(model, optimizer, outer=make, every=2, replicas=dist.group.WORLD)
    for _ in range(3):
        made(model, optimizer)
    del model, optimizer, make, wire
    gc.collect()
    assert gone() is None


def test_an_optimizer_that_only_outer_was_given_is_counted_and_saved() -> None:
    model = perceptron()
    wire = outer(model, optimizer_of(model))
    gc.collect()
    halves = [optimizer_of(part) for part in (model[:2], model[2:])]
    for step in range(1, 4):
        model.zero_grad()
        backward(model)
        halves[0].step()
        assert wire.attempts == step - 1
        halves[1].step()
        assert wire.attempts == step
    wire.load_state_dict(wire.state_dict())
    assert wire.attempts == 3


def test_an_optimizer_that_another_one_has_followed_is_freed() -> None:
    model = perceptron()
    first, second = optimizer_of(model), optimizer_of(model)
    wire, gone = outer(model, first), weakref.ref(first)
    made(model, first)
    wire.switch_optimizer(second)
    del first
    gc.collect()
    assert gone() is None
    made(model, second)
    assert wire.attempts == 2


@pytest.mark.parametrize("detaches", [False, True])
def test_a_graph_that_outlives_the_model_or_the_wire_has_gradients(detaches: bool) -> None:
    model: nn.Module = nn.Linear(3, 2)
    optimizer, weight = optimizer_of(model), next(model.parameters())
    wire = outer(model, optimizer)
    loss = model(torch.ones(3)).sum()
    if detaches:
        wire.detach()
    else:
        del model
    del wire
    gc.collect()
    loss.backward()
    optimizer.step()
    assert torch.equal(weight.grad, torch.ones(2, 3))


def test_an_optimizer_that_steps_while_the_model_goes_is_not_counted() -> None:
    """Garbage may be collected after a step was begun to be told."""
    model = perceptron()
    optimizer, wire = optimizer_of(model), outer(model, optimizer_of(model))
    source: Any = wire.attached.source
    attempts = source.attempts
    del model, wire, source
    gc.collect()
    attempts.optimizer_begins(optimizer)
    attempts.optimizer_ended(optimizer, None)
    assert attempts.count == 0


def test_rounds_go_on_where_nobody_keeps_the_wire() -> None:
    model, rounds = perceptron(), list[int]()

    def shared(given: list[nn.Parameter]) -> torch.optim.Optimizer:
        made_here = torch.optim.SGD(given, lr=1.0)
        made_here.register_step_post_hook(lambda *_: rounds.append(1))
        return made_here

    optimizer = optimizer_of(model)
    gradwire.outer(model, optimizer, outer=shared, every=2, replicas=dist.group.WORLD)
    gc.collect()
    for _ in range(4):
        made(model, optimizer)
    assert len(rounds) == 2


def test_buffers_in_another_order_of_memory_travel() -> None:
    model = perceptron()
    model.register_buffer("table", torch.arange(6.0).view(2, 3).t())
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer, every=1)
    for _ in range(2):
        made(model, optimizer)
        model.table.add_(1.0)
    made(model, optimizer)
    assert wire.attempts == 3
    assert torch.equal(model.table, torch.arange(6.0).view(2, 3).t() + 2.0)


def test_layers_may_be_frozen_where_the_wrapper_is_not_called() -> None:
    ddp = DistributedDataParallel(perceptron(), find_unused_parameters=True)
    optimizer = optimizer_of(ddp)
    gradwire.attach(ddp, optimizer, "topk")
    made(ddp, optimizer)
    frozen = next(ddp.parameters()).requires_grad_(False)
    inputs, targets = batch(0)
    nn.functional.mse_loss(ddp.forward(inputs), targets).backward()
    frozen.requires_grad_(True)
    made(ddp, optimizer)

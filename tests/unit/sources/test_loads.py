"""Loads in the middle of local steps, one rank by itself."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire
from tests.support.models import batch, digest, optimizer_of, perceptron

pytestmark = pytest.mark.usefixtures("world_of_one")


def made(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        inputs, targets = batch(step)
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def begun(delay: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, gradwire.OuterWire]:
    model = perceptron()
    optimizer = optimizer_of(model)
    wire = gradwire.outer(model, optimizer, "diloco", every=2, delay=delay, replicas=dist.group.WORLD)
    return model, optimizer, wire


def test_a_part_that_is_loaded_while_a_round_is_under_way_loses_nothing_of_the_others() -> None:
    """The round is about values that are gone, so nothing of it lands: the next one carries it again."""
    model, optimizer, wire = begun(delay=1)
    first, last = model[0], model[4]  # type: ignore[index]
    before = last.weight.detach().clone()
    made(model, optimizer, range(2))
    first.load_state_dict(perceptron(seed=1)[0].state_dict())  # type: ignore[index]
    wire.detach()
    assert torch.equal(first.weight, perceptron(seed=1)[0].weight)  # type: ignore[index]
    assert not torch.equal(last.weight, before)


def test_values_that_a_checkpoint_has_brought_are_no_load_where_they_are_written_in_place() -> None:
    """As `torch.distributed.checkpoint` does: it writes into the model's tensors, and loads these."""
    model, optimizer, wire = begun()
    made(model, optimizer, range(3))
    saved = copy.deepcopy((wire.state_dict(), model.state_dict()))
    made(model, optimizer, range(3, 6))
    again, optimizer, wire = begun()
    wire.load_state_dict(saved[0])
    here = again.state_dict()
    for name, each in saved[1].items():
        here[name].copy_(each)
    again.load_state_dict(here)
    made(again, optimizer, range(3, 6))
    assert all(
        torch.equal(mine, other) for mine, other in zip(again.parameters(), model.parameters(), strict=True)
    )


def test_a_load_that_would_have_no_effect_is_refused() -> None:
    model, optimizer, wire = begun()
    made(model, optimizer, range(1))
    before, state = digest(model), copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"\(assign=True\) puts other .* load without assign=True"):
        model.load_state_dict(state, assign=True)
    inside = pytest.raises(gradwire.GradwireError, match=r"called inside wire\.shared_parameters\(\)")
    with wire.shared_parameters(), inside:
        model.load_state_dict(state)
    assert digest(model) == before


def test_copies_of_a_model_are_loaded_without_effect_here() -> None:
    model, optimizer, wire = begun()
    made(model, optimizer, range(1))
    with wire.shared_parameters():
        before = digest(model)
    for each in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        each.load_state_dict(perceptron(1).state_dict())
        each(batch(0)[0])
    with wire.shared_parameters():
        assert digest(model) == before


@torch.no_grad()
def _load(step: int, model: nn.Module) -> None:
    if step == 3:
        model.load_state_dict(perceptron(1).state_dict())


@torch.no_grad()
def _write(step: int, model: nn.Module) -> None:
    if step in (2, 4):
        next(model.parameters()).add_(0.01)


@torch.no_grad()
def _swap(_step: int, model: nn.Module) -> None:
    mine: list[Tensor] = [each.clone() for each in model.parameters()]
    for each, value in zip(model.parameters(), mine, strict=True):
        each.mul_(0.5)
        each.copy_(value)


@pytest.mark.parametrize(("change", "times"), [(None, 0), (_load, 0), (_write, 1), (_swap, 1)])
def test_parameters_that_are_written_between_steps_are_warned_of_once(
    change: Callable[[int, nn.Module], None] | None, times: int
) -> None:
    model, optimizer, wire = begun()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(9):
            made(model, optimizer, range(step, step + 1))
            with wire.shared_parameters(), torch.no_grad():
                model(batch(0)[0])
            if change is not None:
                change(step, model)
    heard = [str(each.message) for each in caught if "parameters of this model were" in str(each.message)]
    assert len(heard) == times
    assert all("If their values are back as they were" in each for each in heard)

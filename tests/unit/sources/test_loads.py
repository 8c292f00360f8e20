"""Loads in the middle of local steps, one rank by itself."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire
from tests.support.models import batch, optimizer_of, perceptron

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

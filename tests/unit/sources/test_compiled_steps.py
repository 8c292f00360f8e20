"""Optimizers whose step is compiled: torch's compiler sees nothing of the hooks that follow them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import reset
from torch._dynamo.utils import counters

import gradwire
from gradwire.errors import GradwireWarning
from tests.support.tiers import rest

pytestmark = pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # torch's own

STEPS = 6
SPIKE = 3
Step = Callable[[], Any]


@pytest.fixture(autouse=True)
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    reset()


def attached(model: nn.Module, optimizer: torch.optim.Optimizer) -> gradwire.Wire:
    return gradwire.attach(model, optimizer, "topk", replicas=dist.group.WORLD)


def outer(model: nn.Module, optimizer: torch.optim.Optimizer) -> gradwire.Wire:
    return gradwire.outer(model, optimizer, "diloco", every=2, replicas=dist.group.WORLD)


def called(optimizer: torch.optim.Optimizer) -> Step:
    step: Step = torch.compile(optimizer.step, backend="eager")
    return step


def set_as_attribute(optimizer: torch.optim.Optimizer) -> Step:
    optimizer.step = torch.compile(optimizer.step, backend="eager")  # type: ignore[method-assign]
    return lambda: optimizer.step()


def trained(
    attach: Callable[[nn.Module, torch.optim.Optimizer], gradwire.Wire] | None,
    stepping: Callable[[torch.optim.Optimizer], Step],
) -> tuple[bytes, tuple[int, int], int, int]:
    """Bits of the parameters, steps (counted, and dropped), and frames and graphs that were compiled."""
    reset()
    counters.clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wire = None if attach is None else attach(model, optimizer)
    step = stepping(optimizer)
    for number in range(STEPS):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        model(inputs).pow(2).mean().backward()
        if number != SPIKE:
            step()
        optimizer.zero_grad()
    counted = (0, 0)
    if wire is not None:
        found = wire.report()
        counted = found.step, found.dropped_steps
        wire.detach()
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    return flat.numpy().tobytes(), counted, counters["frames"]["total"], counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("compiled", rest([called, set_as_attribute], but=[called]))
@pytest.mark.parametrize("attach", [attached, outer])
def test_a_compiled_step_counts_and_has_no_frame_of_ours(
    attach: Callable[[nn.Module, torch.optim.Optimizer], gradwire.Wire],
    compiled: Callable[[torch.optim.Optimizer], Step],
) -> None:
    plain, counted, _, _ = trained(attach, lambda optimizer: optimizer.step)
    ours, ours_counted, frames, graphs = trained(attach, compiled)
    assert (ours, ours_counted) == (plain, counted)
    assert counted[0] > 1
    _, _, alone_frames, alone_graphs = trained(None, compiled)
    assert graphs == alone_graphs
    assert frames <= alone_frames


def test_a_warning_about_a_step_names_the_line_that_steps() -> None:
    model = nn.Linear(4, 4)
    given, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    gradwire.attach(model, given, "dgc(momentum=0.9)", replicas=dist.group.WORLD)
    model(torch.ones(2, 4)).sum().backward()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        other.step()
    [warning] = [each for each in seen if each.category is GradwireWarning]
    assert warning.filename == __file__

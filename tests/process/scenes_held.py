"""Scenes of what users do around training: evaluating first, saving beside it, accumulating in parts."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import gradwire
from tests.process.fsdp_models import sharded
from tests.support.models import batch, optimizer_of, perceptron, same

Kind = Callable[[], tuple[nn.Module, torch.optim.Optimizer, Any]]


def ddp(recipe: str) -> tuple[nn.Module, torch.optim.Optimizer, gradwire.Wire]:
    model = DistributedDataParallel(perceptron())
    optimizer = optimizer_of(model)
    return model, optimizer, gradwire.attach(model, optimizer, recipe)


def plain(recipe: str) -> tuple[nn.Module, torch.optim.Optimizer, gradwire.Wire]:
    model = perceptron()
    optimizer = optimizer_of(model)
    return model, optimizer, gradwire.attach(model, optimizer, recipe, replicas=dist.group.WORLD)


def fsdp(recipe: str) -> tuple[nn.Module, torch.optim.Optimizer, gradwire.Wire]:
    model = sharded()
    optimizer = optimizer_of(model)
    return model, optimizer, gradwire.attach(model, optimizer, recipe, gather="int8")


def outer(recipe: str) -> tuple[nn.Module, torch.optim.Optimizer, gradwire.Wire]:
    model = perceptron()
    optimizer = optimizer_of(model)
    wire = gradwire.outer(model, optimizer, recipe, every=2, delay=1, replicas=dist.group.WORLD)
    return model, optimizer, wire


KINDS: dict[str, Kind] = {
    "ddp": partial(ddp, "int4"),
    "plain": partial(plain, "topk(ratio=0.1)"),
    "fsdp": partial(fsdp, "int4"),
    "outer": partial(outer, "int4"),
}


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for step in numbers:
        inputs, targets = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()


def values(model: nn.Module) -> list[Tensor]:
    own = (each.to_local() if isinstance(each, DTensor) else each for each in model.parameters())
    return [each.detach().clone() for each in own]


def evaluated_first(build: Kind) -> bool:
    """Whether an evaluation before the first step changes a digit of what is trained."""
    found = []
    for evaluates in (False, True):
        torch.manual_seed(0)
        model, optimizer, wire = build()
        if evaluates:
            model.eval()
            with torch.no_grad():
                for step in range(3):
                    model(batch(10 + step)[0])
            model.train()
        steps(model, optimizer, range(5))
        found.append(values(model))
        wire.detach()
    return same(*found)


def tensors_in(saved: object) -> list[Tensor]:
    if isinstance(saved, Tensor):
        return [saved.to_local() if isinstance(saved, DTensor) else saved]
    parts = saved.values() if isinstance(saved, dict) else saved if isinstance(saved, list | tuple) else ()
    return [found for each in parts for found in tensors_in(each)]


def saved_beside(build: Kind) -> dict[str, Any]:
    """A state that another thread would write later: whether it has still the values of its moment."""
    model, optimizer, wire = build()
    steps(model, optimizer, range(3))
    state = wire.state_dict()
    then = deepcopy(tensors_in(state))
    steps(model, optimizer, range(3, 6))
    now = tensors_in(wire.state_dict())
    wire.detach()
    moved = any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(then, now, strict=False))
    return {"kept": same(then, tensors_in(state)), "moved": moved}


def in_parts(recipe: str, how: str) -> float:
    """The largest difference of gradients to stock FSDP2's, as a share of the largest gradient, where a loop
    accumulates in FSDP2's own ways.
    """
    found = []
    for carried in (False, True):
        model = sharded()
        assert isinstance(model, FSDPModule)
        if carried:
            gradwire.attach(model, None, recipe)
        for micro in range(2):
            is_last = micro == 1
            if how == "last":
                model.set_is_last_backward(is_last)
                model.set_requires_gradient_sync(is_last)
            elif how == "some":
                model.blocks[0].set_requires_gradient_sync(is_last, recurse=False)  # type: ignore[index,union-attr]
            else:
                model.set_requires_all_reduce(is_last)
            inputs, targets = batch(micro)
            nn.functional.mse_loss(model(inputs), targets).backward()
        grads = [each.grad for each in model.parameters()]
        found.append([each.to_local() for each in grads if isinstance(each, DTensor)])
    largest = max(float(each.abs().max()) for each in found[0] if each.numel())
    apart = (float((a - b).abs().max()) for a, b in zip(*found, strict=True) if a.numel())
    return max(apart) / largest


PARTS = [(recipe, how) for recipe in ("dense", "int8") for how in ("last", "some", "all-reduce")]

SCENES: dict[str, Callable[[], Any]] = {
    **{f"evaluated first, {name}": partial(evaluated_first, build) for name, build in KINDS.items()},
    **{f"saved beside, {name}": partial(saved_beside, build) for name, build in KINDS.items()},
    **{f"in parts, {recipe}, {how}": partial(in_parts, recipe, how) for recipe, how in PARTS},
}

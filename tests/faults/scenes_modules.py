"""Scenes of modules that change under gradwire, and of backward passes that break off in plain ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from tests.process.sharded_models import attached, sharded
from tests.support.models import batch, digest, optimizer_of, perceptron
from tests.support.world import lose_groups


def _backward(model: nn.Module, step: int) -> None:
    inputs, targets = batch(step)
    nn.functional.mse_loss(model(inputs), targets).backward()


def _said(call: Callable[[], object]) -> list[Any]:
    start_s = time.monotonic()
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error), time.monotonic() - start_s]
    return ["nothing", "", time.monotonic() - start_s]


def _assigned(inner: Any) -> None:
    inner.load_state_dict({name: each.clone() for name, each in inner.state_dict().items()}, assign=True)


def _replaced(inner: Any) -> None:
    inner[2].weight = nn.Parameter(inner[2].weight.detach().clone())


def _appended(inner: Any) -> None:
    inner.append(nn.Linear(8, 8))


CHANGES: dict[str, Callable[[Any], None]] = {
    "assigned": _assigned,
    "replaced": _replaced,
    "appended": _appended,
    "cast": lambda inner: inner.double().float(),
    "cast for good": lambda inner: inner.bfloat16(),
}


def _replaced_shard(model: Any) -> None:
    model.blocks[1].weight = nn.Parameter(model.blocks[1].weight.detach().clone())


def _appended_to_shards(model: Any) -> None:
    model.blocks[1].more = nn.Linear(8, 8)


CHANGES_OF_SHARDS: dict[str, Callable[[Any], None]] = {
    "assigned": _assigned,
    "replaced": _replaced_shard,
    "appended": _appended_to_shards,
}

Kind = Literal["plain", "ddp", "sharded"]


def _attached(kind: Kind) -> tuple[nn.Module, nn.Module, gradwire.Wire]:
    """What is attached, and what changes: the module inside DDP, or the same."""
    if kind == "sharded":
        model = sharded()
        return model, model, attached(model, "topk(ratio=0.1)")[1]
    inner = perceptron()
    own = dist.new_group([0, 1])  # DDP's own collectives are lost, too, where one rank does not come
    model, replicas = inner, dist.group.WORLD
    if kind == "ddp":
        model, replicas = DistributedDataParallel(inner, find_unused_parameters=True, process_group=own), None
    wire = gradwire.attach(model, optimizer_of(model), "topk(ratio=0.1)", replicas=replicas)
    return model, inner, wire


def changed(change: str, kind: Kind, everywhere: bool) -> list[Any]:
    """The model changes on all ranks or on rank 1, after a step: what the next says, how many count."""
    model, inner, wire = _attached(kind)
    for step in (0, 1):  # before its second forward pass DDP has a collective of its own
        _backward(model, step)
    if everywhere or dist.get_rank() == 1:
        (CHANGES_OF_SHARDS if kind == "sharded" else CHANGES)[change](inner)
    found = [*_said(partial(_backward, model, 2)), wire.report().step]
    if not everywhere:
        lose_groups()
    return found


def _boom(_gradient: Tensor) -> None:
    raise RuntimeError("boom")


def broke_off(recipe: str, buckets: int) -> dict[str, Any]:
    """The user catches an exception in the middle of rank 0's backward pass, and goes on."""
    model = perceptron()
    wire = gradwire.attach(model, optimizer_of(model), recipe, replicas=dist.group.WORLD)
    several = patch("gradwire.sources.plain.cap_for", return_value=1024)
    said, kept = [], []
    with several if buckets > 1 else nullcontext():
        _backward(model, 0)
        for step in range(1, 4):
            if step == 1 and dist.get_rank() == 0:
                handle = model[2].register_forward_hook(lambda _m, _i, out: out.register_hook(_boom) and None)  # type: ignore[index, operator]
            try:
                _backward(model, step)
            except Exception as error:
                kept.append(error)  # with its traceback, as notebooks keep the last one
                said.append([type(error).__name__, str(error)])
            if step == 1 and dist.get_rank() == 0:
                handle.remove()
            if dist.get_rank() == 1:
                break
    found = {"said": said, "steps": wire.report().step}
    dist.barrier()
    lose_groups()
    return found


def before_any_gradient() -> dict[str, Any]:
    """All ranks catch an exception before the first gradient: nothing of that pass was sent."""
    model = perceptron()
    wire = gradwire.attach(model, optimizer_of(model), "topk(ratio=0.1)", replicas=dist.group.WORLD)
    outputs = model(batch(0)[0])
    outputs.register_hook(_boom)
    said = _said(outputs.sum().backward)[1]
    hidden: Tensor = batch(1)[0]
    for layer in model:  # type: ignore[attr-defined]  # round the model's own forward pass
        hidden = layer(hidden)
    hidden.sum().backward()
    _backward(model, 2)
    return {"said": said, "steps": wire.report().step}


def before_any_gradient_of_one() -> list[Any]:
    """As above, on rank 0 alone, whose next pass is one step behind."""
    model = perceptron()
    wire = gradwire.attach(model, optimizer_of(model), "topk(ratio=0.1)", replicas=dist.group.WORLD)
    _backward(model, 0)
    if dist.get_rank() == 0:
        outputs = model(batch(1)[0])
        outputs.register_hook(_boom)
        _said(outputs.sum().backward)
    found = [*_said(partial(_backward, model, 2)), wire.report().step]
    lose_groups()
    return found


def before_any_gradient_without_sync() -> list[Any]:
    """Rank 0 alone catches an exception inside `no_sync`: no step is behind another."""
    model = perceptron()
    wire = gradwire.attach(model, optimizer_of(model), "topk(ratio=0.1)", replicas=dist.group.WORLD)
    with wire.no_sync():
        outputs = model(batch(0)[0])
        if dist.get_rank() == 0:
            outputs.register_hook(_boom)
        _said(outputs.sum().backward)
    return [*_said(partial(_backward, model, 1)), wire.report().step]


def guarded(kind: str) -> list[Any]:
    """Rank 1 alone changes what is frozen, under a guard."""
    model: Any = perceptron()
    model[0].requires_grad_(False)
    gradwire.attach(model, optimizer_of(model), "dense", replicas=dist.group.WORLD, guard_every=1)
    _backward(model, 0)
    if dist.get_rank() == 1 and kind == "replaced":
        model[0].weight = nn.Parameter(model[0].weight + 1, requires_grad=False)
    elif dist.get_rank() == 1:
        model.append(nn.Linear(8, 8).requires_grad_(False))
    return _said(partial(_backward, model, 1))


def trains(_kind: str = "") -> str:
    """For comparison: nothing changes."""
    model = perceptron()
    gradwire.attach(model, optimizer_of(model), "dense", replicas=dist.group.WORLD, guard_every=1)
    for step in range(3):
        _backward(model, step)
    return digest(model)


SCENES: dict[str, Callable[[], Any]] = {
    **{
        f"{change}, {kind}": partial(changed, change, kind, everywhere=True)
        for kind in ("plain", "ddp")
        for change in ("assigned", "replaced", "appended", "cast for good")
    },
    **{
        f"{change}, sharded": partial(changed, change, "sharded", everywhere=True)
        for change in CHANGES_OF_SHARDS
    },
    "cast and back": partial(changed, "cast", "plain", everywhere=True),
    "on one rank, plain": partial(changed, "replaced", "plain", everywhere=False),
    "on one rank, ddp": partial(changed, "appended", "ddp", everywhere=False),
    "on one rank, sharded": partial(changed, "appended", "sharded", everywhere=False),
    **{
        f"broke off, {recipe}, {buckets}": partial(broke_off, recipe, buckets)
        for recipe in ("dense", "topk(ratio=0.1)")
        for buckets in (1, 4)
    },
    "before any gradient": before_any_gradient,
    "before any gradient of one": before_any_gradient_of_one,
    "before any gradient, without sync": before_any_gradient_without_sync,
    "guarded, replaced": partial(guarded, "replaced"),
    "guarded, added": partial(guarded, "added"),
    "trains": trains,
}

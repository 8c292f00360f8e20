"""Scenes of modules that nothing wraps: beside DDP with the same recipe, and in loops that DDP never sees."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradwire
from tests.support.models import SHAPE, batch, digest, gradients, optimizer_of, perceptron, same
from tests.support.states import own_state

Loop = Callable[[nn.Module, torch.optim.Optimizer, Callable[[], Any]], None]
LOSSY = "topk(ratio=0.1)"


class Branched(nn.Module):
    """BatchNorm, a branch that only even ranks use, one that no rank uses, and perhaps checkpoints."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(SHAPE[0], 64), nn.BatchNorm1d(64), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
        self.some = nn.Linear(64, 64)
        self.never = nn.Linear(64, 64)
        self.head = nn.Linear(64, SHAPE[-1])
        self._reentrant = reentrant

    def _run(self, part: nn.Module, inputs: Tensor) -> Tensor:
        if self._reentrant is None:
            out = part(inputs)
        else:
            leaf = inputs if inputs.requires_grad else inputs.requires_grad_()
            out = checkpoint(part, leaf, use_reentrant=self._reentrant)
        assert isinstance(out, Tensor)
        return out

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self._run(self.second, self._run(self.first, inputs))
        if dist.get_rank() % 2 == 0:
            hidden = hidden + self.some(hidden)
        return self._run(self.head, hidden)


def branched(reentrant: bool | None = None) -> nn.Module:
    torch.manual_seed(dist.get_rank())
    return Branched(reentrant)


def loss_of(model: nn.Module, step: int) -> Tensor:
    inputs, targets = batch(step)
    return nn.functional.mse_loss(model(inputs), targets)


def six(model: nn.Module, optimizer: torch.optim.Optimizer, _no_sync: Callable[[], Any]) -> None:
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def keeping(model: nn.Module, optimizer: torch.optim.Optimizer, _no_sync: Callable[[], Any]) -> None:
    """Gradients are set to zero and never to `None`, so that they are added to where they lie."""
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, step).backward()
        optimizer.step()


def accumulating(
    model: nn.Module, optimizer: torch.optim.Optimizer, no_sync: Callable[[], Any], silent: int = 2
) -> None:
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(3):
            with no_sync() if micro < silent else nullcontext():
                loss_of(model, 10 * step + micro).backward()
        optimizer.step()


def switched_within_accumulation() -> dict[str, Any]:
    """Another recipe, and so other buckets, between two passes whose gradients add up in the old ones."""
    torch.manual_seed(dist.get_rank())
    large = nn.Linear(600, 600)  # more than the smallest bucket holds
    model = nn.Sequential(nn.Linear(SHAPE[0], 600), nn.Tanh(), large, nn.Tanh(), nn.Linear(600, SHAPE[-1]))
    wire = gradwire.attach(model, recipe="dense", replicas=dist.group.WORLD)
    ddp = DistributedDataParallel(copy.deepcopy(model))
    buckets, close = [], True
    for step, text in enumerate(("dense", "topk(ratio=1.0)", "dense")):
        model.zero_grad(set_to_none=False)
        ddp.zero_grad()
        with wire.no_sync(), ddp.no_sync():
            loss_of(model, 2 * step).backward()
            loss_of(ddp, 2 * step).backward()
        wire.switch(text)
        loss_of(model, 2 * step + 1).backward()
        loss_of(ddp, 2 * step + 1).backward()
        both = zip(gradients(model), gradients(ddp), strict=True)
        close &= all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in both)
        held = [each.grad for each in model.parameters() if each.grad is not None]
        buckets.append(len({each.untyped_storage().data_ptr() for each in held}))
    return {"close": close, "finer": [each > 1 for each in buckets]}


def beside_ddp(loop: Loop, recipe: str, build: Callable[[], nn.Module]) -> dict[str, Any]:
    """Parameters and buffers of both after the loop, from rank 0's first values."""
    model = build()
    optimizer = optimizer_of(model)
    wire = gradwire.attach(model, optimizer, recipe, replicas=dist.group.WORLD)
    ddp = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=build is branched)
    theirs = optimizer_of(ddp)
    gradwire.attach(ddp, theirs, recipe)
    loop(model, optimizer, wire.no_sync)
    loop(ddp, theirs, ddp.no_sync)
    return {
        "as ddp": same(list(model.state_dict().values()), list(ddp.module.state_dict().values())),
        "digest": digest(model),
        "steps": wire.report().step,
        "buffers": [float(each.double().sum()) for each in model.buffers()],
    }


def unused() -> dict[str, Any]:
    """What the optimizer finds where some or all ranks have no gradient."""
    model = branched()
    gradwire.attach(model, recipe="dense", replicas=dist.group.WORLD)
    assert isinstance(model, Branched)
    loss_of(model, 0).backward()
    some, never = model.some.weight.grad, model.never.weight.grad
    assert some is not None
    assert never is not None
    return {"some": some.abs().sum().item(), "never": never.abs().sum().item()}


def checkpointed(reentrant: bool, recipe: str) -> dict[str, Any]:
    """Against the same without checkpoints."""
    digests = []
    for again in (None, reentrant):
        model = branched(again).eval()  # BatchNorm would count twice
        optimizer = optimizer_of(model)
        wire = gradwire.attach(model, optimizer, recipe, replicas=dist.group.WORLD)
        six(model, optimizer, nullcontext)
        digests.append(digest(model))
    return {"same": digests[0] == digests[1], "steps": wire.report().step}


def twice_through() -> dict[str, Any]:
    """Two forward passes before one backward pass; gradients of something else are asked for in between."""
    model = perceptron()
    wire = gradwire.attach(model, recipe="dense", replicas=dist.group.WORLD)
    alone = perceptron()
    inputs = batch(0)[0].requires_grad_()
    torch.autograd.grad(model(inputs).sum(), inputs)
    (loss_of(model, 0) + loss_of(model, 1)).backward()
    (loss_of(alone, 0) + loss_of(alone, 1)).backward()
    mean = []
    for gradient in gradients(alone):
        dist.all_reduce(gradient)
        mean.append(gradient / dist.get_world_size())
    return {"same": same(gradients(model), mean), "steps": wire.report().step}


def poisoned() -> dict[str, Any]:
    """A NaN on one rank."""
    model = perceptron()
    optimizer = optimizer_of(model)
    wire = gradwire.attach(model, optimizer, LOSSY, replicas=dist.group.WORLD)
    six(model, optimizer, nullcontext)
    before = own_state(wire)["memory"]
    optimizer.zero_grad()
    (loss_of(model, 7) * (torch.nan if dist.get_rank() == 1 else 1.0)).backward()
    after = own_state(wire)["memory"]
    all_nan = all(bool(each.isnan().all()) for each in gradients(model))
    kept = all(torch.equal(before[name], after[name]) for name in before)
    optimizer.zero_grad()
    six(model, optimizer, nullcontext)
    return {"nan": all_nan, "kept": kept, "steps": wire.report().step, "digest": digest(model)}


def resumed() -> dict[str, Any]:
    """With a break in the middle, and without."""
    digests = []
    for broken in (False, True):
        model = perceptron()
        optimizer = optimizer_of(model)
        wire = gradwire.attach(model, optimizer, LOSSY, replicas=dist.group.WORLD)
        six(model, optimizer, nullcontext)
        if broken:
            state = copy.deepcopy((wire.state_dict(), model.state_dict(), optimizer.state_dict()))
            model = perceptron(seed=3)
            optimizer = optimizer_of(model)
            wire = gradwire.attach(model, optimizer, LOSSY, replicas=dist.group.WORLD)
            model.load_state_dict(state[1])
            optimizer.load_state_dict(state[2])
            wire.load_state_dict(state[0])
        six(model, optimizer, nullcontext)
        digests.append(digest(model))
    return {"same": digests[0] == digests[1]}


def flushed() -> dict[str, Any]:
    """What is unsent comes out in the end, and `detach` leaves plain all-reduce."""
    model = perceptron()
    optimizer = optimizer_of(model)
    wire = gradwire.attach(
        model, optimizer, LOSSY, replicas=init_device_mesh("cpu", (dist.get_world_size(),))
    )
    six(model, optimizer, nullcontext)
    optimizer.zero_grad()
    wire.detach()
    late = sum(float(each.abs().sum()) for each in gradients(model))
    optimizer.step()
    six(model, optimizer, nullcontext)
    return {"late": late > 0, "digest": digest(model), "recipe": wire.report().recipe}


def adaptive() -> dict[str, Any]:
    """Dense steps that measure, steps taken apart among them, and what follows."""
    model = branched()
    optimizer = optimizer_of(model)
    wire = gradwire.attach(model, optimizer, "auto", replicas=dist.group.WORLD)
    for _ in range(5):
        six(model, optimizer, nullcontext)
    return {"digest": digest(model), "measuring": "measuring" in wire.report().recipe}


def copied() -> dict[str, Any]:
    """A copy is a plain module: one rank alone can train it."""
    model = perceptron()
    wire = gradwire.attach(model, recipe="dense", replicas=dist.group.WORLD)
    other = copy.deepcopy(model)
    if dist.get_rank() == 0:
        loss_of(other, 0).backward()
    loss_of(model, 0).backward()
    return {"steps": wire.report().step, "hooks": len(other._forward_hooks) + len(other._forward_pre_hooks)}


def forgotten(*, keeps_parameters: bool) -> bool:
    """Whether gradwire's memory is freed once the model is gone, and parameters that are left say so."""
    model = perceptron()
    optimizer = optimizer_of(model)
    wire = gradwire.attach(model, optimizer, LOSSY, replicas=dist.group.WORLD)
    six(model, optimizer, nullcontext)
    kept = list(model.parameters()) if keeps_parameters else []
    mine = weakref.ref(wire.attached.backward)
    del model, optimizer, wire
    for _ in range(50):
        gc.collect()
        if mine() is None:
            break
        time.sleep(0.02)  # the worker's thread ends in its own time
    refused = 0
    for each in kept:
        try:
            each.sum().backward()
        except gradwire.GradwireError as error:
            refused += "the module that was attached is gone" in str(error)
    return mine() is None and refused == len(kept)


def _refusal(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except ValueError as error:
        return str(error)
    return ""


def refused() -> dict[str, str]:
    """Each in its words."""
    world, model = dist.group.WORLD, perceptron()
    gradwire.attach(model, recipe="dense", replicas=world)
    inside, mesh = DistributedDataParallel(model), init_device_mesh("cpu", (1, dist.get_world_size()))
    return {
        "bare": _refusal(lambda: gradwire.attach(perceptron())),
        "twice": _refusal(lambda: gradwire.attach(model, replicas=world)),
        "under ddp": _refusal(lambda: inside(batch(0)[0])),
        "ddp": _refusal(lambda: gradwire.attach(inside, replicas=world)),
        "around ddp": _refusal(lambda: gradwire.attach(nn.Sequential(inside), replicas=world)),
        "mesh": _refusal(lambda: gradwire.attach(perceptron(), replicas=mesh)),
        "group": _refusal(lambda: gradwire.attach(perceptron(), replicas="world")),  # type: ignore[arg-type]
    }


def loading(kind: str, recipe: str) -> dict[str, Any]:
    """Other values are loaded between two steps, on all ranks alike: beside DDP in plain torch."""

    def run(model: nn.Module, attach: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        attach(model, optimizer)
        for step in range(8):
            if step == 4:
                inner = model.module if isinstance(model, DistributedDataParallel) else model
                inner.load_state_dict(perceptron(9).state_dict())
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        return [each.detach().clone() for each in model.parameters()]

    module = perceptron(8)
    if kind == "ddp":
        mine = run(DistributedDataParallel(module), lambda *both: gradwire.attach(*both, recipe))
    else:
        options: dict[str, Any] = {"replicas": dist.group.WORLD}
        mine = run(module, lambda *both: gradwire.attach(*both, recipe, **options))
    theirs = run(DistributedDataParallel(perceptron(8)), lambda *_: None)
    return {"as ddp": same(mine, theirs), "digest": digest(module)}


def loading_by_one(guard_every: int) -> dict[str, Any]:
    """Only rank 0 loads, which parts replicas under plain DDP, too; a guard says so."""
    model = perceptron(8)
    optimizer = optimizer_of(model)
    gradwire.attach(model, optimizer, "dense", replicas=dist.group.WORLD, guard_every=guard_every)
    raised = ""
    for step in range(4):
        if step == 2 and dist.get_rank() == 0:
            model.load_state_dict(perceptron(9).state_dict())
        optimizer.zero_grad()
        try:
            loss_of(model, step).backward()
        except gradwire.RanksDisagree as error:
            raised = raised or str(error)
        optimizer.step()
    return {"raised": raised, "digest": digest(model)}


SCENES: dict[str, Callable[[], Any]] = {
    **{
        f"beside ddp, {recipe}": partial(beside_ddp, six, recipe, branched)
        for recipe in ("dense", LOSSY, "int8")
    },
    "beside ddp, kept": partial(beside_ddp, keeping, LOSSY, perceptron),
    "beside ddp, accumulating": partial(beside_ddp, accumulating, LOSSY, perceptron),
    "beside ddp, sending each": partial(beside_ddp, partial(accumulating, silent=0), "dense", perceptron),
    **{
        f"loading, {kind}, {recipe}": partial(loading, kind, recipe)
        for kind in ("ddp", "plain")
        for recipe in ("dense", "int4", "topk(0.05)")
    },
    "loading by one": partial(loading_by_one, 0),
    "loading by one, guarded": partial(loading_by_one, 1),
    "switched within accumulation": switched_within_accumulation,
    "unused": unused,
    "checkpointed": partial(checkpointed, False, LOSSY),
    "checkpointed, reentrant": partial(checkpointed, True, LOSSY),
    "twice through": twice_through,
    "poisoned": poisoned,
    "resumed": resumed,
    "flushed": flushed,
    "adaptive": adaptive,
    "copied": copied,
    "forgotten": partial(forgotten, keeps_parameters=False),
    "forgotten, but for its parameters": partial(forgotten, keeps_parameters=True),
    "refused": refused,
}

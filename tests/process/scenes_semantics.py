"""Scenes of what gradwire promises beside the mean: uneven inputs, loss scales, flush and detach."""

from __future__ import annotations

import gc
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.memory import UNSENT
from gradwire.recipes.base import REGISTRY
from tests.support.models import batch, digest, gradients, optimizer_of, perceptron, same, train
from tests.support.states import own_state

LOSSY = "leader_topk(ratio=0.05)"


def _attached(
    recipe: str = LOSSY, lr: float = 0.05, scaler: torch.amp.GradScaler | None = None, **options: Any
) -> tuple[DistributedDataParallel, torch.optim.Optimizer, gradwire.Wire]:
    ddp = DistributedDataParallel(perceptron(), **options)
    optimizer = optimizer_of(ddp, lr)
    return ddp, optimizer, gradwire.attach(ddp, optimizer, recipe, scaler=scaler)


def uneven(
    recipe: str | None, batches: tuple[int, ...], bucket_cap_mb: float | None = 0.01
) -> dict[str, Any]:
    """`join()` with another number of batches on each rank; `None` is plain DDP."""
    ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=bucket_cap_mb)
    optimizer = optimizer_of(ddp)
    wire = None if recipe is None else gradwire.attach(ddp, optimizer, recipe)
    with ddp.join():
        train(ddp, optimizer, range(batches[dist.get_rank()]))
        finished = own_state(wire) if wire else {}
    after = own_state(wire) if wire else {}
    kept = finished.get("memory", {})
    return {
        "digest": digest(ddp),
        "steps": [finished.get("step"), after.get("step")],
        "memory_kept": all(torch.equal(kept[name], after["memory"][name]) for name in kept),
        "remembers": any(bool(memory.any()) for memory in kept.values()),
    }


def decided_without_it(batches: tuple[int, ...]) -> dict[str, Any]:
    """A recipe that decides after five steps, when a rank has finished already; DDP's own buckets."""

    @gradwire.recipes.register
    def late_lossy() -> gradwire.recipes.Composition:
        lossy = gradwire.recipe(LOSSY).build()
        return replace(gradwire.recipe("dense").build(), next=gradwire.recipes.Decision(lambda _facts: lossy))

    try:
        return uneven("late_lossy", batches, bucket_cap_mb=None)
    finally:
        del REGISTRY["late_lossy"]


def initial_world_size() -> str:
    """`join(divide_by_initial_world_size=False)`, which no hook can honour."""
    ddp, optimizer, _ = _attached()
    try:
        with ddp.join(divide_by_initial_world_size=False):
            train(ddp, optimizer, range(2))
    except ValueError as error:
        return str(error)
    return ""


def overflow(recipe: str) -> dict[str, Any]:
    """float16 autocast with a scaler whose scale is far too large on one rank's data."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4)
    ddp, optimizer, wire = _attached(recipe, lr=0.2, scaler=scaler, bucket_cap_mb=0.01)
    scales, kept, moved, losses = [], [], [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(60):
            inputs, targets = batch(step)
            if step == 10 and dist.get_rank() == 1:
                inputs = inputs * 60_000
            before, replica = own_state(wire)["memory"], digest(ddp)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                outputs = ddp(inputs)
            loss = nn.functional.mse_loss(outputs.float(), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            losses.append(float(loss.detach()))
            after = own_state(wire)["memory"]
            kept.append(all(torch.equal(before[name], after[name]) for name in before))
            moved.append(digest(ddp) != replica)
    return {
        "scales": scales,
        "kept": kept,
        "moved": moved,
        "losses": [losses[0], losses[-1]],
        "digest": digest(ddp),
        "warnings": [str(each.message) for each in caught if "micro-batch" in str(each.message)],
    }


def autocast_without_scaler(dtype: torch.dtype) -> str:
    """What the first forward pass raises, if anything."""
    ddp, _, _ = _attached()
    try:
        with torch.autocast("cpu", dtype):
            ddp(batch(0)[0])
    except ValueError as error:
        return str(error)
    return ""


def accumulation(recipe: str, no_sync: bool) -> list[str]:
    """Warnings of three optimizer steps of two micro-batches each."""
    ddp, optimizer, _ = _attached(recipe)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(3):
            optimizer.zero_grad()
            for micro in range(2):
                inputs, targets = batch(2 * step + micro)
                ddp.require_backward_grad_sync = micro == 1 or not no_sync
                nn.functional.mse_loss(ddp(inputs), targets).backward()
            optimizer.step()
    return [str(each.message) for each in caught if "micro-batch" in str(each.message)]


def resumed_without_warning() -> list[str]:
    """Loading a state moves the step number; that is no accumulation."""
    ddp, optimizer, wire = _attached()
    train(ddp, optimizer, range(5))
    saved = wire.state_dict()
    ddp, optimizer, wire = _attached()
    wire.load_state_dict(saved)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(ddp, optimizer, range(5, 8))
    return [str(each.message) for each in caught if "micro-batch" in str(each.message)]


def clipping() -> dict[str, Any]:
    """`clip_grad_norm_` sees the same mean on all ranks."""
    ddp, optimizer, _ = _attached()
    norms = []
    for step in range(10):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(inputs), targets).backward()
        norms.append(float(nn.utils.clip_grad_norm_(ddp.parameters(), 0.01)))
        optimizer.step()
    return {"norms": norms, "digest": digest(ddp)}


def _total(ddp: nn.Module, steps: range, wire: gradwire.Wire | None) -> list[torch.Tensor]:
    """The sum of all gradients of `steps` at parameters that never move, flush included."""
    total = [torch.zeros_like(p, dtype=torch.float64) for p in ddp.parameters()]
    for step in [*steps, None]:
        ddp.zero_grad()
        if step is not None:
            inputs, targets = batch(step)
            nn.functional.mse_loss(ddp(inputs), targets).backward()
        elif wire is not None:
            wire.flush()
        for sum_, gradient in zip(total, gradients(ddp), strict=True):
            sum_ += gradient
    return total


def flush(recipe: str) -> dict[str, Any]:
    """What was sent late is handed over in the end: sums over twenty steps against plain DDP."""
    ddp, _, wire = _attached(recipe)
    sent = _total(ddp, range(20), None)
    waits = any(memory.any() for memory in own_state(wire)["memory"].values())
    flushed = _total(ddp, range(0), wire)
    ours = [a + b for a, b in zip(sent, flushed, strict=True)]
    plain = _total(DistributedDataParallel(perceptron()), range(20), None)
    return {
        "waits": waits,
        "close": all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(ours, plain, strict=True)),
        "forgotten": not any(memory.any() for memory in own_state(wire)["memory"].values()),
    }


def flush_with_scaler() -> bool:
    """A flushed gradient carries the loss scale, like every other that the scaler will see."""
    moved = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**12)):
        ddp, optimizer, wire = _attached(scaler=scaler)
        for step in range(4):
            inputs, targets = batch(step)
            loss = nn.functional.mse_loss(ddp(inputs), targets)
            optimizer.zero_grad()
            (loss if scaler is None else scaler.scale(loss)).backward()
        optimizer.zero_grad()
        wire.flush()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
        moved.append(list(ddp.parameters()))
    return all(torch.allclose(a, b, rtol=1e-6, atol=1e-8) for a, b in zip(*moved, strict=True))


def detach(policy: dict[str, str] | None) -> dict[str, Any]:
    """After `detach`, plain DDP from the same parameters on."""
    ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.01)
    optimizer = optimizer_of(ddp)
    wire = gradwire.attach(ddp, optimizer, LOSSY, policy=policy)
    train(ddp, optimizer, range(5))
    optimizer.zero_grad()
    wire.detach()
    optimizer.step()
    twin = perceptron()
    twin.load_state_dict(ddp.module.state_dict())
    plain = DistributedDataParallel(twin, bucket_cap_mb=0.01)
    train(ddp, optimizer, range(5, 10))
    train(plain, optimizer_of(plain), range(5, 10))
    # A ring of three adds in an order that depends on where in a bucket an element lies.
    pairs = zip(ddp.parameters(), plain.parameters(), strict=True)
    return {
        "close": all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in pairs),
        "digest": digest(ddp),
        "memory": wire.report().memory_bytes,
        "recipe": wire.report().recipe,
    }


def policy_after_detach() -> list[list[str]]:
    """Parameters with a memory before `detach`, after it, and after another recipe was switched to."""
    ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.01)
    optimizer = optimizer_of(ddp)
    spared = next(name for name, each in ddp.module.named_parameters() if each.dim() > 1)
    wire = gradwire.attach(ddp, optimizer, LOSSY, policy={spared: "dense"})

    def remembered() -> list[str]:
        train(ddp, optimizer, range(2))
        return sorted(own_state(wire)["memory"])

    found = [remembered()]
    optimizer.zero_grad()
    wire.detach()
    optimizer.step()
    found.append(remembered())
    wire.switch("int4")
    return [*found, remembered()]


def overlap_off() -> bool:
    """Exchanges after backward instead of under it change no number."""
    found = []
    for overlap in (True, False):
        ddp, optimizer, wire = _attached(bucket_cap_mb=0.01)
        wire.overlap = overlap
        train(ddp, optimizer, range(10))
        found.append(list(ddp.parameters()))
    return same(*found)


def forgotten(*, hooked: bool) -> bool:
    """Whether the planes of a model are freed after its last reference is gone.

    Or the last one but that of a hook on its optimizer, as of averaged weights, which refers to it.
    """
    ddp, optimizer, wire = _attached()
    if hooked:
        optimizer.register_step_post_hook(lambda *_, model=ddp: model.zero_grad())
    train(ddp, optimizer, range(3))
    plane = weakref.ref(wire.attached.backward.reducer.layout.flat_buffers[0].committed[UNSENT])
    del ddp, optimizer, wire
    for _ in range(50):
        gc.collect()
        if plane() is None:
            return True
        time.sleep(0.02)  # the worker's thread ends in its own time
    return False


SCENES: dict[str, Callable[[], Any]] = {
    "uneven, ddp": partial(uneven, None, (4, 7, 2)),
    "uneven, dense": partial(uneven, "dense", (4, 7, 2)),
    "uneven, lossy": partial(uneven, LOSSY, (4, 7, 2)),
    "uneven, covap": partial(uneven, "covap(interval=2)", (4, 7, 2)),
    "one batch, ddp": partial(uneven, None, (1, 5, 3)),
    "one batch, dense": partial(uneven, "dense", (1, 5, 3)),
    "one batch, lossy": partial(uneven, LOSSY, (1, 5, 3)),
    "no batch, ddp": partial(uneven, None, (3, 0, 2)),
    "no batch, dense": partial(uneven, "dense", (3, 0, 2)),
    "no batch, lossy": partial(uneven, LOSSY, (3, 0, 2)),
    "decided without it": partial(decided_without_it, (9, 2, 8)),
    "initial world size": initial_world_size,
    "overflow, lossy": partial(overflow, LOSSY),
    "overflow, dense": partial(overflow, "dense"),
    "float16 without scaler": partial(autocast_without_scaler, torch.float16),
    "bfloat16 without scaler": partial(autocast_without_scaler, torch.bfloat16),
    "accumulation": partial(accumulation, LOSSY, False),
    "accumulation under no_sync": partial(accumulation, LOSSY, True),
    "accumulation, dense": partial(accumulation, "dense", False),
    "resumed": resumed_without_warning,
    "clipping": clipping,
    "flush": partial(flush, LOSSY),
    "flush of a low-pass memory": partial(flush, "scalecom(rate=10, beta=0.25, warmup_steps=0)"),
    "flush with scaler": flush_with_scaler,
    "detach": partial(detach, None),
    "detach with policy": partial(detach, {"*.bias": "topk(ratio=0.5)"}),
    "policy after detach": policy_after_detach,
    "overlap off": overlap_off,
    "forgotten": partial(forgotten, hooked=False),
    "forgotten, with a hook": partial(forgotten, hooked=True),
}

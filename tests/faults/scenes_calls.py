"""Scenes of calls that are for all ranks, and that some ranks do not make."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import Mock, patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.memory import UNSENT
from tests.support.models import batch, digest, optimizer_of, perceptron, train
from tests.support.states import own_state
from tests.support.world import lose_groups

Attached = tuple[DistributedDataParallel, torch.optim.Optimizer, gradwire.Wire]


def _attached(group: dist.ProcessGroup | None = None) -> Attached:
    ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.01)
    optimizer = optimizer_of(ddp)
    wire = gradwire.attach(ddp, optimizer, "topk(ratio=0.05)", process_group=group)
    wire.watching = True
    train(ddp, optimizer, range(3))
    return ddp, optimizer, wire


def _step(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, number: int) -> None:
    train(ddp, optimizer, range(number, number + 1))


def _calls(wire: gradwire.Wire) -> Any:
    state = wire.state_dict()
    folder = "nowhere"  # never used: no rank gets so far
    return {
        "save()": lambda: wire.save(folder),
        "load(missing='refuse')": lambda: wire.load(folder),
        "flush()": wire.flush,
        "detach()": wire.detach,
        "mean_state_dict()": wire.mean_state_dict,
        "load_state_dict(missing='refuse')": lambda: wire.load_state_dict(state),
        "diagnose()": wire.diagnose,
    }


def _raised(call: Callable[[], object]) -> list[Any]:
    start_s = time.monotonic()
    try:
        call()
    except gradwire.GradwireError as error:
        return [type(error).__name__, str(error), time.monotonic() - start_s]
    return ["nothing", "", time.monotonic() - start_s]


def different_calls() -> dict[str, Any]:
    """Every call on rank 0 against another one on rank 1; then training goes on."""
    ddp, optimizer, wire = _attached()
    calls = _calls(wire)
    names = list(calls)
    said = {}
    for name, other in zip(names, [*names[1:], names[0]], strict=True):
        said[name] = [other, *_raised(calls[other if dist.get_rank() else name])]
    train(ddp, optimizer, range(3, 6))
    return {"said": said, "digest": digest(ddp), "step": wire.report().step}


def call_against_step(name: str) -> list[Any]:
    """A call on rank 0, such as behind `if os.path.exists(file)`, while rank 1 trains on."""
    ddp, optimizer, wire = _attached()
    call = _calls(wire)[name]
    before = digest(ddp)
    said = _raised(partial(_backward, ddp, optimizer) if dist.get_rank() else call)
    again = _raised(partial(_backward, ddp, optimizer))
    lose_groups()
    return [*said, again[0], again[1], before == digest(ddp)]


def _backward(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    inputs, targets = batch(3)
    nn.functional.mse_loss(ddp(inputs), targets).backward()


def fails_on_one_rank() -> dict[str, Any]:
    """All ranks make a call in which rank 1 alone fails, after all have come to it; then training goes on."""
    ddp, optimizer, wire = _attached()
    reducer, none = wire.attached.backward.reducer, Mock(side_effect=MemoryError("none left"))
    remembered = reducer.layout.flat_buffers[0].committed
    harmed: dict[str, tuple[Callable[[], object], Any]] = {
        "flush": (wire.flush, patch.object(wire.attached.source, "adding", none)),
        "detach": (wire.detach, patch.object(reducer, "retired", none)),
        "switch": (partial(wire.switch, "int8"), patch.object(reducer, "successor", none)),
        "diagnose, before": (wire.diagnose, patch.dict(remembered, {UNSENT: Mock(double=none)})),
        "diagnose, a choice": (wire.diagnose, patch("gradwire.kernels.topk.topk_indices", none)),
    }
    found = {}
    for number, (name, (call, harm)) in enumerate(harmed.items()):
        before = own_state(wire)["memory"], [p.grad.clone() for p in ddp.parameters() if p.grad is not None]
        start_s, said = time.monotonic(), ["nothing", ""]
        try:
            with harm if dist.get_rank() == 1 else nullcontext():
                call()
        except Exception as error:
            said = [type(error).__name__, str(error)]
        took_s = time.monotonic() - start_s
        memory, grads = own_state(wire)["memory"], [p.grad for p in ddp.parameters()]
        same = all(torch.equal(memory[each], before[0][each]) for each in memory)
        same &= all(map(torch.equal, grads, before[1]))
        train(ddp, optimizer, range(3 + number, 4 + number))
        found[name] = [*said, took_s, same]
    return {"said": found, "digest": digest(ddp), "step": wire.report().step, "runs": wire.report().recipe}


def call_against_nothing() -> list[Any]:
    """A call that rank 1 does not make, on a group with a short timeout."""
    *_, wire = _attached(dist.new_group([0, 1], timeout=timedelta(seconds=2)))
    said = _raised(wire.flush) if dist.get_rank() == 0 else ["", "", 0.0]
    dist.barrier()
    return said


def replicas_part() -> list[Any]:
    """A parameter that one rank changes by itself, with a guard and without."""
    found = []
    for every in (0, 2):
        ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.01)
        optimizer = optimizer_of(ddp)
        gradwire.attach(ddp, optimizer, "topk(ratio=0.05)", guard_every=every)
        train(ddp, optimizer, range(3))
        if dist.get_rank() == 1:
            with torch.no_grad():
                list(ddp.parameters())[2].view(-1)[7] += 1e-3
        said = [_raised(partial(_step, ddp, optimizer, step))[:2] for step in (3, 4)]
        found.append(said)
    return found


SCENES: dict[str, Callable[[], Any]] = {
    "different calls": different_calls,
    "load against step": partial(call_against_step, "load_state_dict(missing='refuse')"),
    "flush against step": partial(call_against_step, "flush()"),
    "nothing": call_against_nothing,
    "fails on one rank": fails_on_one_rank,
    "replicas part": replicas_part,
}

"""Scenes of what models keep beside parameters: against plain DDP, in every forward pass of every rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradwire
from tests.support.models import batch, digest, optimizer_of, same, train

Loop = Callable[[DistributedDataParallel, torch.optim.Optimizer], None]


class Counting(nn.Module):
    """BatchNorm twice, once computed again in backward if so wished, and buffers of several kinds."""

    seen: Tensor
    history: Tensor
    calls: Tensor
    mask: Tensor

    def __init__(self, again: bool = False, replaced: bool = False) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64))
        self.second = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
        self.head = nn.Linear(64, 8)
        self.register_buffer("seen", torch.zeros(8, dtype=torch.float64))
        self.register_buffer("history", torch.zeros(0))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int32))
        self.register_buffer("mask", torch.ones(3, 5, dtype=torch.bool).t())
        self._again, self._replaced = again, replaced

    def _started(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.first(inputs)
        with torch.no_grad():
            if self._replaced:
                self.history = torch.cat([self.history, out.mean().view(1)])
        return out

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = (
            checkpoint(self._started, inputs, use_reentrant=False) if self._again else self._started(inputs)
        )
        hidden = self.second(torch.tanh(hidden))
        out: Tensor = self.head(torch.tanh(hidden))
        with torch.no_grad():
            if self.training:
                self.seen += out.mean(0).double()
                self.calls += 1 + dist.get_rank()
                self.mask.logical_and_(torch.rand(5, 3) < 0.9)
        return out


def _counting(**options: bool) -> nn.Module:
    torch.manual_seed(0)
    module = Counting(**options)
    torch.manual_seed(7 + dist.get_rank())
    return module


def _followed(
    build: Callable[[], nn.Module], loop: Loop, recipe: str | None, **options: Any
) -> dict[str, Any]:
    """What the buffers were after every forward pass and at the end, and how often DDP sent them."""
    ddp = DistributedDataParallel(build(), **{"bucket_cap_mb": 0.01, **options})
    optimizer = optimizer_of(ddp)
    if recipe is not None:
        gradwire.attach(ddp, optimizer, recipe)
    after: list[Tensor] = []
    broadcasts = 0
    honest = ddp._sync_buffers

    def counted() -> None:
        nonlocal broadcasts
        broadcasts += 1
        honest()

    ddp._sync_buffers = counted
    ddp.register_forward_hook(lambda *_: after.extend(each.clone() for each in ddp.buffers()))
    loop(ddp, optimizer)
    return {"after": after, "broadcasts": broadcasts, "end": list(ddp.buffers()), "digest": digest(ddp)}


def follows(
    loop: Loop, build: Callable[[], nn.Module] = _counting, recipe: str = "dense", **options: Any
) -> dict[str, Any]:
    """Against DDP without a hook."""
    plain, ours = (_followed(build, loop, each, **options) for each in (None, recipe))
    return {
        "same": same(plain["after"], ours["after"]),
        "passes": len(ours["after"]) // len(ours["end"]),
        "broadcasts": [plain["broadcasts"], ours["broadcasts"]],
        "end": [each.double().sum().item() for each in ours["end"]],
        "trained alike": plain["digest"] == ours["digest"],
    }


def one_evaluates() -> list[int]:
    """Under plain DDP rank 0 would send to no receiver, and the next forward pass would be out of step."""
    return [_followed(_counting, _alone, "dense")["broadcasts"]]


def _six(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    train(ddp, optimizer, range(6))


def _twelve(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    train(ddp, optimizer, range(12))


def _evaluating(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Between steps a pass without gradients, in eval mode, and in training mode one without backward."""
    for step in range(3):
        train(ddp, optimizer, range(step, step + 1))
        ddp.eval()
        with torch.no_grad():
            ddp(batch(50)[0])
        ddp.train()
        ddp(batch(51)[0])


def _alone(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    for step in range(3):
        train(ddp, optimizer, range(step, step + 1))
        if dist.get_rank() == 0:
            ddp.eval()
            with torch.no_grad():
                ddp(batch(50)[0])
            ddp.train()


def _accumulating(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    for step in range(4):
        optimizer.zero_grad()
        for micro in range(3):
            inputs, targets = batch(10 * step + micro)
            with ddp.no_sync() if micro < 2 else nullcontext():
                nn.functional.mse_loss(ddp(inputs), targets).backward()
        optimizer.step()


def _absent(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Rank 0 has no batch at all in a `join()` that others enter behind the same step."""
    train(ddp, optimizer, range(2))
    with ddp.join():
        train(ddp, optimizer, range(2, 2 + 2 * dist.get_rank()))
    train(ddp, optimizer, range(4, 6))
    with ddp.join(enable=False):
        train(ddp, optimizer, range(6, 8))


def _poisoned(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """One gradient of one rank is NaN, and the step is left out."""
    for step in range(6):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        factor = torch.nan if (step, dist.get_rank()) == (2, 1) else 1.0
        (nn.functional.mse_loss(ddp(inputs), targets) * factor).backward()
        if step != 2:
            optimizer.step()


def _compiled(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Around the attached module."""
    wrapped = torch.compile(ddp, backend="aot_eager")
    for step in range(5):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(wrapped(inputs), targets).backward()
        optimizer.step()


def _joining(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Rank 0, where buffers come from otherwise, is the first to end."""
    with ddp.join():
        train(ddp, optimizer, range(2 + 2 * dist.get_rank()))
    train(ddp, optimizer, range(4, 7))


def _twice(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Two backward passes through one graph, in eval mode, whose BatchNorm reads its buffers in backward."""
    train(ddp, optimizer, range(2))
    ddp.eval()
    inputs, targets = batch(2)
    loss = nn.functional.mse_loss(ddp(inputs), targets)
    loss.backward(retain_graph=True)
    with ddp.no_sync():
        loss.backward()
    ddp.train()
    train(ddp, optimizer, range(3, 5))


def detached() -> dict[str, Any]:
    """Afterwards DDP broadcasts as it used to."""

    def loop(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        train(ddp, optimizer, range(3))
        if wires:
            wires[0].detach()
        train(ddp, optimizer, range(3, 6))

    wires: list[gradwire.Wire] = []
    honest = gradwire.attach

    def kept(*arguments: Any) -> gradwire.Wire:
        wires.append(honest(*arguments))
        return wires[0]

    gradwire.attach = kept
    try:
        return follows(loop)
    finally:
        gradwire.attach = honest


def with_a_hook() -> list[int]:
    """A hook of the user's own for buffers stays in charge."""
    ddp = DistributedDataParallel(_counting())
    calls: list[int] = []
    ddp._register_buffer_comm_hook(None, lambda _state, buffers: calls.append(len(buffers)))
    optimizer = optimizer_of(ddp)
    gradwire.attach(ddp, optimizer, "dense")
    train(ddp, optimizer, range(3))
    return calls


SCENES: dict[str, Callable[[], Any]] = {
    "buffers": partial(follows, _six),
    "buffers, bucket views": partial(follows, _six, gradient_as_bucket_view=True),
    "buffers, static graph": partial(follows, _six, static_graph=True),
    "buffers, lossy": partial(follows, _six, recipe="topk(ratio=1.0)"),
    "buffers, evaluating": partial(follows, _evaluating),
    "buffers, one evaluates": one_evaluates,
    "buffers, accumulating": partial(follows, _accumulating),
    "buffers, join": partial(follows, _joining),
    "buffers, two backward passes": partial(follows, _twice),
    "buffers, computed again": partial(follows, _six, partial(_counting, again=True)),
    "buffers, computed again and replaced": partial(
        follows, _six, partial(_counting, again=True, replaced=True)
    ),
    "buffers, nan": partial(follows, _poisoned),
    "buffers, absent in join": partial(follows, _absent),
    "buffers, taken apart": partial(follows, _twelve, recipe="covap"),
    "buffers, replaced": partial(follows, _six, partial(_counting, replaced=True)),
    "buffers, not broadcast": partial(follows, _six, broadcast_buffers=False),
    "buffers, detached": detached,
    "buffers, hook": with_a_hook,
    # torch's compiler refuses buckets below its own first one, 1 MB.
    "buffers, compiled": partial(follows, _compiled, bucket_cap_mb=25),
}

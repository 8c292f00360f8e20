"""Real gloo ranks: buffers travel under the backward pass, and every forward pass finds DDP's values."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradwire
from tests.support.models import batch, digest, optimizer_of, same, train
from tests.support.tiers import rest
from tests.support.world import Ranks

pytestmark = pytest.mark.process


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


def counting(**options: bool) -> nn.Module:
    torch.manual_seed(0)
    module = Counting(**options)
    torch.manual_seed(7 + dist.get_rank())
    return module


@dataclass(frozen=True)
class Run:
    """What the buffers were after every forward pass and at the end, and how often DDP sent them."""

    after: list[Tensor]
    broadcasts: int
    end: list[Tensor]
    digest: str


def _run(build: Callable[[], nn.Module], loop: Loop, recipe: str | None, **options: Any) -> Run:
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
    return Run(after, broadcasts, list(ddp.buffers()), digest(ddp))


@dataclass(frozen=True)
class Followed:
    """A run beside that of DDP without a hook."""

    same: bool
    """Whether buffers were, after every forward pass."""
    passes: int
    broadcasts_by_ddp: int
    broadcasts: int
    end: list[float]
    """The sum of each buffer."""
    trained_alike: bool


def follows(
    loop: Loop, build: Callable[[], nn.Module] = counting, recipe: str = "dense", **options: Any
) -> Followed:
    plain, ours = (_run(build, loop, each, **options) for each in (None, recipe))
    return Followed(
        same(plain.after, ours.after),
        len(ours.after) // len(ours.end),
        plain.broadcasts,
        ours.broadcasts,
        [each.double().sum().item() for each in ours.end],
        plain.digest == ours.digest,
    )


def broadcasts_where_one_evaluates() -> int:
    """Under plain DDP rank 0 would send to no receiver, and the next forward pass would be out of step."""
    return _run(counting, _alone, "dense").broadcasts


def six(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    train(ddp, optimizer, range(6))


def twelve(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    train(ddp, optimizer, range(12))


def evaluating(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
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


def accumulating(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    for step in range(4):
        optimizer.zero_grad()
        for micro in range(3):
            inputs, targets = batch(10 * step + micro)
            with ddp.no_sync() if micro < 2 else nullcontext():
                nn.functional.mse_loss(ddp(inputs), targets).backward()
        optimizer.step()


def absent(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Rank 0 has no batch at all in a `join()` that others enter behind the same step."""
    train(ddp, optimizer, range(2))
    with ddp.join():
        train(ddp, optimizer, range(2, 2 + 2 * dist.get_rank()))
    train(ddp, optimizer, range(4, 6))
    with ddp.join(enable=False):
        train(ddp, optimizer, range(6, 8))


def poisoned(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """One gradient of one rank is NaN, and the step is left out."""
    for step in range(6):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        factor = torch.nan if (step, dist.get_rank()) == (2, 1) else 1.0
        (nn.functional.mse_loss(ddp(inputs), targets) * factor).backward()
        if step != 2:
            optimizer.step()


def compiled(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Around the attached module."""
    wrapped = torch.compile(ddp, backend="aot_eager")
    for step in range(5):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(wrapped(inputs), targets).backward()
        optimizer.step()


def joining(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Rank 0, where buffers come from otherwise, is the first to end."""
    with ddp.join():
        train(ddp, optimizer, range(2 + 2 * dist.get_rank()))
    train(ddp, optimizer, range(4, 7))


def twice(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
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


def detached() -> Followed:
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
    ddp = DistributedDataParallel(counting())
    calls: list[int] = []
    ddp._register_buffer_comm_hook(None, lambda _state, buffers: calls.append(len(buffers)))
    optimizer = optimizer_of(ddp)
    gradwire.attach(ddp, optimizer, "dense")
    train(ddp, optimizer, range(3))
    return calls


REPLACED, AGAIN = partial(counting, replaced=True), partial(counting, again=True)
CASES: dict[str, tuple[Callable[[], Followed], int, int]] = {
    "buffers": (partial(follows, six), 6, 1),
    "bucket views": (partial(follows, six, gradient_as_bucket_view=True), 6, 1),
    "static graph": (partial(follows, six, static_graph=True), 6, 1),
    # A pass without gradients asks for none after it; one in training mode without backward does.
    "evaluating": (partial(follows, evaluating), 6, 3),
    "accumulating": (partial(follows, accumulating), 4, 1),
    "two backward passes": (partial(follows, twice), 5, 1),
    "replaced": (partial(follows, six, REPLACED), 6, 1),
    # What is sent is out of date when backward ends, but for the first step, which has a single bucket.
    "computed again": (partial(follows, six, AGAIN), 6, 5),
    "computed again and replaced": (partial(follows, six, partial(REPLACED, again=True)), 6, 5),
    "nan": (partial(follows, poisoned), 6, 1),
    # torch's compiler refuses buckets below its own first one, 1 MB.
    "compiled": (partial(follows, compiled, bucket_cap_mb=25), 5, 1),
    "not broadcast": (partial(follows, six, broadcast_buffers=False), 0, 0),
    "detached": (detached, 6, 3),
}
"""Broadcasts by DDP, without a hook and with gradwire attached, whose first step is like any other's."""
FEW = ("buffers", "evaluating", "accumulating", "computed again", "detached")


@pytest.mark.parametrize("case", rest(CASES, but=FEW))
def test_every_forward_pass_begins_with_what_ddp_would_have_broadcast(two: Ranks, case: str) -> None:
    scene, by_ddp, attached = CASES[case]
    for found in two(scene):
        assert found.passes >= 5
        assert found.same
        assert found.trained_alike
        assert (found.broadcasts_by_ddp, found.broadcasts) == (by_ddp, attached)


def test_dense_steps_that_are_taken_apart_leave_the_broadcast_to_ddp(two: Ranks) -> None:
    for found in two(follows, twelve, recipe="covap"):
        assert found.broadcasts_by_ddp == 12
        assert found.broadcasts == 4, "the first, and those after each of three"


def test_a_rank_without_a_batch_under_join_sends_what_its_peers_expect(two: Ranks) -> None:
    # DDP takes the buffers of another rank there, which have those of rank 0 by then: values differ.
    for found in two(follows, absent):
        assert found.trained_alike


def test_so_it_is_on_three_ranks(tmp_path: Path) -> None:
    for case in ("buffers", "computed again"):
        scene, by_ddp, attached = CASES[case]
        for found in Ranks(3, tmp_path)(scene):
            assert found.same
            assert found.trained_alike
            assert (found.broadcasts_by_ddp, found.broadcasts) == (by_ddp, attached)


def test_under_join_ddp_keeps_the_broadcast_whose_source_may_be_another_rank(two: Ranks) -> None:
    for found in two(follows, joining):
        assert found.same
        assert found.trained_alike


@pytest.mark.parametrize(
    "scene",
    [
        partial(follows, six),
        partial(follows, six, recipe="topk(ratio=1.0)"),
        partial(follows, twelve, recipe="covap"),
    ],
)
def test_all_ranks_have_the_same_when_backward_returns(two: Ranks, scene: Callable[[], Followed]) -> None:
    one, other = two(scene)
    assert one.end == other.end


def test_without_broadcasts_they_differ_at_the_end(two: Ranks) -> None:
    one, other = two(follows, six, broadcast_buffers=False)
    assert one.end != other.end


def test_a_rank_may_evaluate_alone(two: Ranks) -> None:
    assert two(broadcasts_where_one_evaluates) == [1, 1]


def test_a_hook_of_the_users_own_stays_in_charge(two: Ranks) -> None:
    assert two(with_a_hook) == [[10, 10, 10], [10, 10, 10]]

"""Scenes of lossless all-reduces: in training, and in direct calls of all_reduce."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.integrations import lossless_group
from tests.support.models import batch, digest, perceptron, train
from tests.support.ring_order import ring_sum
from tests.support.states import own_state

KINDS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda module: torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9),
    "adamw": lambda module: torch.optim.AdamW(module.parameters(), lr=1e-3),
}


def training_is_ddps() -> dict[str, list[str]]:
    """Fingerprints after sixty steps, past a change of tables, of DDP and of gcomp(mode='lossless')."""
    found: dict[str, list[str]] = {}
    for name, build in KINDS.items():
        for recipe in (None, "gcomp(mode='lossless')"):
            ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.02)
            optimizer = build(ddp)
            if recipe is not None:
                gradwire.attach(ddp, optimizer, recipe)
            train(ddp, optimizer, range(60))
            found.setdefault(name, []).append(digest(ddp))
    return found


def near_by_optimizer() -> dict[str, Any]:
    """Replicas, bytes, and how far sixty steps end from DDP's, relative to how far they went."""
    found: dict[str, Any] = {}
    for name, build in KINDS.items():
        ends, start = [], perceptron().state_dict()
        for recipe in (None, "gcomp", "gcomp(mode='levels')"):
            ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.02)
            optimizer = build(ddp)
            wire = None if recipe is None else gradwire.attach(ddp, optimizer, recipe)
            train(ddp, optimizer, range(60))
            ends.append(nn.utils.parameters_to_vector(ddp.parameters()).detach())
            if wire is not None:
                found[f"{name} {recipe}"] = {"digest": digest(ddp), "ratio": wire.report().ratio}
        way = (ends[0] - torch.cat([each.reshape(-1) for each in start.values()])).norm()
        for recipe, end in zip(("gcomp", "gcomp(mode='levels')"), ends[1:], strict=True):
            found[f"{name} {recipe}"]["away"] = float((end - ends[0]).norm() / way)
    return found


def loss_scales() -> list[str]:
    """Fingerprints after sixty steps of near-lossless training, without a loss scale and with 2^12."""
    found = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=10**6)):
        ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.02)
        optimizer = KINDS["adamw"](ddp)
        gradwire.attach(ddp, optimizer, "gcomp", scaler=scaler)
        if scaler is None:
            train(ddp, optimizer, range(60))
        else:
            train_scaled(ddp, optimizer, scaler, range(60))
        found.append(digest(ddp))
    return found


def train_scaled(
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    steps: range,
) -> None:
    """As `train`, with losses scaled and gradients scaled back."""
    for step in steps:
        inputs, targets = batch(step)
        optimizer.zero_grad()
        scaler.scale(nn.functional.mse_loss(ddp(inputs), targets)).backward()
        scaler.step(optimizer)
        scaler.update()


def resumed() -> bool:
    """Whether a run that is saved and loaded goes on with its tables, to the last bit."""

    def fresh() -> tuple[DistributedDataParallel, torch.optim.Optimizer, Any]:
        ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.02)
        optimizer = KINDS["adamw"](ddp)
        return ddp, optimizer, gradwire.attach(ddp, optimizer, "gcomp(refresh=4)")

    ddp, optimizer, wire = fresh()
    train(ddp, optimizer, range(6))
    saved = ddp.state_dict(), optimizer.state_dict(), own_state(wire)
    saved = torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, saved)
    train(ddp, optimizer, range(6, 12))
    other, its_optimizer, its_wire = fresh()
    other.load_state_dict(saved[0])
    its_optimizer.load_state_dict(saved[1])
    its_wire.load_state_dict(saved[2])
    assert any(kind.startswith("symbols") for kind in saved[2]["kept"])
    train(other, its_optimizer, range(6, 12))
    return digest(ddp) == digest(other)


def a_group() -> dist.ProcessGroup:
    """Of the backend under test."""
    group = dist.new_group(backend=lossless_group.register())
    assert isinstance(group, dist.ProcessGroup)
    return group


def numbers(dtype: torch.dtype, shape: tuple[int, ...] = (150, 400), rank: int | None = None) -> Tensor:
    """A rank's own, of many magnitudes; by default this one's."""
    random = torch.Generator().manual_seed(dist.get_rank() if rank is None else rank)
    scale = 2.0 ** torch.randint(-12, 2, shape, generator=random)
    return (torch.randn(shape, generator=random) * scale).to(dtype)


def sums() -> list[str]:
    """What differs from gloo: nothing."""
    group, wrong = a_group(), []
    for dtype in lossless_group.DTYPES:
        for turn in range(3):
            plain = numbers(dtype) * (turn + 1)
            mine = plain.clone()
            dist.all_reduce(plain)
            dist.all_reduce(mine, group=group)
            if not torch.equal(plain, mine):
                wrong.append(f"{dtype} {turn}")
    return wrong


def ring_sums() -> list[str]:
    """What differs from sums around a ring: nothing. Partitions are uneven."""
    group, wrong = a_group(), []
    for dtype in lossless_group.DTYPES:
        ranks = [numbers(dtype, (60_001,), rank) for rank in range(dist.get_world_size())]
        for turn in range(3):
            mine = ranks[dist.get_rank()].clone()
            dist.all_reduce(mine, group=group)
            if not torch.equal(mine, ring_sum(ranks)):
                wrong.append(f"{dtype} {turn}")
    return wrong


def everything_else() -> dict[str, Any]:
    """What goes to gloo, several sums under way at once, and views."""
    group, rank = a_group(), dist.get_rank()
    largest = numbers(torch.float32)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    small, whole = torch.full((3,), rank + 1.0), torch.full((40_000,), rank + 1)
    across = torch.full((200, 300), rank + 1.0).T
    works = [dist.all_reduce(t, group=group, async_op=True) for t in (small, whole)]
    many = [torch.full((30_000 + n,), rank + 1.0 + n) for n in range(5)]
    works += [dist.all_reduce(t, group=group, async_op=True) for t in many]
    spread = torch.full((4,), float(rank))
    dist.broadcast(spread, 1, group=group)
    rows = [torch.empty(2) for _ in range(2)]
    dist.all_gather(rows, torch.full((2,), float(rank)), group=group)
    swapped, gathered = torch.empty(2), torch.empty(2, 2)
    dist.all_to_all_single(swapped, torch.full((2,), float(rank)), group=group)
    together = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    together(gathered.view(-1), torch.full((2,), float(rank)), group=group)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    share = torch.empty(2)
    scatter(share, torch.arange(4.0) * (rank + 1), group=group)
    for work in works:
        work.wait()
    dist.all_reduce(across, group=group)
    dist.barrier(group=group)
    return {
        "largest": bool((largest >= numbers(torch.float32)).all()),
        "small": small.tolist(),
        "whole": whole.unique().tolist(),
        "many": [t.unique().tolist() for t in many],
        "spread": spread.tolist(),
        "rows": torch.stack(rows).tolist(),
        "swapped": swapped.tolist(),
        "gathered": gathered.tolist(),
        "share": share.tolist() == [6.0 * rank, 3.0 + 6.0 * rank],
        "across": across.unique().tolist(),
    }


def ddp_on_top() -> list[str]:
    """DDP over the wrapped group, and over gloo."""
    found = []
    for group in (None, a_group()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 600), nn.Tanh(), nn.Linear(600, 8))
        ddp = DistributedDataParallel(model, process_group=group)
        train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.05), range(10))
        found.append(digest(ddp))
    return found


def refused_on_top() -> str:
    """What is said of a recipe that does not exist, before the user ends the group."""
    group = a_group()
    ddp = DistributedDataParallel(perceptron(), process_group=group)
    try:
        gradwire.attach(ddp, recipe="topq")
    except ValueError as error:
        return str(error)
    finally:
        dist.destroy_process_group(group)
    return "nothing"


SCENES: dict[str, Callable[[], Any]] = {
    "training": training_is_ddps,
    "near": near_by_optimizer,
    "loss scales": loss_scales,
    "resumed": resumed,
    "sums": sums,
    "ring sums": ring_sums,
    "everything else": everything_else,
    "ddp": ddp_on_top,
    "refused": refused_on_top,
}

"""Scenes in which DDP is used in ways that trouble communication hooks."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradwire
from tests.support.models import batch, digest, gradients, optimizer_of, perceptron, same, train
from tests.support.states import own_state
from tests.support.world import lose_groups

LOSSY = "leader_topk(ratio=0.05)"


def _twins(
    build: Callable[[], nn.Module], recipe: str, **options: Any
) -> tuple[tuple[DistributedDataParallel, torch.optim.Optimizer], ...]:
    """Plain DDP and gradwire over equal models."""
    pairs = []
    for attached in (False, True):
        ddp = DistributedDataParallel(build(), **options)
        optimizer = optimizer_of(ddp)
        if attached:
            gradwire.attach(ddp, optimizer, recipe)
        pairs.append((ddp, optimizer))
    return tuple(pairs)


def _equal_training(build: Callable[[], nn.Module], recipe: str = "dense", **options: Any) -> bool:
    digests = set()
    for ddp, optimizer in _twins(build, recipe, **options):
        train(ddp, optimizer, range(6))
        digests.add(digest(ddp))
    return len(digests) == 1


class Branches(nn.Module):
    """One branch of two per rank and step; the third is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(32, 64)
        self.branches = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 8)
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        taken = self.branches[(self.calls // 2 + dist.get_rank() * (self.calls % 2)) % 2]
        self.calls += 1
        return self.head(torch.tanh(taken(torch.tanh(self.stem(inputs)))))


def _branches() -> nn.Module:
    torch.manual_seed(0)
    return Branches()


def unused_dense() -> bool:
    """Whether dense and DDP agree when ranks use different parameters."""
    return _equal_training(_branches, find_unused_parameters=True)


def unused_lossy() -> dict[str, Any]:
    """With a memory: replicas, and what became of the branch that no rank uses."""
    model = _branches()
    never = model.branches[2].weight
    before = never.detach().clone()
    ddp = DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=0.01)
    optimizer = optimizer_of(ddp, lr=0.2)
    wire = gradwire.attach(ddp, optimizer, LOSSY)
    losses = train(ddp, optimizer, range(60))
    memory = own_state(wire)["memory"]
    return {
        "digest": digest(ddp),
        "losses": [losses[0], losses[-1]],
        "never_moved": torch.equal(never, before),
        "never_remembered": not memory["branches.2.weight"].any(),
        "others_remembered": bool(memory["branches.0.weight"].any()),
    }


def static_graph() -> dict[str, Any]:
    """DDP delays all hooks of the first backward to its end."""
    ddp = DistributedDataParallel(perceptron(), static_graph=True, bucket_cap_mb=0.01)
    optimizer = optimizer_of(ddp, lr=0.2)
    gradwire.attach(ddp, optimizer, LOSSY)
    losses = train(ddp, optimizer, range(60))
    return {
        "dense": _equal_training(perceptron, static_graph=True),
        "losses": [losses[0], losses[-1]],
        "digest": digest(ddp),
    }


def collective_in_backward(recipe: str) -> bool:
    """A user's all-reduces on the default group inside backward, one as large as the first bucket."""
    numel = sum(p.numel() for p in perceptron().parameters())
    results = []
    for ddp, _ in _twins(perceptron, recipe, bucket_cap_mb=0.01):
        # Twice, because the first backward has one bucket and the second has several.
        for step in range(2):
            inputs, targets = batch(step)
            hidden = ddp(inputs)
            for size in (numel, hidden.numel(), 64 * 64):
                hidden.register_hook(partial(_summed, size=size))
            ddp.zero_grad()
            nn.functional.mse_loss(hidden, targets).backward()
        results.append(gradients(ddp))
    plain, ours = results
    if recipe == "dense":
        return same(plain, ours)
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(plain, ours, strict=True))


def _summed(gradient: Tensor, size: int) -> Tensor:
    token = torch.full((size,), float(dist.get_rank() + 1))
    dist.all_reduce(token)
    assert bool((token == 3.0).all()), "somebody else's numbers"
    return gradient * token[0]


class Normalised(nn.Module):
    """BatchNorm's buffers are broadcast in every step, by DDP or under its backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.BatchNorm1d(64))
        self.head = nn.Linear(64, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.net(inputs)))


def _normalised() -> nn.Module:
    torch.manual_seed(0)
    return Normalised()


class _MeanOverRanks(torch.autograd.Function):
    """What SyncBatchNorm does: a collective in forward and one in backward, on the default group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x / dist.get_world_size()
        dist.all_reduce(out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        out = gradient / dist.get_world_size()
        dist.all_reduce(out)
        return out


class Synchronised(nn.Module):
    """Three layers, each normalised by statistics over all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 8)])

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
            inputs = inputs - _MeanOverRanks.apply(inputs.mean(0))
        return inputs


def _synchronised() -> nn.Module:
    torch.manual_seed(0)
    return Synchronised()


def learns(build: Callable[[], nn.Module], **options: Any) -> dict[str, Any]:
    """Sixty steps of a lossy recipe in small buckets."""
    ddp = DistributedDataParallel(build(), **{"bucket_cap_mb": 0.01, **options})
    optimizer = optimizer_of(ddp, lr=0.2)
    gradwire.attach(ddp, optimizer, LOSSY)
    losses = train(ddp, optimizer, range(60))
    return {"losses": [losses[0], losses[-1]], "digest": digest(ddp)}


def accumulation() -> bool:
    """Three micro-batches, two of them under `no_sync`: dense against DDP."""
    digests = set()
    for ddp, optimizer in _twins(perceptron, "dense"):
        for step in range(4):
            optimizer.zero_grad()
            with ddp.no_sync():
                for micro in range(2):
                    inputs, targets = batch(10 * step + micro)
                    nn.functional.mse_loss(ddp(inputs), targets).backward()
            inputs, targets = batch(10 * step + 9)
            nn.functional.mse_loss(ddp(inputs), targets).backward()
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
            optimizer.step()
        digests.add(digest(ddp))
    return len(digests) == 1


class Typed(nn.Module):
    """Layers of three types: DDP gives each its own buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.float32 = nn.Linear(32, 64)
        self.float64 = nn.Linear(64, 64, dtype=torch.float64)
        self.bfloat = nn.Linear(64, 64, dtype=torch.bfloat16)
        self.head = nn.Linear(64, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.float64(torch.tanh(self.float32(inputs)).double()))
        return self.head(torch.tanh(self.bfloat(hidden.bfloat16())).float())


def _typed() -> nn.Module:
    torch.manual_seed(0)
    return Typed()


class Tied(nn.Module):
    """Input and output share one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(32, 96)
        self.decode = nn.Linear(96, 32, bias=False)
        self.decode.weight = nn.Parameter(self.encode.weight.detach().t().contiguous())
        self.again = nn.Linear(96, 32, bias=False)
        self.again.weight = self.decode.weight
        self.head = nn.Linear(32, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.encode(inputs))
        return self.head(self.decode(hidden) + self.again(torch.tanh(hidden)))


def _tied() -> nn.Module:
    torch.manual_seed(0)
    return Tied()


def bucket_sizes() -> list[str]:
    """Fingerprints after ten steps with buckets from tiny to huge."""
    found = []
    for size_mb in (0.0001, 0.01, 25, 10_000):
        ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=size_mb)
        optimizer = optimizer_of(ddp)
        gradwire.attach(ddp, optimizer, LOSSY)
        train(ddp, optimizer, range(10))
        found.append(digest(ddp))
    return found


class Checkpointed(nn.Module):
    """Three blocks whose activations are computed again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 64)])
        self.head = nn.Linear(64, 8)
        self.reentrant = reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.requires_grad_()
        for block in self.blocks:
            inputs = torch.tanh(checkpoint(block, inputs, use_reentrant=self.reentrant))
        return self.head(inputs)


def _checkpointed(reentrant: bool) -> nn.Module:
    torch.manual_seed(0)
    return Checkpointed(reentrant)


def compiled() -> dict[str, Any]:
    """`torch.compile` around the attached module, without a C++ compiler in the way."""
    # torch's compiler refuses buckets below its own first one, 1 MB.
    ddp = DistributedDataParallel(perceptron())
    optimizer = optimizer_of(ddp, lr=0.2)
    gradwire.attach(ddp, optimizer, LOSSY)
    losses = train(torch.compile(ddp, backend="aot_eager"), optimizer, range(60))
    return {
        "losses": [losses[0], losses[-1]],
        "digest": digest(ddp),
        "eager": learns(perceptron)["losses"],
    }


def _held() -> dict[str, int]:
    """What a model must not leave behind in a process."""
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "groups": len(distributed_c10d._world.pg_map),
    }


def attached_again() -> dict[str, int]:
    """What is held after 24 models more than after two, each of which was trained and dropped."""
    recipes = (LOSSY, "allreduce(algorithm='ring')", "dense")  # the second has a thread for messages
    before: dict[str, int] = {}
    for number in range(26):
        if number == 2:
            before = _held()
        ddp = DistributedDataParallel(perceptron())
        optimizer = optimizer_of(ddp)
        wire = gradwire.attach(ddp, optimizer, recipes[number % 3])
        train(ddp, optimizer, range(1))
        if number % 2 == 0:
            wire.detach()
        if number % 4 == 0:
            ddp.itself = [ddp]  # until it is collected, which happens at different times
        del ddp, optimizer, wire
    deadline_s = time.monotonic() + 10  # threads that have ended are listed a little longer
    while any(count > before[name] for name, count in _held().items()) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return {name: max(count - before[name], 0) for name, count in _held().items()}


def kept_by_one_rank() -> dict[str, Any]:
    """The groups of three models in turn, of which rank 1 drops the first only with the second."""
    kept, groups, digests = [], [], []
    for number in range(3):
        ddp = DistributedDataParallel(perceptron(number))
        optimizer = optimizer_of(ddp)
        wire = gradwire.attach(ddp, optimizer, LOSSY)
        train(ddp, optimizer, range(3))
        groups.append(wire.attached.backward.reducer.comm.group.group_name)
        digests.append(digest(ddp))
        kept = [ddp] if number == 0 and dist.get_rank() == 1 else []
        del ddp, optimizer, wire
    return {"groups": groups, "digests": digests, "kept": len(kept)}


def _convolutional() -> nn.Module:
    torch.manual_seed(0)
    inner = (nn.Conv2d(2, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 4, 3, padding=1))
    return nn.Sequential(nn.Unflatten(1, (2, 4, 4)), *inner, nn.Flatten(), nn.Linear(64, 8))


def memory_format(recipe: str, when: str, **options: Any) -> dict[str, Any]:
    """`channels_last` at some time: what is raised, and whether training is the same as without.

    All is sent, so that it is DDP's; only sums in other orders may differ.
    """
    errors: list[str] = []
    results = []
    for changes in (False, True):
        model = _convolutional()
        if changes and when == "before ddp":
            model.to(memory_format=torch.channels_last)
        wrapped = model if "replicas" in options else DistributedDataParallel(model, **options)
        if changes and when == "before attach":
            model.to(memory_format=torch.channels_last)
        optimizer = optimizer_of(model)
        over = {"replicas": dist.group.WORLD} if "replicas" in options else {}
        gradwire.attach(wrapped, optimizer, recipe, policy=lambda _: None, **over)
        try:
            train(wrapped, optimizer, range(2))  # type: ignore[arg-type]
            optimizer.zero_grad()
            if changes and when in ("later", f"later on rank {dist.get_rank()}"):
                model.to(memory_format=torch.channels_last)
            train(wrapped, optimizer, range(2, 5))  # type: ignore[arg-type]
        except (gradwire.GradwireError, ValueError) as error:
            errors.append(f"{type(error).__name__}: {error}")
        results.append([each.detach().clone() for each in model.parameters()])
        dist.barrier()  # a rank that has ended would break the other's step
    if when.startswith("later on rank"):
        lose_groups()
    plain, ours = results
    return {
        "errors": errors,
        "same": all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(plain, ours, strict=True)),
    }


_ALL = "topk(ratio=1.0)"

SCENES: dict[str, Callable[[], Any]] = {
    "memory format, before ddp": partial(memory_format, "dense", "before ddp"),
    "memory format, in finer buckets": partial(memory_format, _ALL, "before attach"),
    "memory format, plain": partial(memory_format, "dense", "later", replicas=True),
    "memory format, plain, all sent": partial(memory_format, _ALL, "later", replicas=True),
    "two ranks, dense": partial(_equal_training, perceptron),
    "bucket views, dense": partial(_equal_training, perceptron, gradient_as_bucket_view=True),
    "small buckets, dense": partial(_equal_training, perceptron, bucket_cap_mb=0.01),
    "unused, dense": unused_dense,
    "unused, lossy": unused_lossy,
    "static graph": static_graph,
    "collective in backward, dense": partial(collective_in_backward, "dense"),
    "collective in backward, lossy": partial(collective_in_backward, "topk(ratio=1.0)"),
    "batch norm, dense": partial(_equal_training, _normalised),
    "batch norm, lossy": partial(learns, _normalised),
    "synchronised, dense": partial(_equal_training, _synchronised, bucket_cap_mb=0.01),
    "synchronised, lossy": partial(learns, _synchronised),
    "accumulation": accumulation,
    "types, dense": partial(_equal_training, _typed),
    "types, lossy": partial(learns, _typed),
    "tied, dense": partial(_equal_training, _tied),
    "tied, lossy": partial(learns, _tied),
    "bucket sizes": bucket_sizes,
    "checkpoint, dense": partial(_equal_training, partial(_checkpointed, False)),
    "checkpoint, lossy": partial(learns, partial(_checkpointed, False)),
    "reentrant checkpoint, dense": partial(_equal_training, partial(_checkpointed, True), bucket_cap_mb=0.01),
    "reentrant checkpoint, lossy": partial(learns, partial(_checkpointed, True)),
    "compiled": compiled,
    "attached again": attached_again,
    "kept by one rank": kept_by_one_rank,
    # Steps that broke off keep their process groups: after all that counts those.
    "memory format, before attach": partial(memory_format, "dense", "before attach"),
    "memory format, before attach, views": partial(
        memory_format, "dense", "before attach", gradient_as_bucket_view=True
    ),
    "memory format, later": partial(memory_format, "dense", "later"),
    "memory format, later, finer": partial(memory_format, _ALL, "later"),
    "memory format, later on one rank": partial(memory_format, "dense", "later on rank 1"),
}

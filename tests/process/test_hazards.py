"""Real gloo ranks: what hides on threads, from unused parameters to collectives of the user's own."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradwire
from tests.support.models import batch, digest, gradients, optimizer_of, perceptron, same, train
from tests.support.states import own_state
from tests.support.tiers import rest
from tests.support.world import Ranks, lose_groups

pytestmark = pytest.mark.process


LOSSY, ALL = "leader_topk(ratio=0.05)", "topk(ratio=1.0)"


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


def trains_alike(build: Callable[[], nn.Module], recipe: str = "dense", **options: Any) -> bool:
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


def branches() -> nn.Module:
    torch.manual_seed(0)
    return Branches()


@dataclass(frozen=True)
class Learned:
    """The first and the last loss, and the parameters."""

    first: float
    last: float
    digest: str


@dataclass(frozen=True)
class Unused(Learned):
    """Of a model with a branch that no rank uses."""

    never_moved: bool
    remembered: dict[str, bool]
    """By parameter, whether something is."""


def unused() -> Unused:
    """With a memory."""
    model = branches()
    never = model.branches[2].weight
    before = never.detach().clone()
    ddp = DistributedDataParallel(model, find_unused_parameters=True, bucket_cap_mb=0.01)
    optimizer = optimizer_of(ddp, lr=0.2)
    wire = gradwire.attach(ddp, optimizer, LOSSY)
    losses = train(ddp, optimizer, range(60))
    memory = own_state(wire)["memory"]
    names = [name for name in memory if name.startswith("branches") and name.endswith("weight")]
    remembered = {name: bool(memory[name].any()) for name in names}
    return Unused(losses[0], losses[-1], digest(ddp), torch.equal(never, before), remembered)


def static_graph() -> Learned:
    """DDP delays all hooks of the first backward to its end."""
    return learns(perceptron, static_graph=True)


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


def normalised() -> nn.Module:
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


def synchronised() -> nn.Module:
    torch.manual_seed(0)
    return Synchronised()


def learns(build: Callable[[], nn.Module], *, compiles: bool = False, **options: Any) -> Learned:
    """Sixty steps of a lossy recipe in small buckets."""
    ddp = DistributedDataParallel(build(), **{"bucket_cap_mb": 0.01, **options})
    optimizer = optimizer_of(ddp, lr=0.2)
    gradwire.attach(ddp, optimizer, LOSSY)
    losses = train(torch.compile(ddp, backend="aot_eager") if compiles else ddp, optimizer, range(60))
    return Learned(losses[0], losses[-1], digest(ddp))


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


def typed() -> nn.Module:
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


def tied() -> nn.Module:
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


def checkpointed(reentrant: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Checkpointed(reentrant)


def compiled() -> Learned:
    """`torch.compile` around the attached module, without a C++ compiler in the way."""
    # torch's compiler refuses buckets below its own first one, 1 MB.
    return learns(perceptron, compiles=True, bucket_cap_mb=25)


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


@dataclass(frozen=True)
class Lent:
    """Three models in turn: their groups, and what became of them."""

    groups: list[str]
    digests: list[str]


def kept_by_one_rank() -> Lent:
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
    del kept
    return Lent(groups, digests)


def _convolutional() -> nn.Module:
    torch.manual_seed(0)
    inner = (nn.Conv2d(2, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 4, 3, padding=1))
    return nn.Sequential(nn.Unflatten(1, (2, 4, 4)), *inner, nn.Flatten(), nn.Linear(64, 8))


@dataclass(frozen=True)
class Formatted:
    """What is raised, and whether training is the same as without."""

    errors: list[str]
    same: bool


def memory_format(recipe: str, when: str, **options: Any) -> Formatted:
    """`channels_last` at some time. All is sent, as by DDP; only sums in other orders may differ."""
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
    alike = all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(plain, ours, strict=True))
    return Formatted(errors, alike)


ALIKE: list[tuple[Callable[[], nn.Module], dict[str, Any]]] = [
    (perceptron, {}),
    (perceptron, {"gradient_as_bucket_view": True}),
    (perceptron, {"bucket_cap_mb": 0.01}),
    (perceptron, {"static_graph": True}),
    (branches, {"find_unused_parameters": True}),
    (normalised, {}),
    (synchronised, {"bucket_cap_mb": 0.01}),
    (typed, {}),
    (tied, {}),
    (checkpointed, {}),
    (partial(checkpointed, reentrant=True), {"bucket_cap_mb": 0.01}),
]
"""Models, and options of DDP."""


@pytest.mark.parametrize(("build", "options"), ALIKE)
def test_dense_gives_the_values_of_plain_ddp(
    two: Ranks, build: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    assert two(trains_alike, build, **options) == [True, True]


LEARNING = [
    *(partial(learns, build) for build in (normalised, synchronised, typed, tied, checkpointed)),
    partial(learns, partial(checkpointed, reentrant=True)),
    *(unused, static_graph, compiled),
]


@pytest.mark.parametrize("scene", rest(LEARNING, but=LEARNING[-3:]))
def test_a_lossy_recipe_learns_and_its_replicas_are_identical(
    two: Ranks, scene: Callable[[], Learned]
) -> None:
    found = two(scene)
    assert len({each.digest for each in found}) == 1
    assert all(each.last < 0.8 * each.first for each in found)


@pytest.mark.parametrize(
    ("recipe", "when", "options"),
    [
        ("dense", "before ddp", {}),
        (ALL, "before attach", {}),
        ("dense", "later", {"replicas": True}),
        (ALL, "later", {"replicas": True}),
    ],
)
def test_a_memory_format_that_changes_no_bucket_changes_no_training(
    two: Ranks, recipe: str, when: str, options: dict[str, Any]
) -> None:
    assert two(memory_format, recipe, when, **options) == [Formatted([], same=True)] * 2


@pytest.mark.parametrize("views", [False, True])
def test_buckets_built_for_another_memory_format_are_refused_on_all_ranks(two: Ranks, views: bool) -> None:
    for found in two(memory_format, "dense", "before attach", gradient_as_bucket_view=views):
        [error] = found.errors
        assert error.startswith("ValueError: the memory format of '")
        assert "before wrapping the model" in error


@pytest.mark.parametrize("recipe", ["dense", ALL])
def test_a_memory_format_that_changes_under_ddp_is_refused(two: Ranks, recipe: str) -> None:
    for found in two(memory_format, recipe, "later"):
        [error] = found.errors
        assert error.startswith("ValueError: parameters of this model have changed since attach: ")
        assert " has strides (" in error


def test_a_memory_format_that_changes_on_one_rank_is_heard_of_on_all(two: Ranks) -> None:
    (one,), (other,) = (found.errors for found in two(memory_format, "dense", "later on rank 1"))
    assert one.startswith("RanksDisagree")
    assert "a forward pass that it refuses" in one
    assert other.startswith("ValueError: parameters of this model have changed since attach")


def test_a_branch_that_nobody_uses_is_neither_moved_nor_remembered(two: Ranks) -> None:
    for found in two(unused):
        assert found.never_moved
        assert found.remembered == {
            "branches.0.weight": True,
            "branches.1.weight": True,
            "branches.2.weight": False,
        }


@pytest.mark.parametrize("recipe", ["dense", ALL])
def test_a_collective_of_the_user_inside_backward_changes_no_value(two: Ranks, recipe: str) -> None:
    assert two(collective_in_backward, recipe) == [True, True]


def test_accumulation_under_no_sync_with_clipping_equals_plain_ddp(two: Ranks) -> None:
    assert two(accumulation) == [True, True]


def test_bucket_sizes_change_no_number(two: Ranks) -> None:
    for found in two(bucket_sizes):
        assert len(set(found)) == 1


def test_a_compiled_module_trains_as_the_eager_one(two: Ranks) -> None:
    for found, eager in zip(two(compiled), two(learns, perceptron), strict=True):
        # Compiled and eager kernels may round differently, sixty steps long.
        assert (found.first, found.last) == pytest.approx((eager.first, eager.last), rel=1e-3)


def test_models_that_come_and_go_leave_nothing_behind(two: Ranks) -> None:
    assert two(attached_again) == 2 * [{"descriptors": 0, "threads": 0, "groups": 0}]


def test_a_group_is_lent_again_once_every_rank_has_dropped_its_model(two: Ranks) -> None:
    one, other = two(kept_by_one_rank)
    assert one == other
    first, second, third = one.groups
    assert first != second, "rank 1 still had the first model"
    assert third == first

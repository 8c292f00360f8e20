"""Real gloo ranks: a module that nothing wraps trains as under DDP, and its loops are free to do more."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradwire
from tests.support.models import SHAPE, batch, digest, gradients, optimizer_of, perceptron, same
from tests.support.states import own_state
from tests.support.world import Ranks

pytestmark = pytest.mark.process


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


@dataclass(frozen=True)
class Switched:
    """By step, in how many places gradients lie; whether they are close to DDP's."""

    buckets: list[int]
    close: bool


def switched_within_accumulation() -> Switched:
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
    return Switched(buckets, close)


@dataclass(frozen=True)
class Beside:
    """A run, and whether its parameters and buffers are those under DDP."""

    as_ddp: bool
    digest: str
    steps: int
    buffers: list[float]
    """The sum of each."""


def beside_ddp(loop: Loop, recipe: str, build: Callable[[], nn.Module]) -> Beside:
    """Parameters and buffers of both after the loop, from rank 0's first values."""
    model = build()
    optimizer = optimizer_of(model)
    wire = gradwire.attach(model, optimizer, recipe, replicas=dist.group.WORLD)
    ddp = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=build is branched)
    theirs = optimizer_of(ddp)
    gradwire.attach(ddp, theirs, recipe)
    loop(model, optimizer, wire.no_sync)
    loop(ddp, theirs, ddp.no_sync)
    as_ddp = same(list(model.state_dict().values()), list(ddp.module.state_dict().values()))
    buffers = [float(each.double().sum()) for each in model.buffers()]
    return Beside(as_ddp, digest(model), wire.report().step, buffers)


def unused() -> tuple[float, float]:
    """The sums of magnitudes that the optimizer finds where some and where all ranks have no gradient."""
    model = branched()
    gradwire.attach(model, recipe="dense", replicas=dist.group.WORLD)
    assert isinstance(model, Branched)
    loss_of(model, 0).backward()
    some, never = model.some.weight.grad, model.never.weight.grad
    assert some is not None
    assert never is not None
    return some.abs().sum().item(), never.abs().sum().item()


@dataclass(frozen=True)
class Checkpointed:
    """The digest of a run, and that of one without checkpoints."""

    digest: str
    plain: str
    steps: int


def checkpointed(reentrant: bool, recipe: str) -> Checkpointed:
    digests = []
    for again in (None, reentrant):
        model = branched(again).eval()  # BatchNorm would count twice
        optimizer = optimizer_of(model)
        wire = gradwire.attach(model, optimizer, recipe, replicas=dist.group.WORLD)
        six(model, optimizer, nullcontext)
        digests.append(digest(model))
    plain, found = digests
    return Checkpointed(found, plain, wire.report().step)


def twice_through() -> tuple[bool, int]:
    """Two forward passes before one backward pass; gradients of something else are asked for in between.
    Whether gradients are the mean, and the number of steps.
    """
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
    return same(gradients(model), mean), wire.report().step


@dataclass(frozen=True)
class Poisoned:
    """Gradients and memory after a NaN on one rank, and the end of the run."""

    all_nan: bool
    memory_kept: bool
    steps: int
    digest: str


def poisoned() -> Poisoned:
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
    return Poisoned(all_nan, kept, wire.report().step, digest(model))


def through_and_resumed() -> list[str]:
    """Digests of a run through, and of one with a break in the middle."""
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
    return digests


@dataclass(frozen=True)
class Ended:
    """A run's parameters and recipe, and the sum of magnitudes that came late."""

    digest: str
    recipe: str
    late: float = 0.0


def flushed() -> Ended:
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
    return Ended(digest(model), wire.report().recipe, late)


def adaptive() -> Ended:
    """Dense steps that measure, steps taken apart among them, and what follows."""
    model = branched()
    optimizer = optimizer_of(model)
    wire = gradwire.attach(model, optimizer, "auto", replicas=dist.group.WORLD)
    for _ in range(5):
        six(model, optimizer, nullcontext)
    return Ended(digest(model), wire.report().recipe)


@dataclass(frozen=True)
class Copied:
    """Steps of a model, and hooks on its copy."""

    steps: int
    hooks: int


def copied() -> Copied:
    """A copy is a plain module: one rank alone can train it."""
    model = perceptron()
    wire = gradwire.attach(model, recipe="dense", replicas=dist.group.WORLD)
    other = copy.deepcopy(model)
    if dist.get_rank() == 0:
        loss_of(other, 0).backward()
    loss_of(model, 0).backward()
    return Copied(wire.report().step, len(other._forward_hooks) + len(other._forward_pre_hooks))


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


@dataclass(frozen=True)
class Loaded:
    """A run in which values were loaded, and whether it ends as DDP in plain torch."""

    as_ddp: bool
    digest: str


def loading(kind: str, recipe: str) -> Loaded:
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
    return Loaded(same(mine, theirs), digest(module))


def loading_by_one(guard_every: int) -> tuple[str, str]:
    """Only rank 0 loads, which parts replicas under plain DDP, too: a guard's error, and a digest."""
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
    return raised, digest(model)


BESIDE: dict[str, tuple[Loop, str, Callable[[], nn.Module], int]] = {
    "beside ddp, dense": (six, "dense", branched, 6),
    "beside ddp, topk(ratio=0.1)": (six, LOSSY, branched, 6),
    "beside ddp, int8": (six, "int8", branched, 6),
    "beside ddp, kept": (keeping, LOSSY, perceptron, 4),
    "beside ddp, accumulating": (accumulating, LOSSY, perceptron, 3),
    "beside ddp, sending each": (partial(accumulating, silent=0), "dense", perceptron, 5),
}
"""Loop, recipe, model and number of steps; several exchanges before an optimizer steps are one."""


@pytest.mark.parametrize("case", BESIDE)
def test_parameters_and_buffers_are_those_of_ddp_bit_for_bit(two: Ranks, case: str) -> None:
    # Zero tolerance: two addends commute, and what codecs see does not depend on buckets.
    *how, steps = BESIDE[case]
    one, other = two(beside_ddp, *how)
    assert one.as_ddp
    assert other.as_ddp
    assert one.digest == other.digest
    assert one.steps == steps


def test_what_adds_up_in_old_buckets_is_sent_in_those_of_a_recipe_switched_to(two: Ranks) -> None:
    for found in two(switched_within_accumulation):
        assert found.close
        assert [number > 1 for number in found.buckets] == [False, True, False]


@pytest.mark.parametrize("recipe", ["dense", "int4", "topk(0.05)"])
@pytest.mark.parametrize("kind", ["ddp", "plain"])
def test_what_all_ranks_load_between_two_steps_is_trained_on(two: Ranks, kind: str, recipe: str) -> None:
    one, other = two(loading, kind, recipe)
    assert one.digest == other.digest
    assert one.as_ddp == other.as_ddp == (recipe == "dense")


def test_what_one_rank_loads_parts_replicas_and_a_guard_says_so(two: Ranks) -> None:
    (raised, one), (also_raised, other) = two(loading_by_one, guard_every=0)
    assert raised == also_raised == ""
    assert one != other
    for raised, _digest in two(loading_by_one, guard_every=1):
        assert raised.startswith("parameters differ between ranks before step 2")


def test_buffers_are_rank_0s(two: Ranks) -> None:
    one, other = two(beside_ddp, six, "dense", branched)
    assert len(one.buffers) == 3
    assert one.buffers == other.buffers


def test_all_ranks_get_the_mean_where_some_or_all_have_no_gradient(two: Ranks) -> None:
    (some, never), other = two(unused)
    assert (some, never) == other
    assert some > 0
    assert never == 0


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_either_kind_change_nothing(two: Ranks, reentrant: bool) -> None:
    for found in two(checkpointed, reentrant, LOSSY):
        assert found.digest == found.plain
        assert found.steps == 6


def test_a_backward_pass_is_one_step_whatever_was_run_before_it(two: Ranks) -> None:
    assert two(twice_through) == [(True, 1)] * 2


def test_a_nan_on_one_rank_stops_the_step_on_both(two: Ranks) -> None:
    one, other = two(poisoned)
    assert one == other == Poisoned(all_nan=True, memory_kept=True, steps=12, digest=one.digest)


def test_a_run_resumes_bit_for_bit(two: Ranks) -> None:
    for through, resumed in two(through_and_resumed):
        assert resumed == through


def test_flush_and_detach(two: Ranks) -> None:
    one, other = two(flushed)
    assert one == other
    assert one.late > 0
    assert one.recipe == "dense"


def test_auto_measures_and_decides(two: Ranks) -> None:
    one, other = two(adaptive)
    assert one == other
    assert "measuring" not in one.recipe


def test_a_copy_sends_nothing(two: Ranks) -> None:
    assert two(copied) == [Copied(steps=1, hooks=0)] * 2


@pytest.mark.parametrize("keeps_parameters", [False, True])
def test_a_model_that_nobody_holds_frees_its_memory(two: Ranks, keeps_parameters: bool) -> None:
    assert two(forgotten, keeps_parameters=keeps_parameters) == [True, True]


REFUSED = {
    "bare": "wrap it in DistributedDataParallel first, or pass replicas=",
    "twice": "over ranks [0, 1]: for another recipe, call wire.switch(recipe)",
    "under ddp": "would exchange its gradients a second time",
    "ddp": "has its own process group",
    "around ddp": "'0' inside this module is wrapped in DistributedDataParallel",
    "mesh": "a mesh of 2 dimensions: pass one of them",
    "group": "got 'world'",
}


def test_what_cannot_be_is_refused_with_what_to_do(two: Ranks) -> None:
    for found in two(refused):
        assert [name for name in REFUSED if REFUSED[name] not in found[name]] == [], found

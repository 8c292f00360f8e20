"""Real gloo ranks: uneven inputs, loss scales, accumulation, flush and detach."""

from __future__ import annotations

import gc
import time
import warnings
import weakref
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.memory import UNSENT
from gradwire.recipes.base import REGISTRY
from tests.support.models import batch, digest, gradients, optimizer_of, perceptron, same, train
from tests.support.states import own_state
from tests.support.tiers import rest
from tests.support.world import Ranks

pytestmark = pytest.mark.process


LOSSY = "leader_topk(ratio=0.05)"


def _attached(
    recipe: str = LOSSY, lr: float = 0.05, scaler: torch.amp.GradScaler | None = None, **options: Any
) -> tuple[DistributedDataParallel, torch.optim.Optimizer, gradwire.Wire]:
    ddp = DistributedDataParallel(perceptron(), **options)
    optimizer = optimizer_of(ddp, lr)
    return ddp, optimizer, gradwire.attach(ddp, optimizer, recipe, scaler=scaler)


@dataclass(frozen=True)
class Joined:
    """A rank's parameters and step at the end, and its memory since it had no batch left."""

    digest: str
    step: int | None
    memory_kept: bool
    remembers: bool


def uneven(recipe: str | None, batches: tuple[int, ...], bucket_cap_mb: float | None = 0.01) -> Joined:
    """`join()` with another number of batches on each rank; `None` is plain DDP."""
    ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=bucket_cap_mb)
    optimizer = optimizer_of(ddp)
    wire = None if recipe is None else gradwire.attach(ddp, optimizer, recipe)
    with ddp.join():
        train(ddp, optimizer, range(batches[dist.get_rank()]))
        finished = own_state(wire) if wire else {}
    after = own_state(wire) if wire else {}
    kept = finished.get("memory", {})
    memory_kept = all(torch.equal(kept[name], after["memory"][name]) for name in kept)
    remembers = any(bool(memory.any()) for memory in kept.values())
    return Joined(digest(ddp), after.get("step"), memory_kept, remembers)


def decided_without_it(batches: tuple[int, ...]) -> Joined:
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


@dataclass(frozen=True)
class Scaled:
    """By step, the loss scale, and whether the memory stayed and parameters moved; warnings."""

    scales: list[float]
    kept: list[bool]
    moved: list[bool]
    first_loss: float
    last_loss: float
    digest: str
    warnings: list[str]


def overflow(recipe: str) -> Scaled:
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
    said = [str(each.message) for each in caught if "micro-batch" in str(each.message)]
    return Scaled(scales, kept, moved, losses[0], losses[-1], digest(ddp), said)


def autocast_without_scaler(dtype: torch.dtype) -> str:
    """What the first forward pass raises, if anything."""
    ddp, _, _ = _attached()
    try:
        with torch.autocast("cpu", dtype):
            ddp(batch(0)[0])
    except ValueError as error:
        return str(error)
    return ""


def accumulation(recipe: str, *, no_sync: bool = False) -> list[str]:
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


def clipping() -> tuple[list[float], str]:
    """Norms that `clip_grad_norm_` sees, and a digest."""
    ddp, optimizer, _ = _attached()
    norms = []
    for step in range(10):
        inputs, targets = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(inputs), targets).backward()
        norms.append(float(nn.utils.clip_grad_norm_(ddp.parameters(), 0.01)))
        optimizer.step()
    return norms, digest(ddp)


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


@dataclass(frozen=True)
class Flushed:
    """Whether something is unsent before and after, and all gradients are close to plain DDP's."""

    waits_before: bool
    waits_after: bool
    close: bool


def flush(recipe: str) -> Flushed:
    """What was sent late is handed over in the end: sums over twenty steps against plain DDP."""
    ddp, _, wire = _attached(recipe)
    sent = _total(ddp, range(20), None)
    before = _waits(wire)
    flushed = _total(ddp, range(0), wire)
    ours = [a + b for a, b in zip(sent, flushed, strict=True)]
    plain = _total(DistributedDataParallel(perceptron()), range(20), None)
    close = all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(ours, plain, strict=True))
    return Flushed(before, _waits(wire), close)


def _waits(wire: gradwire.Wire) -> bool:
    return any(bool(memory.any()) for memory in own_state(wire)["memory"].values())


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


@dataclass(frozen=True)
class Detached:
    """A run after `detach`, and whether it is close to plain DDP's."""

    close: bool
    digest: str
    memory_bytes: float
    recipe: str


def detach(policy: dict[str, str] | None) -> Detached:
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
    close = all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in pairs)
    return Detached(close, digest(ddp), wire.report().memory_bytes, wire.report().recipe)


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


UNEVEN, ONE_BATCH, NO_BATCH = (4, 7, 2), (1, 5, 3), (3, 0, 2)
"""Batches, by rank."""


@pytest.mark.parametrize("batches", [UNEVEN, ONE_BATCH, NO_BATCH])
def test_join_with_uneven_inputs_gives_what_plain_ddp_gives(three: Ranks, batches: tuple[int, ...]) -> None:
    plain, ours = three(uneven, None, batches), three(uneven, "dense", batches)
    assert {each.digest for each in ours} == {each.digest for each in plain}


@pytest.mark.parametrize(
    ("recipe", "batches"),
    [*((LOSSY, each) for each in (UNEVEN, ONE_BATCH, NO_BATCH)), ("covap(interval=2)", UNEVEN)],
)
def test_a_finished_rank_keeps_its_memory_and_its_replica_in_step(
    three: Ranks, recipe: str, batches: tuple[int, ...]
) -> None:
    found = three(uneven, recipe, batches)
    assert all(each.memory_kept for each in found)
    assert any(each.remembers for each in found)
    assert len({each.digest for each in found}) == 1
    assert len({each.step for each in found}) == 1, "finished ranks count the others' steps"


def test_a_recipe_may_decide_when_a_rank_has_finished(three: Ranks) -> None:
    found = three(decided_without_it, (9, 2, 8))
    assert len({each.digest for each in found}) == 1
    assert [each.step for each in found] == [9, 9, 9]


def test_join_that_divides_by_what_is_left_is_refused(three: Ranks) -> None:
    assert all("divide_by_initial_world_size" in text for text in three(initial_world_size))


@pytest.mark.parametrize("recipe", rest([LOSSY, "dense"], but=[LOSSY]))
def test_an_overflow_on_one_rank_is_skipped_by_every_scaler(three: Ranks, recipe: str) -> None:
    found = three(overflow, recipe)
    for each in found:
        assert each.scales == found[0].scales
        assert each.scales[10] == each.scales[9] / 2, "the overflow"
        assert each.scales[9] > each.scales[0], "scales had changed before"
        assert not each.moved[10]
        assert each.moved[9]
        assert each.moved[11]
        assert each.last_loss < 0.5 * each.first_loss
        assert each.warnings == []
    assert len({each.digest for each in found}) == 1


def test_an_overflow_leaves_the_memory_as_it_was(three: Ranks) -> None:
    for each in three(overflow, LOSSY):
        assert each.kept[10]
        assert not each.kept[9]
        assert not each.kept[11]


def test_float16_autocast_without_a_scaler_is_refused_at_the_first_step(three: Ranks) -> None:
    assert all("scaler=" in text for text in three(autocast_without_scaler, torch.float16))
    assert three(autocast_without_scaler, torch.bfloat16) == ["", "", ""]


def test_accumulation_without_no_sync_warns_once(three: Ranks) -> None:
    for texts in three(accumulation, LOSSY):
        (text,) = texts
        assert text.startswith("2 backward passes")
        assert "no_sync" in text


def test_who_does_not_compress_micro_batches_is_not_warned(three: Ranks) -> None:
    assert three(accumulation, LOSSY, no_sync=True) == [[], [], []]
    assert three(accumulation, "dense") == [[], [], []]
    assert three(resumed_without_warning) == [[], [], []]


def test_clipping_sees_the_same_norm_on_all_ranks(three: Ranks) -> None:
    found = three(clipping)
    assert all(each == found[0] for each in found)


def test_flush_hands_over_exactly_what_was_left_behind(three: Ranks) -> None:
    for recipe in (LOSSY, "scalecom(rate=10, beta=0.25, warmup_steps=0)"):  # whose memory is low-pass
        for found in three(flush, recipe):
            assert found.waits_before
            assert not found.waits_after
            assert found.close
    assert three(flush_with_scaler) == [True, True, True]


@pytest.mark.parametrize("policy", [None, {"*.bias": "topk(ratio=0.5)"}])
def test_after_detach_it_is_plain_ddp(three: Ranks, policy: dict[str, str] | None) -> None:
    found = three(detach, policy)
    assert all(each == found[0] for each in found)
    assert found[0].close
    assert found[0].memory_bytes == 0
    assert found[0].recipe == "dense"


def test_a_recipe_after_detach_goes_by_the_policy(three: Ranks) -> None:
    for before, detached, after in three(policy_after_detach):
        assert detached == []
        assert before
        assert after == before


def test_exchanging_after_backward_changes_no_number(three: Ranks) -> None:
    assert three(overlap_off) == [True, True, True]


@pytest.mark.parametrize("hooked", [False, True])
def test_a_model_that_nobody_holds_frees_its_memory(three: Ranks, hooked: bool) -> None:
    assert three(forgotten, hooked=hooked) == [True, True, True]

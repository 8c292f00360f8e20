"""Real gloo ranks: a step that is left out is recognised however a model is called and an optimizer made."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.errors import GradwireError
from tests.support.called import CASES, SAM, Run, Task, backward, call, ended, optimizer_around, told, wrapped
from tests.support.models import digest, perceptron
from tests.support.tiers import rest
from tests.support.world import Ranks

pytestmark = pytest.mark.process

STEPS, BAD = 8, 4
RECIPES = ("dense", "topk(ratio=0.05)")
WITH_BOTH = [
    *("model(x)", "model.forward(x)", "an object", "a namespace", "none", "slots"),
    *("lookahead", "lookahead without hooks", "around a copy"),
]
"""Cases that run with both recipes, the others with the last one."""
CALLED = [
    (case, recipe, source)
    for case in CASES
    for recipe in (RECIPES if case in WITH_BOTH else RECIPES[-1:])
    for source in ("ddp", "plain")
]


def left_out(name: str, recipe: str | None, source: str, *, leaves: bool) -> Run:
    """Train in the case of that name with a bad batch that is left out, or never was. Without a recipe: DDP
    alone.
    """
    case = CASES[name]
    torch.manual_seed(0)
    model, replicas = wrapped(
        Task(case.form, frozen=case.frozen, checkpointed=case.checkpointed),
        source,
        bucket_cap_mb=25 if case.compiled else 0.01,  # torch's compiler refuses small ones
        gradient_as_bucket_view=case.views,
    )
    given = [p for p in model.parameters() if p.requires_grad]
    parts = [[each] for each in given] if case.by_part else [given]
    optimizers = [optimizer_around(case.around, part) for part in parts]
    with told() as lines:
        wire = None if recipe is None else gradwire.attach(model, optimizers, recipe, **replicas)
        called = torch.compile(model, backend="eager") if case.compiled else model
        quiet: Any = nullcontext if not case.accumulates else wire.no_sync if wire else model.no_sync
        for number in range(STEPS):
            if number == BAD and not leaves:
                continue
            for optimizer in optimizers:
                optimizer.zero_grad()
            factor = 100.0 if number == BAD else 1.0
            if case.accumulates:
                with quiet():
                    case.call(called, number + 50, 1.0).backward()
            case.call(called, number, factor).backward()
            for optimizer in optimizers:
                if number == BAD:
                    case.leave(model, optimizer, wire)
                else:
                    getattr(optimizer, "update", optimizer.step)()
    return ended(model, wire, lines)


@pytest.mark.parametrize("called", rest(CALLED, but=CALLED[::12]))
def test_a_step_that_is_left_out_is_recognised_however_the_model_is_called(
    two: Ranks, called: tuple[str, str, str]
) -> None:
    case, recipe, source = called
    like = CASES[case].like or case
    never = two(left_out, like, recipe, source, leaves=False)
    found = two(left_out, case, recipe, source, leaves=True)
    assert [each.end for each in found] == [each.end for each in never], "bit for bit, and in the same step"
    assert [each.dropped for each in found] == [1, 1]
    if recipe == "dense":
        plain = two(left_out, like, None, "ddp", leaves=True)
        assert [each.digest for each in found] == [each.digest for each in plain]
    (line,), nothing = (
        [line for line in each.said if line not in other.said]
        for each, other in zip(found, never, strict=True)
    )
    assert "left out" in line
    assert nothing == []
    assert not any("no_sync" in line for each in found for line in each.said)


class _Left(Exception):
    """A hook of the user's leaves a step out."""


def reported_inside(source: str, *, reads: bool, passes: int) -> Run:
    """Steps of so many backward passes each, one of which a hook leaves out. On rank 0 another hook reads the
    report before.
    """
    torch.manual_seed(0)
    model = perceptron()
    model = fully_shard(model) if source == "fsdp2" else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    leaves = [False]

    def hook(*_: object) -> None:
        if reads and torch.distributed.get_rank() == 0:
            wire.report()
        if leaves[0]:
            raise _Left

    optimizer.register_step_pre_hook(hook)
    with told() as lines:
        wire = gradwire.attach(model, optimizer, "int4" if source == "fsdp2" else "topk(ratio=0.05)")
        for number in range(STEPS):
            optimizer.zero_grad()
            for part in range(passes):
                backward(model, 10 * number + part)
            leaves[0] = number == BAD
            with suppress(_Left):
                optimizer.step()
    return ended(model, wire, lines)


@pytest.mark.parametrize("passes", [1, pytest.param(2, marks=pytest.mark.rest)])
@pytest.mark.parametrize("source", ["ddp", pytest.param("fsdp2", marks=pytest.mark.rest)])
def test_a_report_that_is_read_in_a_step_that_is_left_out_changes_nothing(
    two: Ranks, source: str, passes: int
) -> None:
    """It took the exchange for final: the rank that read it went on with another memory and another count."""
    quiet, read = (two(reported_inside, source, reads=reads, passes=passes) for reads in (False, True))
    assert [each.end for each in read] == [each.end for each in quiet], "bit for bit, and in the same step"
    assert [each.dropped for each in read] == [each.dropped for each in quiet]


RESTING = "local_every(interval=2)"
"""Brings zeros in every second step."""


def by_halves(recipe: str | None, source: str, form: str, *, gives_inner: bool = False) -> Run:
    """Forty steps in two halves; what was said of steps that were left out is expected."""
    torch.manual_seed(0)
    model, replicas = wrapped(Task(form), source)
    sam = SAM(list(model.parameters()))
    with told() as lines:
        given = sam.base if gives_inner else sam
        wire = None if recipe is None else gradwire.attach(model, given, recipe, **replicas)
        for number in range(40):
            call(model, number, 1.0).backward()
            sam.first_step()
            call(model, number, 1.0).backward()
            sam.second_step()
    return ended(model, wire, [line for line in lines if "left out" not in line])


@pytest.mark.rest
@pytest.mark.parametrize("source", ["ddp", "plain"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("form", ["a tensor", "none"])
def test_the_first_half_of_a_sharpness_aware_step_is_dropped(
    two: Ranks, form: str, recipe: str, source: str
) -> None:
    found = two(by_halves, recipe, source, form)
    if source == "ddp":
        inner = two(by_halves, recipe, "ddp", "a tensor", gives_inner=True)
        assert found == inner, "as if the optimizer inside were given"
    for each in found:
        assert each.digest == found[0].digest
        assert each.step == 41, "40, and the first half of all, before any optimizer had ever stepped"
        assert each.said == ()
        if recipe == "dense":
            assert each.digest == two(by_halves, None, "ddp", "a tensor")[0].digest


def test_a_half_that_brings_zeros_is_a_half_whichever_optimizer_is_given(two: Ranks) -> None:
    found = two(by_halves, RESTING, "ddp", "a tensor")
    assert found == two(by_halves, RESTING, "ddp", "a tensor", gives_inner=True)
    for each in found:
        assert each.end == (found[0].digest, 41)
        assert each.said == ()


@dataclass(frozen=True)
class Copies:
    """Copies of a model, and what is left when its wrapper has gone."""

    train: list[bool]
    leave_the_wire: list[bool]
    """Whether the wire's step stayed while a copy trained."""
    gone: list[bool]
    """The wrapper and the source, with the memory, although the parameters live on."""
    module_trains: bool
    parameters_gone: bool


def copied() -> Copies:
    """Of a model whose outputs cannot be seen: it trains by itself, and so does the module that is left."""
    model = Task("none")
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    wire = gradwire.attach(ddp, optimizer, "topk(ratio=0.05)")
    for number in range(3):
        optimizer.zero_grad()
        call(ddp, number, 1.0).backward()
        optimizer.step()
    step, train, leave = wire.report().step, [], []
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = digest(other)
        stepped = torch.optim.SGD(other.parameters(), lr=0.05)
        call(other, 3, 1.0).backward()
        stepped.step()
        train.append(digest(other) != before)
        leave.append(wire.report().step == step)
    held = [weakref.ref(each) for each in (ddp, wire.attached.source)]
    parameter = weakref.ref(next(ddp.parameters()))
    del ddp, wire, other, stepped
    gc.collect()
    gone = [each() is None for each in held]
    before = digest(model)
    optimizer.zero_grad()
    call(model, 4, 1.0).backward()
    optimizer.step()
    trains = digest(model) != before
    del model, optimizer
    gc.collect()
    return Copies(train, leave, gone, trains, parameter() is None)


def test_a_model_whose_outputs_cannot_be_seen_may_be_copied_and_deleted(two: Ranks) -> None:
    for found in two(copied):
        assert found == Copies([True] * 2, [True] * 2, [True] * 2, module_trains=True, parameters_gone=True)


def inside_backward(source: str, guard_every: int) -> tuple[list[str], str]:
    """What is said and raised where optimizers of one parameter each step as soon as it has a gradient."""
    model, replicas = wrapped(perceptron(), source)
    optimizers = {each: torch.optim.SGD([each], lr=0.05) for each in model.parameters()}

    def hook(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for each in optimizers:
        each.register_post_accumulate_grad_hook(hook)
    gradwire.attach(model, list(optimizers.values()), "int4", guard_every=guard_every, **replicas)
    raised = ""
    with told() as lines:
        try:
            for number in range(3):
                backward(model, number)
        except GradwireError as error:
            raised = str(error)
    return lines, raised


@pytest.mark.parametrize("source", ["ddp", "plain"])
def test_an_optimizer_that_steps_inside_backward_is_told_so(two: Ranks, source: str) -> None:
    for lines, raised in two(inside_backward, source, 0):
        assert raised == ""
        (line,) = [each for each in lines if "no gradient came" not in each]
        assert "stepped inside backward(), before the mean over ranks is there" in line
    for _lines, raised in two(inside_backward, source, 4):
        assert "stepped inside backward(), before the mean over ranks is there" in raised

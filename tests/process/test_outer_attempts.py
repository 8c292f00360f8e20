"""Real gloo ranks: which steps `gradwire.outer` counts, whose optimizers step, and where rounds come then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire
from tests.support.bits import Checksums, checksums
from tests.support.called import CASES, Task, optimizer_around
from tests.support.local_steps import (
    EVERY,
    ScheduleFree,
    common_folder,
    loss_of,
    outer,
    plain_sgd,
    shared,
    steps,
    theta0,
    values,
)
from tests.support.models import optimizer_of, perceptron
from tests.support.raised import raised
from tests.support.tiers import rest
from tests.support.world import Ranks

pytestmark = pytest.mark.process

Leave = Callable[[torch.optim.Optimizer, gradwire.OuterWire], object]
IN_TIME = list(range(1, 3 * EVERY + 1))


@dataclass(frozen=True)
class Counted:
    """Attempted steps after each pass of the loop, and parameters and rounds at the end."""

    attempts: list[int]
    own: Checksums
    rounds: int


def _counted(model: nn.Module, wire: gradwire.OuterWire, attempts: Iterator[int]) -> Counted:
    counts = list(attempts)
    wire.detach()
    return Counted(counts, checksums(values(model)), wire.report().step)


def clear(optimizer: torch.optim.Optimizer, _wire: gradwire.OuterWire) -> None:
    optimizer.zero_grad()


def zero(optimizer: torch.optim.Optimizer, _wire: gradwire.OuterWire) -> None:
    optimizer.zero_grad(set_to_none=False)


def say_it(_optimizer: torch.optim.Optimizer, wire: gradwire.OuterWire) -> None:
    wire.drop_step()


def left_out(way: Leave, skipped: tuple[int, ...]) -> Counted:
    """Rank 1 leaves out some steps, also the last one or two before a round."""
    model = perceptron(13)
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer)

    def attempts() -> Iterator[int]:
        for step in range(3 * EVERY):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if step in skipped and dist.get_rank() == 1:
                way(optimizer, wire)
            else:
                optimizer.step()
            yield wire.attempts

    return _counted(model, wire, attempts())


@pytest.mark.parametrize(("way", "skipped"), [(clear, (1, 6, 7)), (zero, (2, 3)), (say_it, (3, 11))])
def test_steps_that_are_left_out_count_as_attempted(two: Ranks, way: Leave, skipped: tuple[int, ...]) -> None:
    one, other = two(left_out, way, skipped)
    assert one.attempts[-1] == other.attempts[-1] == 3 * EVERY
    assert one.rounds == other.rounds == 3
    assert one.own == other.own


def called(name: str, wrapped: bool) -> Counted:
    """Rank 1 leaves out two steps of a model that is called, and hands over its loss, as in the case `name`
    of `tests.support.called`; with DDP around it or not.
    """
    case = CASES[name]
    torch.manual_seed(13)
    model: nn.Module = Task(case.form, frozen=case.frozen, checkpointed=case.checkpointed)
    if wrapped:
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
        model = nn.parallel.DistributedDataParallel(model, process_group=alone)
    given = [p for p in model.parameters() if p.requires_grad]
    parts = [[each] for each in given] if case.by_part else [given]
    optimizers = [optimizer_around(case.around, part) for part in parts]
    wire = outer(model, optimizers)

    def attempts() -> Iterator[int]:
        for step in range(3 * EVERY):
            model.zero_grad()
            case.call(model, step, 1.0).backward()
            for optimizer in optimizers:
                if step not in (1, 7) or dist.get_rank() == 0:
                    getattr(optimizer, "update", optimizer.step)()
            yield wire.attempts
        model.zero_grad()

    return _counted(model, wire, attempts())


# The rows that `test_called.py` has for steps that are exchanged.
@pytest.mark.parametrize(
    ("name", "wrapped"),
    [
        *((name, False) for name in ("model.forward(x)", "a namespace", "slots", "none, checkpointed")),
        *((name, False) for name in ("none, penalty", "lookahead", "around a copy")),
        *(
            pytest.param(*row, marks=pytest.mark.rest)
            for row in (
                ("an object", True),
                ("lookahead without hooks", False),
                ("an optimizer for each parameter", True),
                ("none, twice", False),
                ("none, frozen", True),
            )
        ),
    ],
)
def test_attempts_are_counted_in_time_however_the_model_is_called(
    two: Ranks, name: str, wrapped: bool
) -> None:
    one, other = two(called, name, wrapped)
    assert one.attempts == IN_TIME
    assert other.attempts == [step - (step in (2, 8)) for step in IN_TIME], "it shows late"
    assert one.rounds == other.rounds == 3
    assert one.own == other.own


def both_at_once() -> tuple[Checksums, str]:
    """Another recipe, before which all that is unsent is sent, and another optimizer right after it."""
    model = perceptron(19)
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer, "topk(ratio=0.05)", outer=plain_sgd)
    steps(model, optimizer, range(EVERY))
    wire.switch("dense")
    second = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wire.switch_optimizer(second)
    steps(model, second, range(EVERY, 3 * EVERY))
    return checksums(values(model)), wire.report().recipe


def test_the_optimizer_may_change_while_a_former_recipe_is_being_flushed(two: Ranks) -> None:
    (own, recipe), other = two(both_at_once)
    assert other == (own, recipe)
    assert recipe == "dense"


@dataclass(frozen=True)
class InTurn:
    """By step θ₀ of both parts of a model; and parameters at the end, and of a resumed run."""

    theta0: list[tuple[Checksums, Checksums]]
    own: Checksums
    resumed: Checksums


def taking_turns(delay: int) -> InTurn:
    """Each part has rounds of its own, half a cycle apart. Saved in the middle of one."""
    folder = common_folder()

    def built() -> tuple[nn.Module, torch.optim.Optimizer, list[nn.Module]]:
        torch.manual_seed(21)
        parts: list[nn.Module] = [
            nn.Sequential(nn.Linear(32, 64), nn.Tanh()),
            nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)),
        ]
        model = nn.Sequential(*parts)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2), parts

    model, optimizer, parts = built()
    wires = [outer(parts[0], optimizer, "topk(ratio=0.1)", delay=delay)]
    steps(model, optimizer, range(EVERY // 2))
    wires.append(outer(parts[1], optimizer, "topk(ratio=0.1)", delay=delay))
    found = []
    for step in range(EVERY // 2, 4 * EVERY):
        if step == 2 * EVERY + 1:
            for number, wire in enumerate(wires):
                wire.save(f"{folder}/{number}")
        found.append((checksums(theta0(wires[0])), checksums(theta0(wires[1]))))
        steps(model, optimizer, [step])
    found.append((checksums(theta0(wires[0])), checksums(theta0(wires[1]))))
    trained = checksums(values(model))
    again, theirs, parts = built()
    others = [outer(part, theirs, "topk(ratio=0.1)", delay=delay) for part in parts]
    for number, other in enumerate(others):
        other.load(f"{folder}/{number}")
    steps(again, theirs, range(2 * EVERY + 1, 4 * EVERY))
    resumed = checksums(values(again))
    for each in wires + others:
        each.detach()
    return InTurn(found, trained, resumed)


@pytest.mark.parametrize(
    ("delay", "rounds"), [pytest.param(0, [4, 3], marks=pytest.mark.rest), (EVERY - 1, [3, 2])]
)
def test_parts_of_a_model_take_turns_by_wires_of_their_own(two: Ranks, delay: int, rounds: list[int]) -> None:
    one, other = two(taking_turns, delay)
    assert one.theta0 == other.theta0
    landed = [
        [before != after for before, after in zip(*pair, strict=True)]
        for pair in zip(one.theta0, one.theta0[1:], strict=False)
    ]
    assert [sum(each) for each in zip(*landed, strict=True)] == rounds
    assert not any(all(each) for each in landed), "in turn"
    for found in (one, other):
        assert found.own == found.resumed


@dataclass(frozen=True)
class Phases:
    """Attempted steps and shared parameters, by step of the second optimizer; and what comes after it."""

    attempts: list[int]
    shared: list[Checksums]
    resumed: Checksums
    """At the same step as the last one of `shared`."""
    attempts_of_the_first: int
    """After further steps of the optimizer that is not followed any more."""
    refused: str


def two_phases(delay: int) -> Phases:
    """Another optimizer from the middle of a round on, in which the first one's steps count, too."""
    folder, last = common_folder(), 3 * EVERY + delay

    def built() -> tuple[nn.Module, gradwire.OuterWire, list[torch.optim.Optimizer]]:
        model = perceptron(37)
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2), optimizer_of(model, lr=0.5)]
        return model, outer(model, optimizers[0], "int4", delay=delay), optimizers

    model, wire, (first, second) = built()
    steps(model, first, range(EVERY + 1))
    wire.switch_optimizer(second)
    attempts, at_start = [wire.attempts], [checksums(shared(wire, model))]
    for step in range(EVERY + 1, last):
        steps(model, second, [step])
        attempts.append(wire.attempts)
        at_start.append(checksums(shared(wire, model)))
        if step == 2 * EVERY:
            wire.save(folder)
    steps(model, first, range(60, 60 + EVERY))
    of_the_first = wire.attempts
    again, other, (_, theirs) = built()
    other.switch_optimizer(theirs)
    other.load(folder)
    steps(again, theirs, range(2 * EVERY + 1, last))
    refused = raised(partial(wire.switch_optimizer, ScheduleFree(model.parameters(), lr=0.1)))
    return Phases(attempts, at_start, checksums(shared(other, again)), of_the_first, str(refused))


@pytest.mark.parametrize("delay", rest([0, 2], but=[0]))
def test_another_optimizer_takes_over_and_the_count_goes_on(two: Ranks, delay: int) -> None:
    one, other = two(two_phases, delay)
    assert one.shared == other.shared
    for found in (one, other):
        assert found.attempts == list(range(EVERY + 1, 3 * EVERY + delay + 1))
        pairs = zip(found.attempts[1:], found.shared, found.shared[1:], strict=False)
        landed = [at for at, before, after in pairs if before != after]
        # With a delay, the round of the first optimizer is under way when the second one takes over.
        assert landed == [each * EVERY + delay for each in ((1, 2, 3) if delay else (2, 3))]
        # The first one has all parameters of the one that is followed: its steps count again.
        assert found.attempts_of_the_first == 3 * EVERY + delay + EVERY
        assert found.resumed == found.shared[-1]
        assert found.refused.startswith("ValueError: ScheduleFree has train() and eval()")


@dataclass(frozen=True)
class Once:
    """Attempted steps, and parameters, of optimizers that can be read once."""

    attempts: int
    own: Checksums


def read_once(on: tuple[int, ...]) -> Once:
    """On these ranks."""
    model = perceptron(1)
    halves = [optimizer_of(part) for part in (model[:2], model[2:])]  # type: ignore[index]
    wire = outer(model, iter(halves) if dist.get_rank() in on else halves, every=2)
    for step in range(4):
        model.zero_grad()
        loss_of(model, step).backward()
        for each in halves:
            each.step()
    found = Once(wire.attempts, checksums(values(model)))
    wire.switch_optimizer(each for each in halves)
    wire.detach()
    return found


def given_instead(what: str) -> str:
    """What is raised if rank 0 passes something else in the place of an optimizer."""
    model = perceptron(1)
    given = model.parameters() if what == "Parameter" else iter(())
    return str(raised(lambda: outer(model, optimizer_of(model) if dist.get_rank() else given)))


def test_optimizers_may_be_an_iterator(two: Ranks) -> None:
    for on in ((0, 1), (0,)):
        one, other = two(read_once, on)
        assert one == other
        assert one.attempts == 4
    says = "the second argument is an optimizer or a list of them, got a list of"
    for kind in ("Parameter", "nothing"):
        one, other = two(given_instead, kind)
        assert one == f"ValueError: {says} {kind}; pass the optimizer itself"
        assert other.startswith("RanksDisagree: ")
        assert f"rank 0: refused, {says} {kind}" in other

"""Real gloo ranks: local steps between rounds, beside DiLoCo of our own; not finite, failing, refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire
from gradwire import recipes
from gradwire.comm.groups import lent
from tests.support.bits import Checksums, checksums
from tests.support.local_steps import (
    EVERY,
    OwnDiLoCo,
    ScheduleFree,
    apart,
    common_folder,
    distance,
    loss_of,
    mean_of_all,
    outer,
    plain_sgd,
    shared,
    steps,
    theta0,
    values,
)
from tests.support.models import optimizer_of, perceptron
from tests.support.raised import Raised, raised
from tests.support.states import own_state
from tests.support.tiers import rest
from tests.support.world import Ranks

pytestmark = pytest.mark.process

ROUNDINGS = 2e-6
"""Of float32, over some twenty steps of AdamW, beside the way that parameters have gone."""


@dataclass(frozen=True)
class Held:
    """A replica's own parameters, the shared ones, and the rounds that it counts."""

    own: Checksums
    shared: Checksums
    rounds: int


def held(wire: gradwire.OuterWire, model: nn.Module) -> Held:
    return Held(checksums(values(model)), checksums(shared(wire, model)), wire.report().step)


@dataclass(frozen=True)
class Followed:
    """How far a run is from one under `attach` after each step, and a rounding of its largest parameter."""

    apart: list[float]
    rounding: float
    own: Checksums


def follows_attach() -> Followed:
    """A round after each step, which averages parameters: the mean of gradients, but for roundings."""
    one, other = perceptron(1), perceptron(1)
    mine, theirs = optimizer_of(one), optimizer_of(other)
    gradwire.attach(other, theirs, "dense", replicas=dist.group.WORLD)
    outer(one, mine, "dense", every=1, outer=plain_sgd)
    distances = list[float]()
    for step in range(8):
        steps(one, mine, [step])
        steps(other, theirs, [step])
        distances.append(apart(values(one), values(other)))
    largest = max(float(each.abs().max()) for each in values(one))
    return Followed(distances, torch.finfo(torch.float32).eps / 2 * largest, checksums(values(one)))


def test_rounds_after_each_step_at_rate_one_are_gradients_averaged_step_by_step(two: Ranks) -> None:
    one, other = two(follows_attach)
    assert one.own == other.own
    # θ₀ − mean(θ₀ − θ): a difference, a sum of two, a product and a difference, each of one rounding.
    for step, distance_ in enumerate(one.apart, start=1):
        assert distance_ <= 4 * step * one.rounding


def beside_own(delay: int) -> tuple[float, int]:
    """How far own and shared parameters are from DiLoCo's, relative to how far they have gone; and rounds."""
    one, other = perceptron(2), perceptron(2)
    begin = values(one)
    mine, theirs = (torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (one, other))
    wire = outer(one, mine, delay=delay)
    own = OwnDiLoCo(other, delay)
    for step in range(5 * EVERY + delay):
        steps(one, mine, [step])
        steps(other, theirs, [step])
        own.after_step()
    away = distance(values(one) + shared(wire, one), values(other) + own.shared)
    return away / distance(values(one), begin), wire.report().step


@pytest.mark.parametrize("delay", rest([0, 2], but=[2]))
def test_diloco_is_the_paper_s(two: Ranks, delay: int) -> None:
    for relative, rounds in two(beside_own, delay):
        assert rounds == 5
        assert relative < ROUNDINGS


def dropped_in_flight() -> tuple[int, int]:
    """Rank 0 drops its model while its round waits for rank 1. Rounds that landed, and groups still lent."""
    model = perceptron()
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer, "topk(ratio=0.1)", delay=2)
    rounds = 0
    if dist.get_rank() == 0:
        steps(model, optimizer, range(EVERY))
        del model, optimizer, wire
    dist.barrier()
    if dist.get_rank() == 1:
        steps(model, optimizer, range(EVERY + 2))
        rounds = wire.report().step
        del model, optimizer, wire
    deadline_s = time.monotonic() + 10
    while lent() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return rounds, len(lent())


def test_a_model_that_is_dropped_in_the_middle_of_a_round_ends_it_and_gives_its_group_back(
    two: Ranks,
) -> None:
    assert two(dropped_in_flight) == [(0, 0), (1, 0)]


def two_rounds(recipe: str) -> Held:
    model = perceptron(2)
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer, recipe)
    steps(model, optimizer, range(2 * EVERY))
    return held(wire, model)


def test_another_recipe_has_the_outer_optimizer_of_diloco(two: Ranks) -> None:
    """`dense` sends all of Δ, too."""
    assert two(two_rounds, "dense") == two(two_rounds, "diloco")
    assert two(two_rounds, "dense")[0].rounds == 2


FIXED = {
    "covap": "covap(interval=2)",
    "topk": "topk(ratio=0.1)",
    "gcomp": "gcomp(mode='lossless')",
    "local_every": "local_every(interval=2)",
    "dgc": "dgc(momentum=0.9, warmup_steps=0)",
    "scalecom": "scalecom(warmup_steps=0)",
}


def with_every_recipe() -> dict[str, str | list[Held]]:
    """What is held at first and after each of three rounds; or why a recipe was refused."""
    found: dict[str, str | list[Held]] = {}
    for name in sorted(set(recipes.names()) - {"sparseloco"}):  # of its own tests
        model = perceptron(3)
        optimizer = optimizer_of(model)
        make = plain_sgd if name in ("dgc", "signum") else None
        try:
            wire = outer(model, optimizer, FIXED.get(name, name), every=2, outer=make)
        except ValueError as error:
            found[name] = str(error)
            continue
        found[name] = rounds = [held(wire, model)]
        for first in (0, 2, 4):
            steps(model, optimizer, range(first, first + 2))
            rounds.append(held(wire, model))
    return found


@pytest.mark.rest
def test_shared_parameters_are_the_same_bits_after_every_round_of_every_recipe(two: Ranks) -> None:
    one, other = two(with_every_recipe)
    assert one == other
    refused = {name: text for name, text in one.items() if isinstance(text, str)}
    assert refused.keys() == {"auto", "flexible", "mergecomp"}
    assert all("name a fixed recipe" in text for text in refused.values())
    for name in one.keys() - refused.keys():
        mine: Any = one[name]
        assert all(each.own == each.shared for each in mine), name
        assert mine[0].shared != mine[-1].shared, name


@dataclass(frozen=True)
class Conserved:
    """What came over six rounds, less what was applied and what is left: the most at an element."""

    error: float
    rounding: float
    remembers: int
    units: int


def conservation() -> Conserved:
    model = perceptron(4)
    optimizer = optimizer_of(model)
    before: list[Tensor] = []
    handle = optimizer.register_step_post_hook(lambda *_: before.__setitem__(slice(None), values(model)))
    wire = outer(model, optimizer, "topk(ratio=0.05)", outer=plain_sgd)
    start = shared(wire, model)
    came = [torch.zeros_like(each, dtype=torch.float64) for each in start]
    last, size = start, 0.0
    for round_ in range(6):
        steps(model, optimizer, range(EVERY * round_, EVERY * (round_ + 1)))
        for total, theta0_, theta in zip(came, last, before, strict=True):
            total += mean_of_all((theta0_ - theta).double())
            size = max(size, float(theta0_.abs().max()))
        last = shared(wire, model)
    left = own_state(wire)["memory"]
    errors = []
    for (name, _), total, first, end in zip(model.named_parameters(), came, start, last, strict=True):
        unsent = mean_of_all(left[name].double()) if name in left else torch.zeros(())
        errors.append(float((total - (first.double() - end.double()) - unsent).abs().max()))
    handle.remove()
    rounding = size * torch.finfo(torch.float32).eps / 2
    return Conserved(max(errors), rounding, len(left), wire.report().units)


def test_what_came_is_applied_or_left(two: Ranks) -> None:
    for found in two(conservation):
        assert found.remembers == 2
        assert found.units == 1  # as nothing comes before the rest, a second one would cost a latency
        # In each of six rounds Δ, its sums and the step of θ₀ are rounded, at sizes below the parameters'.
        assert found.error <= 6 * 4 * found.rounding


@dataclass(frozen=True)
class Rested:
    """θ₀ at the beginning and at the end of a rest, in all its bits and in those of the model."""

    before: Checksums
    in_16_bits: Checksums
    after: Checksums
    own: Checksums


def at_rest(delay: int) -> Rested:
    """16-bit parameters that learn for two rounds, and then rest."""
    model = perceptron(5).bfloat16()
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer, "diloco", outer=partial(torch.optim.SGD, lr=0.7), delay=delay)
    steps(model, optimizer, range(2 * EVERY))
    optimizer.param_groups[0]["lr"] = 0.0
    # One more round brings what was learned before the rest; a delayed one lands in the next.
    steps(model, optimizer, range(2 * EVERY, 3 * EVERY + delay))
    before = checksums(theta0(wire)), checksums(each.bfloat16().float() for each in theta0(wire))
    steps(model, optimizer, range(3 * EVERY, 6 * EVERY))
    return Rested(*before, checksums(theta0(wire)), checksums(values(model)))


@pytest.mark.parametrize("delay", rest([0, 2], but=[0]))
def test_rounding_at_landing_is_no_part_of_what_was_learned(two: Ranks, delay: int) -> None:
    one, other = two(at_rest, delay)
    assert one == other
    assert one.after == one.before != one.in_16_bits


@dataclass(frozen=True)
class LeftOut:
    """A replica was not finite in a round: how far θ₀ is from where the other one alone has moved it."""

    error: float
    own: Checksums
    memory_before: Checksums
    memory_after: Checksums
    largest: float
    """Of the replica's parameters and momentum."""
    rounds: int


def not_finite(delay: int) -> LeftOut:
    """Of rank 1 a number is infinite, in its momentum and so in a parameter: the mean is rank 0's alone."""
    model = perceptron(9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sent: list[Tensor] = []
    handle = optimizer.register_step_post_hook(lambda *_: sent.__setitem__(slice(None), values(model)))
    wire = outer(model, optimizer, "topk(ratio=0.1)", outer=plain_sgd, delay=delay)
    steps(model, optimizer, range(EVERY + delay))
    memory = own_state(wire)["memory"]
    # The small tensors travel whole, so there Δ of rank 0 is all that moves them.
    whole = [n for n, (name, _) in enumerate(model.named_parameters()) if name not in memory]
    memory_before, start = checksums(memory.values()), shared(wire, model)
    steps(model, optimizer, range(EVERY + delay, 2 * EVERY - 1))
    if dist.get_rank() == 1:
        next(iter(optimizer.state.values()))["momentum_buffer"].view(-1)[3] = torch.inf
    steps(model, optimizer, [99])
    leaving = [sent[n].clone() for n in whole]
    optimizer.param_groups[0]["lr"] = 0.0
    steps(model, optimizer, range(200, 200 + delay))
    handle.remove()
    for each in leaving:
        dist.broadcast(each, 0)
    now = shared(wire, model)
    error = apart(
        [start[n] - now[n] for n in whole], [start[n] - each for n, each in zip(whole, leaving, strict=True)]
    )
    momentum = [each["momentum_buffer"] for each in optimizer.state.values()]
    return LeftOut(
        error,
        checksums(values(model)),
        memory_before,
        checksums(own_state(wire)["memory"].values()),
        float(torch.cat([each.flatten().abs() for each in (*momentum, *values(model))]).max()),
        wire.report().step,
    )


@pytest.mark.parametrize("delay", rest([0, 1], but=[1]))
def test_a_replica_that_is_not_finite_is_left_out_of_the_mean(two: Ranks, delay: int) -> None:
    one, other = two(not_finite, delay)
    assert one.own == other.own
    assert one.memory_after != one.memory_before
    assert other.memory_after == other.memory_before
    for found in (one, other):
        assert found.error <= 2e-8  # a rounding of θ₀ beside half of Δ, which is 1000 times as much
        assert found.largest < 1e3
        assert found.rounds == 2


def _step_without_rank_1(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> Raised:
    optimizer.zero_grad()
    loss_of(model, step).backward()
    if dist.get_rank() == 1:
        next(model.parameters()).grad.fill_(torch.nan)  # type: ignore[union-attr]
    return raised(optimizer.step)


def not_finite_for_good() -> tuple[list[str], Checksums, int]:
    """What six steps raise, of which the third is finite; parameters after two more, and rounds."""
    model = perceptron(10)
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer, "diloco", every=1)
    heard = [str(_step_without_rank_1(model, optimizer, step)) for step in range(2)]
    heard.append(str(raised(partial(steps, model, optimizer, [2]))))
    heard += [str(_step_without_rank_1(model, optimizer, step)) for step in range(3, 6)]
    steps(model, optimizer, range(6, 8))
    return heard, checksums(values(model)), wire.report().step


IN_A_ROW = ("PeerFailed: rank 1", "GradwireError: rank 1: 0.weight was not finite in 3 rounds")


def test_a_replica_that_is_never_finite_raises_and_the_others_hear_of_it(two: Ranks) -> None:
    """In the third round in a row. Two in a row before a good one do not count, and later rounds go on."""
    found = two(not_finite_for_good)
    for (heard, _own, rounds), says in zip(found, IN_A_ROW, strict=True):
        assert heard[:5] == [""] * 5
        assert heard[5].startswith(says)
        assert rounds == 7
    assert found[0][1] == found[1][1]


def not_finite_before_and_after_a_save() -> tuple[list[str], Checksums]:
    """What two rounds without rank 1 raise, and a third one in the resumed run; parameters at its end."""
    folder = common_folder()

    def built() -> tuple[nn.Module, torch.optim.Optimizer, gradwire.OuterWire]:
        model = perceptron(10)
        optimizer = optimizer_of(model)
        return model, optimizer, outer(model, optimizer, "diloco", every=1)

    model, optimizer, wire = built()
    heard = [str(_step_without_rank_1(model, optimizer, step)) for step in range(2)]
    wire.save(folder)
    again, theirs, other = built()
    other.load(folder)
    heard.append(str(_step_without_rank_1(again, theirs, 2)))
    steps(again, theirs, range(3, 5))
    for each in (wire, other):
        each.detach()
    return heard, checksums(values(again))


def test_rounds_without_a_replica_are_counted_over_a_save(two: Ranks) -> None:
    found = two(not_finite_before_and_after_a_save)
    for (heard, _own), says in zip(found, IN_A_ROW, strict=True):
        assert heard[:2] == ["", ""]
        assert heard[2].startswith(says)
    assert found[0][1] == found[1][1]


def nobody_left() -> tuple[Held, Held]:
    """Before and after a round in which all replicas are not finite."""
    model = perceptron(11)
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer, "diloco")
    steps(model, optimizer, range(EVERY))
    before = held(wire, model)
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    steps(model, optimizer, range(EVERY, 2 * EVERY))
    return before, held(wire, model)


def test_nothing_lands_where_no_replica_is_finite(two: Ranks) -> None:
    for before, after in two(nobody_left):
        assert after.shared == after.own == before.shared


@dataclass(frozen=True)
class Failing:
    """A round that fails, and what is held before its last step, after it, and at the end."""

    raised: str
    before: Held
    after: Held
    end: Checksums
    from_mean: float
    """The end, from what replicas had when the round had failed."""


def failing(detaches: bool) -> Failing:
    """Rank 1 casts a parameter for a round. Then comes another round, or the one that `detach` makes."""
    model: Any = perceptron(12)
    optimizer = optimizer_of(model)
    recipe, make = ("dense", plain_sgd) if detaches else ("diloco", None)
    wire = outer(model, optimizer, recipe, outer=make)
    steps(model, optimizer, range(EVERY - 1))
    before, head, bias = held(wire, model), model[-1], model[-1].bias
    if dist.get_rank() == 1:
        head.bias = nn.Parameter(bias.detach().clone())
    heard = raised(partial(steps, model, optimizer, [EVERY - 1]))
    head.bias = bias
    after, means = held(wire, model), [mean_of_all(each) for each in values(model)]
    if detaches:
        wire.detach()
    else:
        steps(model, optimizer, range(EVERY, 2 * EVERY))
    return Failing(heard.kind, before, after, checksums(values(model)), apart(values(model), means))


@pytest.mark.parametrize("detaches", [False, True])
def test_an_error_on_one_rank_is_named_on_all_and_no_rank_lands(two: Ranks, detaches: bool) -> None:
    """What was learned comes with the next round, or with the last one."""
    one, other = two(failing, detaches)
    assert (one.raised, other.raised) == ("PeerFailed", "ValueError")
    assert one.end == other.end
    for found in (one, other):
        assert found.after.shared == found.before.shared
        assert found.after.own != found.before.own
        assert (
            found.from_mean <= 1e-6 or not detaches
        )  # θ₀ less the mean Δ, of numbers below 1: three roundings


def uneven() -> tuple[Held, Held]:
    """Rank 1 has half the data: after `join`, and after a round more."""
    model = perceptron(16)
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer, "topk(ratio=0.1)", outer=plain_sgd)
    with wire.join():
        steps(model, optimizer, range(11 if dist.get_rank() == 0 else 5))
    joined = held(wire, model)
    steps(model, optimizer, range(20, 20 + EVERY))
    return joined, held(wire, model)


def test_replicas_with_less_data_wait_for_the_others(two: Ranks) -> None:
    """They take part in later rounds without weight."""
    one, other = two(uneven)
    assert one == other
    assert one[1].own == one[1].shared != one[0].own


@dataclass(frozen=True)
class Ended:
    """What is held in the middle of a run, at its end, and after some steps without a wire."""

    before_evaluation: Checksums
    before: Held
    unsent: float
    recipe: str
    end: Checksums
    later: Checksums


def at_the_end() -> Ended:
    """A switch in the middle of a round, evaluation at θ₀, and a last round that leaves nothing unsent."""
    model = perceptron(17)
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer, "topk(ratio=0.05)", delay=1, outer=plain_sgd)
    steps(model, optimizer, range(EVERY + 2))
    wire.switch("topk(ratio=0.2)")
    steps(model, optimizer, range(EVERY + 2, 2 * EVERY))
    evaluated = checksums(values(model)), held(wire, model)
    unsent = sum(float(each.abs().sum()) for each in own_state(wire)["memory"].values())
    wire.detach()
    end = checksums(values(model))
    steps(model, optimizer, range(2 * EVERY, 3 * EVERY))
    return Ended(*evaluated, unsent, wire.report().recipe, end, checksums(values(model)))


def test_evaluation_switch_and_the_last_round(two: Ranks) -> None:
    one, other = two(at_the_end)
    assert one.before.shared == other.before.shared
    assert one.before.own != other.before.own
    assert one.end == other.end
    assert one.later != other.later
    for found in (one, other):
        assert found.before.own == found.before_evaluation
        assert found.unsent > 0
        assert found.recipe == "dense"


REFUSED = {
    "delay": "ValueError: delay=4 is not a number of steps below every=4",
    "every": "ValueError: every=0 is not a number of steps",
    "neither": "ValueError: pass either replicas=, the ranks that average, or members=",
    "both": "ValueError: pass either replicas=, the ranks that average, or members=",
    "no time": "ValueError: every_seconds=0.0 is not a finite time above 0",
    "time and delay": "ValueError: every_seconds=1.0 needs rounds without a delay, not delay=1",
    "auto": "ValueError: auto and other recipes that measure",
    "gcomp": "ValueError: gcomp reads the state",
    "no optimizer": "ValueError: outer() counts an optimizer's steps",
    "outer": "ValueError: outer= made an optimizer of other parameters",
    "schedule-free": "ValueError: ScheduleFree has train() and eval(), as schedule-free optimizers do",
    "ranks": "RanksDisagree: ranks disagree on every",
    "flush": "ValueError: flush() adds to gradients",
    "switch": "ValueError: auto and other recipes that measure",
    "attach": "ValueError: this model is carried already, by its local steps, over ranks [0, 1]",
    "twice": "ValueError: this model is carried already, by its local steps, over ranks [0, 1]",
    "after attach": "ValueError: this model is carried already, by its DistributedDataParallel",
    "ddp over all": "ValueError: this model is carried already, by its DistributedDataParallel",
}


def refused() -> dict[str, str]:
    """What is raised of each."""
    model = perceptron(18)
    optimizer = optimizer_of(model)

    def asked(*given: Any, **options: Any) -> str:
        return str(raised(lambda: outer(model, *(given or (optimizer,)), **options)))

    found = {
        "delay": asked(delay=EVERY),
        "every": asked(every=0),
        "neither": asked(replicas=None),
        "both": asked(members=gradwire.members.fixed(dist.group.WORLD)),
        "no time": asked(every_seconds=0.0),
        "time and delay": asked(every_seconds=1.0, delay=1),
        "auto": asked(optimizer, "auto"),
        "gcomp": asked(optimizer, "gcomp"),
        "no optimizer": asked(None),
        "outer": asked(outer=lambda given: optimizer),
        "schedule-free": asked(ScheduleFree(model.parameters(), lr=0.1)),
        "ranks": asked(every=4 + dist.get_rank()),
    }
    wire = outer(model, optimizer)
    ddp = nn.parallel.DistributedDataParallel(perceptron(18))
    gradwire.attach(ddp, optimizer_of(ddp), "dense")
    again: dict[str, Callable[[], object]] = {
        "flush": wire.flush,
        "switch": lambda: wire.switch("auto"),
        "attach": lambda: gradwire.attach(model, optimizer, "dense", replicas=dist.group.WORLD),
        "twice": lambda: outer(model, optimizer),
        "after attach": lambda: outer(ddp.module, optimizer_of(ddp)),
        "ddp over all": lambda: outer(ddp, optimizer_of(ddp)),
    }
    return found | {name: str(raised(call)) for name, call in again.items()}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_refused_in_words(two: Ranks, what: str) -> None:
    for found in two(refused):
        assert found[what].startswith(REFUSED[what])

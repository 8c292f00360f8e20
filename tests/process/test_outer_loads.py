"""Real gloo ranks: local steps go on from what is loaded and saved, in the middle of a round, too."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire
from tests.support.bits import Checksums, checksums
from tests.support.local_steps import (
    EVERY,
    State,
    Way,
    common_folder,
    copied,
    load_all,
    load_by_dcp,
    load_by_setting,
    normed,
    normed_and_wire,
    outer,
    rested,
    shared,
    steps,
    theta0,
    values,
)
from tests.support.models import optimizer_of, perceptron
from tests.support.raised import raised
from tests.support.states import own_state
from tests.support.tiers import cases, rest
from tests.support.world import Ranks

pytestmark = pytest.mark.process


def end(*wires: gradwire.OuterWire) -> None:
    """Land rounds that are under way, so that none still runs when the scene has ended."""
    for wire in wires:
        wire.detach()


def load_compiled(model: nn.Module, state: State) -> None:
    compiled = torch.compile(model, backend="eager")
    compiled.load_state_dict({f"_orig_mod.{name}": each for name, each in copied(state).items()})


def load_parts(model: nn.Module, state: State) -> None:
    for name, part in model.named_children():
        inside = {key.removeprefix(f"{name}."): each for key, each in state.items() if key.startswith(name)}
        part.load_state_dict(copied(inside))


def load_twice(model: nn.Module, state: State) -> None:
    model.load_state_dict({name: torch.zeros_like(each) for name, each in state.items()})
    model.load_state_dict(copied(state))


@dataclass(frozen=True)
class Loaded:
    """What was loaded, and parameters: shared ones then, both after a rest, and own ones after training."""

    target: Checksums
    shown: Checksums
    unsent: float
    own: Checksums
    shared: Checksums
    end: Checksums


def loaded(way: Way, recipe: str, delay: int) -> Loaded:
    """In the middle of a round, where one with a `delay` is under way. Nothing is learned for two rounds."""
    model, state = normed(24), copied(normed(25).state_dict())
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer, recipe, delay=delay)
    steps(model, optimizer, range(2 * EVERY + 1))
    way(model, state)
    target = checksums(state[name] for name, _ in model.named_parameters())
    shown, unsent = target, 0.0
    if delay == 0:  # with a delay training goes on first
        unsent = sum(float(each.abs().sum()) for each in own_state(wire)["memory"].values())
        shown = checksums(shared(wire, model))
    rested(model, optimizer, 2 * EVERY + 1, 2 * EVERY + delay)
    rest_ = checksums(values(model)), checksums(shared(wire, model))
    steps(model, optimizer, range(5 * EVERY, 7 * EVERY))
    wire.detach()
    return Loaded(target, shown, unsent, *rest_, checksums(values(model)))


WAYS = [
    *((way, "int4", 2) for way in (load_compiled, load_parts, load_twice, load_by_dcp, load_by_setting)),
    *product((load_all,), ("dense", "diloco", "int4", "topk(0.05)", "sparseloco"), (0, 2)),
]
SOON = [(load_parts, "int4", 2), *((load_all, *each) for each in (("int4", 0), ("int4", 2), ("diloco", 0)))]


@pytest.mark.parametrize(("way", "recipe", "delay"), cases(WAYS, but=SOON))
def test_what_all_ranks_load_is_what_rounds_go_on_from(two: Ranks, way: Way, recipe: str, delay: int) -> None:
    one, other = two(loaded, way, recipe, delay)
    assert one.end == other.end
    for found in (one, other):
        assert found.shown == found.target
        assert found.unsent == 0.0
        assert found.own == found.shared == found.target
        assert found.end != found.target, "it learns"


@dataclass(frozen=True)
class Apart:
    """Of ranks that did not load the same: what steps raise, by attempted step, and what `detach` does; and
    θ₀ two rounds after all have loaded the same.
    """

    raised: dict[int, str]
    ended: str
    theta0: Checksums


def _loaded_by_all(model: nn.Module, optimizer: torch.optim.Optimizer, wire: gradwire.OuterWire) -> Checksums:
    model.load_state_dict(perceptron(29).state_dict())
    steps(model, optimizer, range(50, 50 + 2 * EVERY))
    return checksums(theta0(wire))


def loaded_apart(ranks: tuple[int, ...]) -> Apart:
    """In the middle of a round these ranks load, each something else."""
    model = perceptron(26)
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer, "int4", delay=1)
    steps(model, optimizer, range(EVERY + 2))
    if dist.get_rank() in ranks:
        model.load_state_dict(perceptron(27 + dist.get_rank()).state_dict())
    heard = dict[int, str]()
    for step in range(EVERY + 2, 3 * EVERY + 2):
        if text := str(raised(partial(steps, model, optimizer, [step]))):
            heard[wire.attempts] = text
    ended = str(raised(wire.detach))
    return Apart(heard, ended, _loaded_by_all(model, optimizer, wire))


SAID = "RanksDisagree: ranks disagree on what load_state_dict has brought since the last round: rank 0: "


@pytest.mark.parametrize(("ranks", "first"), [((1,), "nothing"), ((0, 1), "values of")])
def test_ranks_that_load_different_values_hear_of_it_on_all_until_they_load_the_same(
    two: Ranks, ranks: tuple[int, ...], first: str
) -> None:
    one, other = two(loaded_apart, ranks)
    assert one == other
    assert list(one.raised) == [2 * EVERY + 1, 3 * EVERY + 1]
    assert all(text.startswith(SAID + first) for text in one.raised.values())
    assert one.ended.startswith("RanksDisagree: ")
    assert "; rank 1: values of fingerprint" in one.ended


def loaded_around_a_landing() -> Apart:
    """Both load the same part: rank 0 while a round is under way, rank 1 when it has landed."""
    model: Any = perceptron(26)
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer, "dense", delay=1)
    part, heard = perceptron(27)[0].state_dict(), dict[int, str]()  # type: ignore[index]
    for step in range(2 * EVERY + 1):
        if step == EVERY + dist.get_rank():
            model[0].load_state_dict(part)
        if text := str(raised(partial(steps, model, optimizer, [step]))):
            heard[wire.attempts] = text
    end_of_all = _loaded_by_all(model, optimizer, wire)
    return Apart(heard, str(raised(wire.detach)), end_of_all)


def test_ranks_that_load_the_same_part_before_and_after_a_landing_hear_of_it(two: Ranks) -> None:
    """One has thrown the round away, and the other has landed it."""
    one, other = two(loaded_around_a_landing)
    assert one == other
    assert list(one.raised) == [2 * EVERY + 1]
    assert one.raised[2 * EVERY + 1].startswith(SAID.partition(" since")[0])
    assert one.ended == ""


def loading_nothing(delay: int, way: Callable[[nn.Module], object]) -> Checksums:
    """Parameters and θ₀ of a run in the middle of which that is done."""
    model, optimizer, wire = normed_and_wire("topk(ratio=0.1)", delay)
    steps(model, optimizer, range(EVERY + 1))
    way(model)
    steps(model, optimizer, range(EVERY + 1, 3 * EVERY))
    trained = checksums([*values(model), *theta0(wire)])
    end(wire)
    return trained


def _nothing(_model: nn.Module) -> None: ...


def _load_what_is_there(model: nn.Module) -> None:
    load_all(model, model.state_dict())


def _load_another_and_back(model: nn.Module) -> None:
    mine = copied(model.state_dict())
    model.load_state_dict(normed().state_dict())
    model.load_state_dict(mine)


@pytest.mark.parametrize("delay", rest([0, 2], but=[2]))
def test_loading_the_values_that_are_there_changes_no_bit(two: Ranks, delay: int) -> None:
    usual = two(loading_nothing, delay, _nothing)
    assert two(loading_nothing, delay, _load_what_is_there) == usual
    assert two(loading_nothing, delay, _load_another_and_back) == usual


@dataclass(frozen=True)
class Resumed:
    """The state at the end of a run that never stops, and of one that has loaded what it saved."""

    through: Checksums
    resumed: Checksums
    begins: int
    """The attempted steps with which the other one begins."""


def resumed(
    recipe: str, delay: int, saved_at: int, spoilt_at: int = -1, loads: tuple[str, ...] = ("wire",)
) -> Resumed:
    """Rank 1 has a parameter that is NaN in step `spoilt_at`. The user may load each replica's model, too."""
    folder = common_folder()
    model, optimizer, wire = normed_and_wire(recipe, delay)
    for step in range(saved_at):
        if step == spoilt_at and dist.get_rank() == 1:
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] = torch.nan
        steps(model, optimizer, [step])
    wire.save(folder)
    mine = copied(model.state_dict())
    steps(model, optimizer, range(saved_at, 4 * EVERY))
    again, theirs, other = normed_and_wire(recipe, delay)
    steps(again, theirs, range(3))  # to be overwritten
    for what in loads:
        if what == "wire":
            other.load(folder)
        else:
            again.load_state_dict(mine)
    begins = other.attempts
    steps(again, theirs, range(saved_at, 4 * EVERY))
    found = [
        checksums([*each.state_dict().values(), *theta0(of)]) for each, of in ((model, wire), (again, other))
    ]
    end(wire, other)
    return Resumed(*found, begins)


RESUMED = [
    ("topk(ratio=0.1)", 0, EVERY + 2, -1),
    ("diloco", 0, 2 * EVERY, -1),
    ("topk(ratio=0.1)", 3, EVERY + 1, -1),
    ("dense", 2, EVERY + 1, EVERY - 1),
]
"""Within a round, between rounds, with one under way, and with one under way to which a replica brings
nothing.
"""


@pytest.mark.parametrize(("recipe", "delay", "saved_at", "spoilt_at"), cases(RESUMED, but=RESUMED[2:]))
def test_a_run_resumes_bit_for_bit_in_the_middle_of_a_round(
    two: Ranks, recipe: str, delay: int, saved_at: int, spoilt_at: int
) -> None:
    one, other = two(resumed, recipe, delay, saved_at, spoilt_at)
    assert (one.through == other.through) == (delay == 0)
    for found in (one, other):
        assert found.begins == saved_at
        assert found.resumed == found.through


@pytest.mark.parametrize("loads", [("model", "wire"), ("wire", "model")])
def test_a_run_resumes_bit_for_bit_where_the_model_is_loaded_too(two: Ranks, loads: tuple[str, ...]) -> None:
    for found in two(resumed, "topk(ratio=0.1)", 2, EVERY + 1, loads=loads):
        assert found.resumed == found.through


def saved_while_one_is_late() -> Checksums | None:
    """The means of a round, in a state of when rank 1 has not sent it yet."""
    model = perceptron()
    optimizer = optimizer_of(model)
    wire = outer(model, optimizer, "dense", delay=1)
    steps(model, optimizer, range(EVERY - 1))
    time.sleep(0.2 * dist.get_rank())
    steps(model, optimizer, [EVERY - 1])
    means = own_state(wire)["source"]["flight"]["means"]
    wire.detach()
    return means and checksums(means.values())


def test_a_save_waits_for_the_round_that_is_under_way(two: Ranks) -> None:
    one, other = two(saved_while_one_is_late)
    assert one == other is not None


@dataclass(frozen=True)
class SavedLoaded:
    """What was loaded before a save, what a resumed run begins with, and what is shown after another load."""

    loaded: Checksums
    own: Checksums
    shared: Checksums
    half: Checksums
    shown: Checksums


def saved_after_loading() -> SavedLoaded:
    """Without a step between them."""
    folder = common_folder()
    model, optimizer, wire = normed_and_wire("diloco", 0)
    steps(model, optimizer, range(EVERY + 1))
    model.load_state_dict(normed().state_dict())
    loaded = checksums(values(model))
    wire.save(folder)
    again, _theirs, other = normed_and_wire("diloco", 0)
    other.load(folder)
    found = checksums(values(again)), checksums(shared(other, again))
    model.load_state_dict({name: 0.5 * each for name, each in model.state_dict().items()})
    half = checksums(0.5 * each for each in values(normed()))
    return SavedLoaded(loaded, *found, half, checksums(shared(wire, model)))


def test_what_was_loaded_is_what_is_saved_and_shown(two: Ranks) -> None:
    for found in two(saved_after_loading):
        assert found.own == found.shared == found.loaded
        assert found.shown == found.half


def saved_after_loading_alone() -> tuple[str, Checksums]:
    """Rank 1 loads alone, and both save before the round that would tell. What the resumed round raises, and
    parameters when all have loaded the same.
    """
    folder = common_folder()
    model, optimizer, wire = normed_and_wire("diloco", 0)
    steps(model, optimizer, range(EVERY + 1))
    if dist.get_rank() == 1:
        model.load_state_dict(normed().state_dict())
    wire.save(folder)
    again, theirs, other = normed_and_wire("diloco", 0)
    other.load(folder)
    heard = str(raised(partial(steps, again, theirs, range(EVERY + 1, 2 * EVERY))))
    for each in (model, again):
        each.load_state_dict(normed().state_dict())
    end(wire, other)
    return heard, checksums(values(again))


def test_what_one_rank_alone_had_loaded_before_a_save_is_told_in_the_resumed_round(two: Ranks) -> None:
    one, other = two(saved_after_loading_alone)
    assert one == other
    assert one[0].startswith("RanksDisagree: ranks disagree on what load_state_dict has brought")


@dataclass(frozen=True)
class Mean:
    """The mean state of a run between rounds, in another run; and why there is none within a round."""

    refused: str
    own: Checksums
    momentum: Checksums
    own_there: Checksums
    momentum_there: Checksums
    attempts: int


def from_another_rank() -> Mean:
    model, optimizer, wire = normed_and_wire("topk(ratio=0.1)", 0)
    steps(model, optimizer, range(EVERY + 1))
    refused = raised(wire.mean_state_dict)
    steps(model, optimizer, range(EVERY + 1, 2 * EVERY))
    again, _theirs, other = normed_and_wire("topk(ratio=0.1)", 0)
    other.load_state_dict(wire.mean_state_dict())
    held = []
    for each, of in ((model, wire), (again, other)):
        momentum = [state["momentum_buffer"] for state in of.outer_optimizer.state.values()]
        held += [checksums(values(each)), checksums(momentum)]
    return Mean(str(refused), *held, other.attempts)


def test_one_rank_s_save_is_enough_between_rounds_and_refused_within(two: Ranks) -> None:
    for found in two(from_another_rank):
        assert "ValueError: " in found.refused
        assert "in the middle of a round" in found.refused
        assert found.own_there == found.own
        assert found.momentum_there == found.momentum
        assert found.attempts == 2 * EVERY

"""Real gloo ranks: one dies around a round of local steps, and others go on from what it has saved."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

import gradwire
from gradwire.comm import ProcessGroupComm
from gradwire.step.reducer import Backward
from tests.support.bits import Checksums, checksums
from tests.support.local_steps import EVERY, normed_and_wire, shared, steps, theta0, values
from tests.support.ranks import returned, started
from tests.support.world import Ranks

pytestmark = [pytest.mark.process, pytest.mark.rest]


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def saving(_wire: gradwire.OuterWire) -> None:
    patch.object(os, "fsync", die).start()


def forming(_wire: gradwire.OuterWire) -> None:
    patch.object(Backward, "submit", die).start()


def exchanging(_wire: gradwire.OuterWire) -> None:
    patch.object(ProcessGroupComm, "issue", die).start()


def before_landing(wire: gradwire.OuterWire) -> None:
    wire.outer_optimizer.register_step_pre_hook(die)


def landing(wire: gradwire.OuterWire) -> None:
    wire.outer_optimizer.register_step_post_hook(die)


@dataclass(frozen=True)
class Death:
    """`saved_at` attempted steps rank 1 is about to die, and rank 0 hears of it in step `heard_at`."""

    delay: int
    saved_at: int
    heard_at: int
    prepare: Callable[[gradwire.OuterWire], None]


AT = 2 * EVERY - 1
"""The step in which the second round leaves."""

DEATHS = {
    "before a round": Death(0, AT, AT, die),
    "while a change is formed": Death(0, AT, AT, forming),
    "in the exchange": Death(0, AT, AT, exchanging),
    "in the exchange, delayed": Death(2, AT, AT + 2, exchanging),
    # The other one has landed, and hears of it in the next round.
    "before landing": Death(0, AT, AT + EVERY, before_landing),
    "while landing late": Death(2, AT + 2, AT + EVERY + 2, landing),
    "while saving": Death(0, AT - 1, AT, saving),
}


@dataclass(frozen=True)
class Heard:
    """The step in which rank 0 hears of the death, and what."""

    step: int
    text: str


def dying(death: Death, folder: Path) -> Heard | None:
    """Saved in the middle of a round. Then rank 1 dies."""
    model, optimizer, wire = normed_and_wire("topk(ratio=0.1)", death.delay)
    steps(model, optimizer, range(death.saved_at))
    wire.save(folder)
    if dist.get_rank() == 1:
        death.prepare(wire)
    for step in range(death.saved_at, 4 * EVERY):
        try:
            if death.prepare is saving and step > death.saved_at:
                wire.save(folder)
            steps(model, optimizer, [step])
        except gradwire.TransportError as error:
            return Heard(step, str(error))
    return None


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that has what the dead have saved, by their deaths."""
    return tmp_path_factory.mktemp("saves")


def _dead(name: str, folder: Path) -> Heard | None:
    place = folder / f"ranks, {name}"
    place.mkdir()
    with started(partial(dying, DEATHS[name], folder / name), 2, place) as ranks:
        ranks[0].wait(120.0)
        assert ranks[1].wait(10.0) == -signal.SIGKILL, returned(place, 1)
    heard: Heard | None = returned(place, 0)
    return heard


@pytest.fixture(scope="module")
def deaths(saves: Path) -> dict[str, Heard | None]:
    """What rank 0 hears of each."""
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(DEATHS, pool.map(partial(_dead, folder=saves), DEATHS), strict=True))


@pytest.mark.parametrize("name", DEATHS)
def test_a_rank_that_dies_is_named_to_the_others(deaths: dict[str, Heard | None], name: str) -> None:
    heard = deaths[name]
    assert heard is not None
    assert heard.step == DEATHS[name].heard_at
    assert re.search(r"\[127\.0\.0\.1\]:\d+", heard.text), "the peer's address"


@dataclass(frozen=True)
class Run:
    """The attempted steps with which a run begins, and what is held at its end."""

    begins: int
    end: Checksums


def running(delay: int, folder: Path | None = None) -> Run:
    """From what a dead one has left, or from the beginning without interruption."""
    model, optimizer, wire = normed_and_wire("topk(ratio=0.1)", delay)
    if folder is not None:
        wire.load(folder)
    begins = wire.attempts
    steps(model, optimizer, range(begins, 4 * EVERY))
    end = checksums([*model.state_dict().values(), *theta0(wire)])
    wire.detach()
    return Run(begins, end)


@pytest.mark.usefixtures("deaths")
@pytest.mark.parametrize("name", DEATHS)
def test_what_the_dead_have_saved_goes_on_bit_for_bit(two: Ranks, saves: Path, name: str) -> None:
    death = DEATHS[name]
    through, resumed = two(running, death.delay), two(running, death.delay, saves / name)
    for one, other in zip(through, resumed, strict=True):
        assert other == Run(death.saved_at, one.end)


def from_two_ranks(folder: Path) -> tuple[Checksums, Checksums, int, bool]:
    """With a round under way: own and shared parameters at first, attempted steps and whether all is finite
    at the end.
    """
    model, optimizer, wire = normed_and_wire("topk(ratio=0.1)", 2)
    wire.load(folder)
    begins = checksums(values(model)), checksums(shared(wire, model))
    steps(model, optimizer, range(3 * EVERY))
    is_finite = all(bool(each.isfinite().all()) for each in values(model))
    wire.detach()
    return *begins, wire.attempts, is_finite


@pytest.mark.usefixtures("deaths")
def test_one_rank_goes_on_from_what_two_have_saved(saves: Path, tmp_path: Path) -> None:
    [(own, of_all, attempts, is_finite)] = Ranks(1, tmp_path)(from_two_ranks, saves / "while landing late")
    assert own == of_all
    assert attempts == 2 * EVERY + 3 * EVERY
    assert is_finite

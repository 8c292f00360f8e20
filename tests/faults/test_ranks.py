"""Real gloo ranks: one is killed, stopped or out of memory, and the others say so with their state intact."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire
from gradwire.sources.nodes.level import Packing
from tests.process.attached_models import NODES, Made, ddp, hsdp, plain
from tests.support.bits import Checksums, checksums
from tests.support.models import batch
from tests.support.raised import Raised, raised
from tests.support.ranks import Rank, returned, started, started_anew, wait_for
from tests.support.states import own_state
from tests.support.tiers import rest
from tests.support.where import WHERE

pytestmark = pytest.mark.process

VICTIM = 1
LIVES_ON_S = 12.0
EVERYBODY = ("topk", "nodes", "stopped", "interrupted")
"""Accidents that `make test` looks at."""


@dataclass(frozen=True)
class Held:
    """What a step that counts would change."""

    step: int
    memory: Checksums


@dataclass(frozen=True)
class Broken:
    """The step that broke, what was held around it, and the next attempt."""

    raised: Raised
    after_s: float
    """Since the last good step."""
    before: Held
    after: Held
    again: Raised


def _held(wire: gradwire.Wire) -> Held:
    state = own_state(wire)
    return Held(state["step"], checksums(state["memory"].values()))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    inputs, targets = batch(step)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()


def until_it_breaks(
    make: Callable[[str], Made], recipe: str = "topk(ratio=0.05)", tries_again: bool = True
) -> Broken:
    """Train and say so, until `backward()` raises; then look at what is left.

    Under FSDP no rank tries again: its own collectives, inside a node, would wait for the timeout.
    """
    model, optimizer, wire = make(recipe)
    for step in range(1_000_000):
        before, good_s = _held(wire), time.monotonic()
        heard = raised(partial(_step, model, optimizer, step))
        if heard.kind:
            break
        print(step, flush=True)  # the test waits until training is under way
    after, after_s = _held(wire), time.monotonic() - good_s
    again = raised(partial(_step, model, optimizer, step)) if tries_again else replace(heard, after_s=0.0)
    return Broken(heard, after_s, before, after, again)


SCENES = {"topk": lambda: until_it_breaks(ddp).raised.kind}
"""For an interpreter of its own."""


@dataclass(frozen=True)
class OutOfMemory:
    """Two steps without room, and what was held before and after them."""

    raised: list[Raised]
    after_s: float
    before: Held
    after: Held


def without_any_memory() -> OutOfMemory:
    """After two steps rank 1 has no room for what its node sends, whenever it asks: it cannot even pay."""
    model, optimizer, wire = ddp("topk(ratio=0.05)", nodes=NODES)
    for step in range(2):
        _step(model, optimizer, step)
    rows, before, good_s = Packing.rows, _held(wire), time.monotonic()

    def none(packing: Packing, like: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            raise MemoryError("no room")
        return rows(packing, like)

    with mock.patch.object(Packing, "rows", none):
        heard = [raised(partial(_step, model, optimizer, step)) for step in (2, 3)]
    after_s, after = time.monotonic() - good_s, _held(wire)
    if dist.get_rank() == 1:
        time.sleep(LIVES_ON_S)  # or a closed connection would tell the others
    return OutOfMemory(heard, after_s, before, after)


def _survive(
    folder: Path,
    scene: Callable[[], Broken],
    sent: signal.Signals,
    timeout_s: float,
    guard_s: float,
    world: int = 3,
) -> list[Broken]:
    """Send a signal to one rank in the middle of training; what the others saw, and a stopped one later."""
    witnesses = [rank for rank in range(world) if rank != VICTIM]
    with started(scene, world, folder, timeout_s) as ranks:
        _wait_for_training(folder)
        ranks[VICTIM].send_signal(sent)
        deadline_s = time.monotonic() + guard_s
        for rank in witnesses:
            _wait(ranks[rank], deadline_s)
        if sent == signal.SIGSTOP:
            ranks[VICTIM].send_signal(signal.SIGCONT)
            _wait(ranks[VICTIM], deadline_s)
            witnesses.append(VICTIM)
    return [returned(folder, rank) for rank in witnesses]


def _wait_for_training(folder: Path) -> None:
    deadline_s, told = time.monotonic() + 100, folder / "0.json"
    while len((folder / "0.out").read_text().splitlines()) < 20:
        assert not (folder / "0.pickle").exists(), returned(folder, 0)
        assert not told.exists() or told.stat().st_size < 3, told.read_text()  # of `started_anew`
        assert time.monotonic() < deadline_s, "training never began"
        time.sleep(0.05)


def _wait(rank: Rank | subprocess.Popen[bytes], deadline_s: float) -> int:
    try:
        return rank.wait(max(0.1, deadline_s - time.monotonic()))
    except (TimeoutError, subprocess.TimeoutExpired):
        rank.send_signal(signal.SIGABRT)
        rank.wait(10.0)
        pytest.fail("a rank hangs; its threads are in the captured output")


KILLED_TIMEOUT_S, STOPPED_TIMEOUT_S = 60.0, 4.0
LOST: dict[str, tuple[int, Callable[[], Broken]]] = {
    "topk": (3, partial(until_it_breaks, ddp)),
    "dense": (3, partial(until_it_breaks, ddp, "dense")),
    "plain": (3, partial(until_it_breaks, plain)),
    "nodes": (4, partial(until_it_breaks, partial(ddp, nodes=NODES))),
    "hsdp": (4, partial(until_it_breaks, hsdp, tries_again=False)),
}
"""Ranks, and what they do until one of them is killed."""


def _killed(name: str, folder: Path) -> list[Broken]:
    world, scene = LOST[name]
    return _survive(folder, scene, signal.SIGKILL, KILLED_TIMEOUT_S, 40.0, world)


def _stopped(folder: Path) -> list[Broken]:
    return _survive(folder, LOST["topk"][1], signal.SIGSTOP, STOPPED_TIMEOUT_S, 60.0)


def _without_memory(folder: Path) -> list[OutOfMemory]:
    with started(without_any_memory, 4, folder, STOPPED_TIMEOUT_S) as ranks:
        wait_for(ranks)
    return [returned(folder, rank) for rank in range(4)]


def _interrupted(folder: Path) -> int:
    """How rank 0, which waits for a stopped rank, ends at Ctrl-C."""
    # In an interpreter of its own, whose end is part of it: threads that serve the network are still there.
    with started_anew("tests.faults.test_ranks", 2, folder, ["topk"], timeout_s=100.0) as ranks:
        _wait_for_training(folder)
        ranks[VICTIM].send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        ranks[0].send_signal(signal.SIGINT)
        return _wait(ranks[0], time.monotonic() + 40.0)


@pytest.fixture(scope="module")
def stage(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Any]]]:
    """All accidents at once, because most of the time is spent waiting for a rank that does not answer.

    Those that only `make test-all` looks at happen where one of their tests is to run.
    """
    accidents: dict[str, Callable[[Path], Any]] = {
        **{name: partial(_killed, name) for name in LOST},
        "stopped": _stopped,
        "without memory": _without_memory,
        "interrupted": _interrupted,
    }
    if not any(
        each.path == request.path and each.get_closest_marker("rest") for each in request.session.items
    ):
        accidents = {name: accidents[name] for name in EVERYBODY}
    with ThreadPoolExecutor(len(accidents)) as pool:
        yield {name: pool.submit(happen, tmp_path_factory.mktemp(name)) for name, happen in accidents.items()}


@pytest.mark.parametrize("recipe", rest(LOST, but=["topk", "nodes"]))
def test_survivors_of_a_killed_rank_raise_long_before_the_timeout(
    stage: dict[str, Future[list[Broken]]], recipe: str
) -> None:
    # The neighbour inside a node may be in a collective of FSDP's, whose errors are torch's.
    kinds = {"TransportError"} | ({"RuntimeError"} if recipe == "hsdp" else set())
    for seen in stage[recipe].result():
        assert seen.raised.kind in kinds
        assert re.search(r"\[127\.0\.0\.1\]:\d+", seen.raised.text), "the peer's address"
        assert seen.again.kind in kinds, "and it stays so"
        assert seen.after_s + seen.again.after_s < KILLED_TIMEOUT_S / 2
        # Means are gathered inside a node once all have agreed on the step, and its neighbour may die then.
        assert seen.after == seen.before or recipe == "nodes"


def test_a_stopped_rank_is_noticed_after_the_timeout_and_hears_of_it_when_it_goes_on(
    stage: dict[str, Future[list[Broken]]],
) -> None:
    timeout_s = STOPPED_TIMEOUT_S
    *survivors, stopped = stage["stopped"].result()
    for seen in (*survivors, stopped):
        assert seen.raised.kind == "TransportError"
        assert seen.again.kind == "TransportError"
        assert seen.again.after_s < 2 * timeout_s
        assert seen.after == seen.before
    for seen in survivors:
        # One collective may be waited for after another, but not one for each bucket of the step.
        assert 0.5 * timeout_s < seen.after_s < 4 * timeout_s


@pytest.mark.rest
def test_where_a_rank_has_no_memory_even_for_zeros_all_raise_at_the_timeout(
    stage: dict[str, Future[list[OutOfMemory]]],
) -> None:
    found = stage["without memory"].result()
    for seen in found:
        assert [each.kind for each in seen.raised] == ["TransportError", "TransportError"]
        assert seen.before.step == 2
        assert seen.after == seen.before
    assert found.pop(1).raised[0].cause == "MemoryError"
    # One wait may follow another: for what its node sends, and for the status vote.
    assert all(0.5 * STOPPED_TIMEOUT_S < seen.after_s < LIVES_ON_S for seen in found)


@pytest.mark.skipif(
    WHERE.type != "cpu", reason="autograd has a thread of its own there, and Ctrl-C waits for it"
)
def test_ctrl_c_ends_a_rank_that_waits_for_a_stopped_one(stage: dict[str, Future[int]]) -> None:
    """By the signal, and not at the timeout with an error."""
    assert stage["interrupted"].result() == -signal.SIGINT

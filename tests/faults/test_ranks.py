"""Real gloo ranks: one is killed, stopped or out of memory, and the others say so with their state intact."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.faults.scenes_ranks import LIVES_ON_S
from tests.support.ranks import Rank, perform, started, started_anew, value
from tests.support.tiers import rest
from tests.support.where import WHERE

pytestmark = pytest.mark.process

VICTIM = 1
EVERYBODY = ("topk", "nodes", "stopped", "interrupted")
"""Accidents that `make test` looks at."""


def _survive(
    folder: Path, recipe: str, sent: signal.Signals, timeout_s: float, guard_s: float, world: int = 3
) -> list[Any]:
    """Send a signal to one rank in the middle of training; what the others saw, and a stopped one later."""
    survivors = [rank for rank in range(world) if rank != VICTIM]
    with started("tests.faults.scenes_ranks", world, folder, [recipe], timeout_s) as ranks:
        _wait_for_training(folder)
        ranks[VICTIM].send_signal(sent)
        deadline_s = time.monotonic() + guard_s
        for rank in survivors:
            _wait(ranks[rank], deadline_s)
        witnesses = list(survivors)
        if sent == signal.SIGSTOP:
            ranks[VICTIM].send_signal(signal.SIGCONT)
            _wait(ranks[VICTIM], deadline_s)
            witnesses.append(VICTIM)
    results = [json.loads((folder / f"{rank}.json").read_text())[recipe] for rank in witnesses]
    assert all("error" not in result for result in results), results
    return [result["value"] for result in results]


def _wait_for_training(folder: Path) -> None:
    deadline_s, told = time.monotonic() + 100, folder / "0.json"
    while len((folder / "0.out").read_text().splitlines()) < 20:
        assert not told.exists() or told.stat().st_size < 3, told.read_text()
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


def _killed(recipe: str, folder: Path, world: int = 3) -> list[Any]:
    return _survive(folder, recipe, signal.SIGKILL, KILLED_TIMEOUT_S, guard_s=40.0, world=world)


def _stopped(folder: Path) -> list[Any]:
    return _survive(folder, "topk", signal.SIGSTOP, STOPPED_TIMEOUT_S, guard_s=60.0)


def _without_memory(folder: Path) -> list[Any]:
    timeout_s = STOPPED_TIMEOUT_S
    return value(
        perform("tests.faults.scenes_ranks", 4, folder, ["without memory"], timeout_s), "without memory"
    )


def _interrupted(folder: Path) -> tuple[int, bool]:
    """How rank 0, which waits for a stopped rank, ends at Ctrl-C; and whether it was done."""
    # In an interpreter of its own, whose end is part of it: threads that serve the network are still there.
    with started_anew("tests.faults.scenes_ranks", 2, folder, ["topk"], timeout_s=100.0) as ranks:
        _wait_for_training(folder)
        ranks[VICTIM].send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        ranks[0].send_signal(signal.SIGINT)
        code = _wait(ranks[0], time.monotonic() + 40.0)
    told = folder / "0.json"
    return code, told.exists() and "topk" in json.loads(told.read_text())


@pytest.fixture(scope="module")
def stage(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[Any]]]:
    """All accidents at once, because most of the time is spent waiting for a rank that does not answer.

    Those that only `make test-all` looks at happen where one of their tests is to run.
    """
    accidents: dict[str, Callable[[Path], Any]] = {
        "topk": partial(_killed, "topk"),
        "dense": partial(_killed, "dense"),
        "plain": partial(_killed, "plain"),
        "nodes": partial(_killed, "nodes", world=4),
        "hsdp": partial(_killed, "hsdp", world=4),
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


@pytest.mark.parametrize("recipe", rest(["topk", "dense", "plain", "nodes", "hsdp"], but=["topk", "nodes"]))
def test_survivors_of_a_killed_rank_raise_long_before_the_timeout(
    stage: dict[str, Future[Any]], recipe: str
) -> None:
    # The neighbour inside a node may be in a collective of FSDP's, whose errors are torch's.
    kinds = {"TransportError"} | ({"RuntimeError"} if recipe == "hsdp" else set())
    for seen in stage[recipe].result():
        assert seen["error"] in kinds
        assert re.search(r"\[127\.0\.0\.1\]:\d+", seen["text"]), "the peer's address"
        assert seen["again"] in kinds, "and it stays so"
        assert seen["after_s"] + seen["again_after_s"] < KILLED_TIMEOUT_S / 2
        # Means are gathered inside a node once all have agreed on the step, and its neighbour may die then.
        assert seen["intact"] or recipe == "nodes"


def test_a_stopped_rank_is_noticed_after_the_timeout_and_hears_of_it_when_it_goes_on(
    stage: dict[str, Future[Any]],
) -> None:
    timeout_s = STOPPED_TIMEOUT_S
    *survivors, stopped = stage["stopped"].result()
    for seen in (*survivors, stopped):
        assert seen["error"] == "TransportError"
        assert seen["again"] == "TransportError"
        assert seen["again_after_s"] < 2 * timeout_s
        assert seen["intact"]
    for seen in survivors:
        # One collective may be waited for after another, but not one for each bucket of the step.
        assert 0.5 * timeout_s < seen["after_s"] < 4 * timeout_s


@pytest.mark.rest
def test_where_a_rank_has_no_memory_even_for_zeros_all_raise_at_the_timeout(
    stage: dict[str, Future[Any]],
) -> None:
    found = stage["without memory"].result()
    for seen in found:
        assert seen["errors"] == ["NoneType", "NoneType", "TransportError", "TransportError"]
        assert seen["intact"]
    own = found.pop(1)
    assert own["cause"] == "MemoryError"
    # One wait may follow another: for what its node sends, and for the status vote.
    assert all(0.5 * STOPPED_TIMEOUT_S < seen["after_s"] < LIVES_ON_S for seen in found)


@pytest.mark.skipif(
    WHERE.type != "cpu", reason="autograd has a thread of its own there, and Ctrl-C waits for it"
)
def test_ctrl_c_ends_a_rank_that_waits_for_a_stopped_one(stage: dict[str, Future[Any]]) -> None:
    code, was_done = stage["interrupted"].result()
    assert code == -signal.SIGINT
    assert not was_done, "interrupted, not ended by the timeout"

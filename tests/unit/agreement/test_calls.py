"""Calls that only some ranks make: on threads, with a store in memory."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from gradwire.agreement.board import Board
from gradwire.agreement.calls import Calls
from gradwire.errors import RanksDisagree, TransportError


def _on_ranks(world: int, use: Callable[[Calls, int], object], timeout_s: float = 60.0) -> list[str]:
    """What each rank raises, with its type; empty where it raises nothing."""
    store = dist.HashStore()

    def on(rank: int) -> str:
        calls = Calls(Board(store, rank, world, timeout_s))
        try:
            use(calls, rank)
        except (RanksDisagree, TransportError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    with ThreadPoolExecutor(world) as pool:  # ranks of a `ThreadComm` take turns, and here they wait
        return list(pool.map(on, range(world)))


@pytest.mark.parametrize("world", [1, 2, 5])
def test_calls_that_all_ranks_make_pass(world: int) -> None:
    def use(calls: Calls, _rank: int) -> None:
        for number in range(20):
            calls.steps = number
            calls.begin("flush()", number)

    assert _on_ranks(world, use) == [""] * world


def test_pages_of_the_past_are_cleared() -> None:
    store = dist.HashStore()

    def on(rank: int) -> None:
        calls = Calls(Board(store, rank, 2, 60.0))
        for _ in range(50):
            calls.begin("flush()", 7)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(on, range(2)))
    # Two texts and two numbers for each of the last two calls, and of one that a rank has yet to clear.
    assert store.num_keys() <= 4 * 3


class Asked:
    """One rank's way to a store, which counts its questions by kind."""

    def __init__(self, store: dist.Store) -> None:
        self._store, self.counted = store, Counter[str]()

    def __getattr__(self, what: str) -> Any:
        self.counted[what] += 1
        return getattr(self._store, what)


def _asking(world: int, rank: int = 0, timeout_s: float = 60.0, store: Any = None) -> tuple[Calls, Asked]:
    asked: Any = Asked(store or dist.HashStore())
    return Calls(Board(asked, rank, world, timeout_s)), asked


def test_however_many_ranks_wait_for_one_no_entry_is_read() -> None:
    world, store, others = 24, dist.HashStore(), threading.Semaphore(0)

    def on(rank: int) -> Counter[str]:
        calls, asked = _asking(world, rank, store=store)
        if rank == 0:
            for _ in range(world - 1):
                others.acquire()
            time.sleep(0.7)  # the others look twice meanwhile
        else:
            others.release()
        calls.begin("save()", 3)
        return asked.counted

    with ThreadPoolExecutor(world) as pool:
        for counted in pool.map(on, range(world)):
            assert counted.keys() == {"set", "add"}
            assert counted["set"] == 1


@pytest.mark.parametrize("world", [2, 1024])
def test_a_step_that_is_waited_for_asks_one_question_at_a_time(world: int) -> None:
    calls, asked = _asking(world)
    calls.steps = 1
    for _ in range(300):
        calls.look()
    assert asked.counted == Counter(add=100)


def test_an_error_reads_each_rank_once_and_so_names_all_of_1024() -> None:
    calls, asked = _asking(1024, timeout_s=0.3)
    with pytest.raises(TransportError, match=r"for rank 1, 2, 3, .*, 1023, which made no call"):
        calls.begin("flush()", 0)
    assert (asked.counted["check"], asked.counted["get"]) == (1024, 1)


def test_a_store_that_never_answers_is_given_up_at_the_timeout() -> None:
    answered = threading.Event()

    class Silent(dist.HashStore):
        def add(self, *_: object) -> int:
            answered.wait()
            return 0

    calls, _asked = _asking(2, timeout_s=0.2, store=Silent())
    calls.steps = 1
    for _ in range(3):
        calls.look()  # the step itself will end
    with pytest.raises(TransportError, match="store of the process group cannot be reached: no answer"):
        calls.begin("flush()", 0)
    answered.set()


def test_different_calls_are_named_on_all_ranks_and_the_next_one_passes() -> None:
    def use(calls: Calls, rank: int) -> None:
        with pytest.raises(RanksDisagree) as caught:
            calls.begin("flush()" if rank == 1 else "diagnose()", 4)
        calls.begin("flush()", 4)
        raise caught.value

    for said in _on_ranks(3, use):
        assert said.startswith("RanksDisagree: not all ranks are in the same call: ")
        assert "rank 1: flush() at step 4" in said
        assert "diagnose() at step 4" in said


def test_the_same_call_at_different_steps_is_refused() -> None:
    said = _on_ranks(2, lambda calls, rank: calls.begin("flush()", 4 + rank))
    assert all("rank 0: flush() at step 4; rank 1: flush() at step 5" in each for each in said)


def _in_a_step(calls: Calls) -> None:
    """As `Backward` waits for a step that does not end."""
    calls.steps += 1
    for _ in range(1000):
        calls.look()
        time.sleep(0.01)  # the others may come to their call much later on busy cores


def test_a_rank_in_a_call_and_one_in_a_step_hear_of_each_other_and_cannot_go_on() -> None:
    def use(calls: Calls, rank: int) -> None:
        with pytest.raises(RanksDisagree) as caught:
            _in_a_step(calls) if rank == 1 else calls.begin("flush()", 4)
        with pytest.raises(RanksDisagree, match="Start all ranks again"):
            calls.begin("flush()", 4)
        raise caught.value

    for said in _on_ranks(2, use):
        assert "rank 0: flush() at step 4; rank 1: a training step" in said


def test_a_rank_that_ends_its_step_later_than_others_is_waited_for() -> None:
    def use(calls: Calls, rank: int) -> None:
        calls.steps += 1
        if rank == 1:
            for _ in range(1000):  # the others have begun as many steps, so they are through this one
                calls.look()
        calls.ended()
        calls.begin("flush()", 1)

    assert _on_ranks(3, use) == [""] * 3


def test_a_rank_that_gives_a_step_up_is_named_by_those_in_the_step() -> None:
    def use(calls: Calls, rank: int) -> None:
        if rank == 1:
            calls.give_up_step("a graph")
            return
        with pytest.raises(RanksDisagree) as caught:
            _in_a_step(calls)
        with pytest.raises(RanksDisagree, match="Start all ranks again"):
            calls.require_order()
        raise caught.value

    first, left = _on_ranks(2, use)
    assert left == ""
    assert "rank 0: a training step; rank 1: a graph" in first


def test_a_step_that_all_ranks_gave_up_is_not_held_against_the_next() -> None:
    def use(calls: Calls, rank: int) -> None:
        calls.give_up_step("a graph")
        calls.steps += 1
        for _ in range(1000 * rank):
            calls.look()
        calls.ended()
        calls.begin("flush()", 1)

    assert _on_ranks(3, use) == [""] * 3


def test_a_call_that_a_rank_does_not_make_is_given_up_at_the_timeout_with_its_name() -> None:
    def use(calls: Calls, rank: int) -> None:
        if rank != 1:
            calls.begin("flush()", 4)

    first, absent, last = _on_ranks(3, use, timeout_s=0.3)
    assert absent == ""
    for said in (first, last):
        assert said.startswith("TransportError: flush() at step 4 waited")
        assert "for rank 1, which made no call" in said


def test_a_store_that_is_gone_is_an_error_of_the_transport() -> None:
    class Gone(dist.HashStore):
        def set(self, *_: object) -> None:
            raise RuntimeError("connection reset")

    with pytest.raises(TransportError, match="store of the process group cannot be reached: connection"):
        Calls(Board(Gone(), 0, 2, 1.0)).begin("flush()", 0)

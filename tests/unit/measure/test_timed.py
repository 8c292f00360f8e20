"""Rounds are timed from their issue to their end, whoever notices it first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gradwire.measure import TimedComm, Trace
from gradwire.measure.clock import RoundTime


class Later:
    """A collective that ends when the test says so."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], None]] = []

    def wait(self) -> None:
        pass

    def then(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)


class OnePending:
    """A `Comm` whose verbs all return the same pending."""

    rank, world = 0, 2

    def __init__(self, pending: Later) -> None:
        self._pending = pending

    def __getattr__(self, verb: str) -> Callable[..., Later]:
        return lambda *arguments: self._pending


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets what the clock shows."""
    now = [0.0]
    for module in ("clock", "timed"):
        monkeypatch.setattr(f"gradwire.measure.{module}.now_s", lambda: now[0])
    return lambda at_s: now.__setitem__(0, at_s)


def test_the_end_is_announced_before_anybody_waits(clock: Callable[[float], None]) -> None:
    trace, later = Trace(), Later()
    pending = TimedComm(OnePending(later), trace, "unit").all_reduce(torch.zeros(5))
    pending.then(lambda: None)
    clock(2.0)
    later.callbacks[0]()
    clock(7.0)
    pending.wait()
    assert trace.rounds == [RoundTime("all_reduce", 20, 0.0, 2.0)]
    assert trace.rounds[0].seconds == 2.0


def test_an_algorithm_of_our_own_is_named() -> None:
    comm = TimedComm(OnePending(Later()), trace := Trace(), "unit")
    comm.all_reduce(torch.zeros(1), "tree")
    comm.broadcast(torch.zeros(1), 0, "scatter")
    comm.broadcast(torch.zeros(1), 0)
    assert [each.verb for each in trace.rounds] == ["all_reduce/tree", "broadcast/scatter", "broadcast"]


def test_messages_that_announce_nothing_end_when_somebody_has_waited(clock: Callable[[float], None]) -> None:
    trace, later = Trace(), Later()
    pending = TimedComm(OnePending(later), trace, "unit").shift(torch.zeros(3), torch.zeros(3))
    pending.then(lambda: None)
    later.callbacks[0]()
    assert trace.rounds[0].seconds == 0.0
    clock(3.0)
    pending.wait()
    clock(4.0)
    pending.wait()
    assert trace.rounds == [RoundTime("shift", 12, 0.0, 3.0)]

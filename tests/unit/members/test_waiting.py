"""A replica that waits for a quorum says so, once, and goes on when there is one."""

from __future__ import annotations

import logging
import threading
from unittest.mock import patch

import pytest
import torch

import gradwire
from gradwire.errors import TransportError
from gradwire.members.base import Card, Entry, Roster
from tests.support.command import eventually
from tests.support.models import perceptron

GUARD_S = 30.0


class Late:
    """`Members` of one replica, whose quorum comes when it is let."""

    name = id = "site-a"
    address = "127.0.0.1"

    def __init__(self, alone_s: float | None = None) -> None:
        self.alone_s = alone_s
        self.comes = threading.Event()
        self.refuses = 0
        self._asked = 0

    def ask(self, card: Card) -> Roster:
        if self.refuses:
            self.refuses -= 1
            raise TransportError("the lighthouse is away")
        assert self.comes.wait(GUARD_S)
        self._asked += 1
        return Roster(self._asked, (Entry(self.name, self.id, card),))

    def close(self) -> None:
        """Nothing is held."""


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines about the wait."""
    return [each for each in caplog.messages if "quorum" in each]


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="gradwire")


def begun(members: Late) -> tuple[torch.nn.Module, torch.optim.Optimizer, gradwire.OuterWire]:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    return model, optimizer, gradwire.outer(model, optimizer, "int4", every=1, members=members)


def stepped(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    optimizer.step()


@pytest.mark.rest
def test_a_replica_that_waits_says_so_once_and_how_long_it_was(caplog: pytest.LogCaptureFixture) -> None:
    members = Late()

    def let() -> None:
        eventually(lambda: bool(told(caplog)), GUARD_S)
        members.comes.set()

    threading.Thread(target=let, daemon=True).start()
    with patch("gradwire.members.membership.PATIENCE_S", 0.05):
        model, optimizer, wire = begun(members)
    waits, ended = told(caplog)
    assert waits == "site-a: no quorum yet: this replica waits for other members"
    assert ended.startswith("site-a: the wait for a quorum has ended after ")
    stepped(model, optimizer)
    assert wire.rounds == 1
    assert len(told(caplog)) == 2  # a quorum that comes at once is not worth a line
    wire.detach()


def test_a_replica_that_trains_meanwhile_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    members = Late(alone_s=0.0)
    members.comes.set()
    model, optimizer, wire = begun(members)
    members.comes.clear()
    members.refuses = 3
    with (
        patch("gradwire.members.membership.PATIENCE_S", 0.05),
        patch("gradwire.members.membership.PAUSE_S", 0.01),
    ):
        stepped(model, optimizer)
        assert eventually(lambda: len(told(caplog)) == 2, GUARD_S)
        stepped(model, optimizer)
        assert wire.rounds == 0
        members.comes.set()
        assert eventually(lambda: len(told(caplog)) == 3, GUARD_S)
    assert told(caplog)[0] == "site-a: no quorum: the lighthouse is away"
    assert "local steps go on" in told(caplog)[1]
    stepped(model, optimizer)
    assert wire.rounds == 1
    wire.detach()

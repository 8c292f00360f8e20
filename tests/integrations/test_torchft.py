"""The contract of `gradwire.members.torchft` with the lighthouse of torchft, and the example that uses it."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from torchft.coordination import LighthouseServer

import gradwire
from gradwire.errors import TransportError
from gradwire.members.base import Card, Roster
from tests.integrations.ranks import GUARD_S, ROOT

CARD = Card(terms={"recipe": "int4"}, address="127.0.0.1:1", rounds=3, number=7)


def opened(port: int = 0) -> tuple[Any, int]:
    """A lighthouse that waits for two members, and its port."""
    server = LighthouseServer(
        bind=f"127.0.0.1:{port}", min_replicas=2, join_timeout_ms=500, heartbeat_timeout_ms=1000
    )
    return server, int(server.address().rpartition(":")[2].strip("/"))


@pytest.fixture
def lighthouse() -> Iterator[str]:
    """The URL of one."""
    server, port = opened()
    yield f"http://127.0.0.1:{port}"
    server.shutdown()


def asked(*members: tuple[Any, Card]) -> list[Roster]:
    with ThreadPoolExecutor(len(members)) as threads:
        return list(threads.map(lambda each: each[0].ask(each[1]), members))


def test_all_members_of_a_quorum_see_the_same_cards_and_each_quorum_is_later(lighthouse: str) -> None:
    one = gradwire.members.torchft(lighthouse, "site-a", quorum_s=20)
    other = gradwire.members.torchft(lighthouse, "site-b", quorum_s=20)
    theirs = replace(CARD, rounds=4)
    first, again = asked((one, CARD), (other, theirs))
    assert first == again
    cards = {each.name: replace(each.card or CARD, living=()) for each in first.entries}
    assert cards == {"site-a": CARD, "site-b": theirs}
    assert {each.id for each in first.entries} == {one.id, other.id}
    second, _ = asked((one, CARD), (other, theirs))
    assert second.moment > first.moment  # of the same members, too
    one.close()
    other.close()


def test_a_lighthouse_that_starts_again_at_its_address_is_found_by_those_who_ask() -> None:
    server, port = opened()
    url = f"http://127.0.0.1:{port}"
    both = [gradwire.members.torchft(url, name, quorum_s=30) for name in ("site-a", "site-b")]
    first, _ = asked(*((each, CARD) for each in both))
    server.shutdown()
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(each.ask, CARD) for each in both]
        server, _port = opened(port)
        second, same = [each.result() for each in waiting]
    assert second == same
    assert second.moment > first.moment
    assert {each.name for each in second.entries} == {"site-a", "site-b"}
    for each in both:
        each.close()
    server.shutdown()


def test_a_member_alone_waits_and_then_raises(lighthouse: str) -> None:
    alone = gradwire.members.torchft(lighthouse, "site-a", quorum_s=2)
    with pytest.raises(TransportError, match=r"no quorum at .* in 2 s"):
        alone.ask(CARD)
    alone.close()


def test_what_is_wrong_is_said(lighthouse: str) -> None:
    with pytest.raises(ValueError, match="no name of this replica"):
        gradwire.members.torchft(lighthouse, "")
    with pytest.raises(ValueError, match="neither 'wait' nor 'train'"):
        gradwire.members.torchft(lighthouse, "site-a", alone="go")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not an address or interface of this machine"):
        gradwire.members.torchft(lighthouse, "site-a", address="192.0.2.1")


@pytest.mark.process
def test_a_site_is_killed_and_comes_back() -> None:
    command = [sys.executable, str(ROOT / "examples" / "come_and_go.py")]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=GUARD_S, check=True).stdout
    assert "of site-a and site-b, loss" in printed
    assert re.search(r"site-a: after round \d+: left site-b", printed)
    assert re.search(r"after round \d+: healed site-b", printed)

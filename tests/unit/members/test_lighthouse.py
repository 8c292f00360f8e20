"""The contract of `gradwire.members.torchft` with the lighthouse of torchft. Skipped without torchft."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

import gradwire
from gradwire.errors import TransportError
from gradwire.members.address import address_towards, host_of, own_address
from gradwire.members.base import Card, Roster

needs_torchft = pytest.mark.skipif(
    find_spec("torchft") is None, reason="needs torchft: pip install 'gradwire[elastic]'"
)
CARD = Card(terms={"recipe": "int4"}, address="127.0.0.1:1", rounds=3, number=7)


def opened(port: int = 0) -> tuple[Any, int]:
    """A lighthouse that waits for two members, and its port."""
    from torchft.coordination import LighthouseServer

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


@needs_torchft
def test_all_members_of_a_quorum_see_the_same_cards_and_each_quorum_is_later(lighthouse: str) -> None:
    one = gradwire.members.torchft(lighthouse, "site-a", quorum_s=20)
    other = gradwire.members.torchft(lighthouse, "site-b", quorum_s=20)
    theirs = replace(CARD, rounds=4)
    first, again = asked((one, CARD), (other, theirs))
    assert first == again
    assert {each.name: each.card for each in first.entries} == {"site-a": CARD, "site-b": theirs}
    assert {each.id for each in first.entries} == {one.id, other.id}
    second, _ = asked((one, CARD), (other, theirs))
    assert second.moment > first.moment  # of the same members, too
    one.close()
    other.close()


@needs_torchft
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


@needs_torchft
def test_a_member_alone_waits_and_then_raises(lighthouse: str) -> None:
    alone = gradwire.members.torchft(lighthouse, "site-a", quorum_s=2)
    with pytest.raises(TransportError, match=r"no quorum at .* in 2 s"):
        alone.ask(CARD)
    alone.close()


@needs_torchft
def test_what_is_wrong_is_said(lighthouse: str) -> None:
    with pytest.raises(ValueError, match="no name of this replica"):
        gradwire.members.torchft(lighthouse, "")
    with pytest.raises(ValueError, match="neither 'wait' nor 'train'"):
        gradwire.members.torchft(lighthouse, "site-a", alone="go")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not an address or interface of this machine"):
        gradwire.members.torchft(lighthouse, "site-a", address="192.0.2.1")


@pytest.mark.skipif(find_spec("torchft") is not None, reason="torchft is here")
def test_without_torchft_the_error_says_what_to_install() -> None:
    with pytest.raises(ImportError, match=r"pip install 'gradwire\[elastic\]'"):
        gradwire.members.torchft("http://127.0.0.1:9", "site-a")


def test_addresses_are_numbers_of_this_machine() -> None:
    assert own_address("lo") == own_address("localhost") == address_towards("127.0.0.1") == "127.0.0.1"
    assert host_of("http://10.0.0.1:29510") == "10.0.0.1"
    with pytest.raises(ValueError, match="no address of a lighthouse"):
        host_of("http://:29510")

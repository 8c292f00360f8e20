"""What c10d is asked for, in which order; what comes of it over real ranks is in tests/process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from gradwire.comm import ProcessGroupComm
from gradwire.comm.base import DONE
from gradwire.comm.process_group import SHORT_BYTES


class _Group:
    """Rank 0 of so many."""

    def __init__(self, world: int) -> None:
        self._world = world

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._world


@pytest.fixture
def issued(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What c10d would be asked for, in order; nothing is, and all is done at once."""
    asked: list[str] = []
    monkeypatch.setattr(dist, "irecv", lambda _out, **_peer: asked.append("receive") or DONE)
    monkeypatch.setattr(dist, "isend", lambda _sent, **_peer: asked.append("send") or DONE)
    return asked


@pytest.mark.parametrize("verb", ["swap", "shift", "all_to_all"])
def test_receives_are_announced_before_anything_is_sent(verb: str, issued: list[str]) -> None:
    world = 2 if verb == "swap" else 4
    comm = ProcessGroupComm(cast("dist.ProcessGroup", _Group(world)))
    rows = torch.zeros(world, SHORT_BYTES + 4, dtype=torch.uint8)
    if verb == "swap":
        comm.all_gather(rows, rows[0].clone()).wait()
    elif verb == "shift":
        comm.shift(rows[0], rows[1]).wait()
    else:
        comm.all_to_all(rows, rows.clone()).wait()
    assert issued == sorted(issued)
    assert set(issued) == {"receive", "send"}


def test_rows_may_come_where_they_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a rank that pays for a round in which it has nothing to send."""
    asked: list[int] = []
    monkeypatch.setattr(dist, "all_to_all_single", lambda *given, **_: asked.append(len(given)) or DONE)
    rows = torch.zeros(4, 2)
    ProcessGroupComm(cast("dist.ProcessGroup", _Group(4))).all_to_all(rows, rows).wait()
    assert asked == [2]


@pytest.mark.parametrize(
    ("byte_s", "border"),
    [(None, SHORT_BYTES), (0.0, SHORT_BYTES), (1 / 25e6, SHORT_BYTES), (8 / 13e6, 8125), (1.0, 0)],
)
@pytest.mark.parametrize("world", [2, 4])
def test_on_a_slow_link_less_is_short(
    world: int, byte_s: float | None, border: int, issued: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "all_to_all_single", lambda *_, **__: issued.append("library") or DONE)
    comm = ProcessGroupComm(cast("dist.ProcessGroup", _Group(world)))
    if byte_s is not None:
        comm.expect(byte_s)
    for excess in (0, 1):
        del issued[:]
        rows = torch.zeros(world, border + excess, dtype=torch.uint8)
        if world == 2:
            comm.all_gather(rows, rows[0].clone()).wait()
        else:
            comm.all_to_all(rows, rows.clone()).wait()
        assert ("library" in issued) == (excess == 0)


def test_a_scatter_announces_a_part_before_it_hands_on_the_last_one(issued: list[str]) -> None:
    comm = ProcessGroupComm(cast("dist.ProcessGroup", _Group(4)))
    comm.broadcast(torch.zeros(8), 3, "scatter").wait()
    assert issued == ["receive", *["receive", "send"] * 3]


def test_messages_of_a_device_are_issued_as_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    issued: list[list[tuple[Any, int, int]]] = []

    def together(operations: list[Any]) -> list[Any]:
        issued.append([(each.op, each.tensor.numel(), each.group_peer) for each in operations])
        return []

    monkeypatch.setattr(
        dist, "P2POp", lambda op, tensor, **peer: SimpleNamespace(op=op, tensor=tensor, **peer)
    )
    monkeypatch.setattr(dist, "batch_isend_irecv", together)
    ProcessGroupComm(cast(dist.ProcessGroup, _Group(3))).shift(
        torch.empty(5, device="meta"), torch.empty(7, device="meta")
    ).wait()
    assert issued == [[(dist.irecv, 5, 2), (dist.isend, 7, 1)]]

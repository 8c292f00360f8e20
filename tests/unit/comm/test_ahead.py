"""Receives that are announced ahead: what is announced when, and that no message goes astray."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm import ahead


class _Group:
    """Stands for a process group."""


class _Link:
    """Messages from one peer: those of a tag fill its receives in the order in which these were announced."""

    def __init__(self) -> None:
        self.series = ahead.ReceiveSeries(0)
        self.buffers: list[weakref.ref[Tensor]] = []
        self.announced: Counter[int] = Counter()
        self._sent: dict[int, list[bytes]] = {}

    def irecv(self, out: Tensor, group: object, group_src: int, tag: int) -> Any:
        place, self.announced[tag] = self.announced[tag], self.announced[tag] + 1
        link = self
        self.buffers.append(weakref.ref(out))

        class Coming:
            def wait(self) -> None:
                message = torch.frombuffer(bytearray(link._sent[tag][place]), dtype=torch.uint8)
                out.view(-1).view(torch.uint8).copy_(message)

        return Coming()

    def send(self, message: Tensor) -> None:
        tag = self.series.tag_of(message, 0)
        self._sent.setdefault(tag, []).append(message.numpy().tobytes())


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> _Link:
    made = _Link()
    monkeypatch.setattr(dist, "irecv", made.irecv)
    return made


def came(link: _Link, group: Any, *values: Tensor) -> None:
    """Each is announced, sent, and arrives."""
    for value in values:
        out = torch.full_like(value, -1)
        receive = ahead.Receive(link.series, group, out, 1, link.series.tag_of(value, 0))
        link.send(value)
        receive.wait()
        assert torch.equal(out, value)


def at_once(link: _Link, group: Any, *values: Tensor) -> None:
    """All are announced, then sent, and arrive; who waits twice is told twice."""
    receives = []
    for value in values:
        out = torch.full_like(value, -1)
        receives.append((value, out, ahead.Receive(link.series, group, out, 1, link.series.tag_of(value, 0))))
        link.send(value)
    for value, out, receive in receives:
        receive.wait()
        receive.wait()
        assert torch.equal(out, value)


def waiting(link: _Link, value: Tensor, messages: int) -> int:
    """Receives of this length that are announced, and whose message is not there yet."""
    return link.announced[link.series.tag_of(value, 0)] - messages


def test_what_comes_again_is_announced_before_it_is_due(link: _Link) -> None:
    group, value = _Group(), torch.arange(5.0)
    for number in range(1, 5):
        came(link, group, value + number)
        assert waiting(link, value, number) == (number > 1)


def test_messages_that_are_under_way_at_once_are_all_announced_in_the_step_before(link: _Link) -> None:
    group, values = _Group(), [torch.arange(5.0) + number for number in range(6)]
    for step in range(1, 4):
        before = waiting(link, values[0], 4 * (step - 1))
        at_once(link, group, *values[:4])
        assert before == (0 if step == 1 else 4)
    at_once(link, group, *values)
    assert waiting(link, values[0], 18) == 6


def test_one_length_does_not_take_the_room_of_others(link: _Link) -> None:
    group, pieces, other = _Group(), [torch.ones(2**15) for _ in range(140)], torch.ones(7)
    at_once(link, group, *pieces)
    at_once(link, group, *pieces)
    held = waiting(link, pieces[0], 280)
    assert 1 < held < 140
    came(link, group, other, other)
    assert waiting(link, other, 2) == 1


def test_lengths_may_alternate(link: _Link) -> None:
    group, short, long = _Group(), torch.arange(3.0), torch.arange(70)
    came(link, group, short, long, long + 1, short + 2, short + 3, short.double(), long + 4, short + 5)
    assert waiting(link, short, 4) == waiting(link, long, 3) == 1
    came(link, group, short + 6, long + 7)


def test_a_peer_that_has_sent_its_last_message_and_gone_costs_no_message(
    link: _Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, value = _Group(), torch.arange(5.0)
    came(link, group, value, value + 1)
    out = torch.empty_like(value)
    link.send(value + 2)

    def gone(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "irecv", gone)
    ahead.Receive(link.series, group, out, 1, link.series.tag_of(value, 0)).wait()
    assert torch.equal(out, value + 2)
    with pytest.raises(RuntimeError, match="closed"):
        ahead.Receive(link.series, group, out, 1, link.series.tag_of(value, 0))


def test_what_never_comes_again_is_not_announced(link: _Link) -> None:
    group = _Group()
    lengths = [torch.ones(size) for size in range(1, 3000)]
    came(link, group, *lengths)
    assert set(link.announced.values()) == {1}
    again = torch.ones(5000)
    came(link, group, again, again, again)
    assert waiting(link, again, 3) == 1, "what comes again later still is"


def test_announced_receives_have_bounded_room(link: _Link) -> None:
    group, values = _Group(), [torch.ones(2**18 - size, dtype=torch.float32) for size in range(40)]
    came(link, group, *values, *values, *values)
    held = sum(waiting(link, value, 3) * value.nbytes for value in values)
    assert ahead.ROOM_BYTES - 2**20 < held <= ahead.ROOM_BYTES


def test_tags_tell_lengths_and_kinds_apart_and_long_messages_keep_theirs() -> None:
    sizes = [torch.empty(size, dtype=torch.uint8) for size in (1, 2, 16, ahead.LONGEST_BYTES)]
    series = ahead.ReceiveSeries(0)
    tags = {series.tag_of(message, kind) for message in sizes for kind in (0, 1)}
    assert len(tags) == 8
    assert min(tags) > 1
    assert max(tags) < 2**31
    beyond = torch.empty(ahead.LONGEST_BYTES + 1, dtype=torch.uint8)
    assert [series.tag_of(beyond, kind) for kind in (0, 1)] == [0, 1]


def test_a_series_that_has_ended_holds_nothing_and_the_next_one_meets_nothing_of_it(link: _Link) -> None:
    group, value = _Group(), torch.arange(5.0)
    at_once(link, group, value, value + 1)
    at_once(link, group, value, value + 1)
    announced = waiting(link, value, 4)
    assert sum(each() is not None for each in link.buffers) >= announced == 2
    link.series.end()
    gc.collect()
    assert all(each() is None for each in link.buffers)
    following = ahead.ReceiveSeries.after(ahead.ReceiveSeries.last)
    assert following is not None
    link.series = following
    came(link, group, value + 2, value + 3)
    assert waiting(link, value, 2) == 1


def test_series_have_tags_of_their_own_as_long_as_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead.ReceiveSeries, "last", -1)
    longest, least = torch.empty(ahead.LONGEST_BYTES, dtype=torch.uint8), torch.empty(1, dtype=torch.uint8)
    before, count = 1, 0
    while (series := ahead.ReceiveSeries.after(ahead.ReceiveSeries.last)) is not None:
        assert before < series.tag_of(least, 0) < series.tag_of(longest, 1)
        before, count = series.tag_of(longest, 1), count + 1
    assert count > 1000
    assert before < 2**31

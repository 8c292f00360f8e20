"""Frames go around a ring, whatever their lengths, and whatever fails on the way."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from gradwire.comm import Round, ThreadComm, owe_zeros, run_ranks
from gradwire.comm.base import Pending
from gradwire.errors import TransportError, WireError
from gradwire.exchange.ring import Framing, RingAllReduce, RingSchedule
from gradwire.measure.metered import MeteredComm
from tests.support.looped import looped
from tests.support.rounds import allows
from tests.unit.exchange.framings import Coarse, Plain

WORLDS = range(2, 9)
SIZES = (0, 1, 3, 7, 8, 100, 1009)


def addend(rank: int, numel: int) -> Tensor:
    """Integers by position and rank: sums are exact, and a misplaced element shows."""
    return (torch.arange(numel) % 101 + 1.0) * (rank + 1)


def around(
    numel: int, world: int, segment: int, framing: Callable[[int], Framing] = lambda _rank: Plain()
) -> list[tuple[Tensor, RingAllReduce, list[Round]]]:
    """What every rank holds after a ring."""

    def body(comm: ThreadComm) -> tuple[Tensor, RingAllReduce, list[Round]]:
        data, metered = addend(comm.rank, numel), MeteredComm(comm)
        ring = RingAllReduce(data, framing(comm.rank), metered, RingSchedule(numel, world, segment))
        ring.start()
        issued = len(metered.rounds)
        ring.finish()
        assert len(metered.rounds) == issued
        return data, ring, metered.rounds

    return run_ranks(world, body)


@looped(("world", "segment"), product(WORLDS, [1, 5, 1 << 20]), few=4)
def test_every_rank_gets_the_sum(world: int, segment: int) -> None:
    for numel in SIZES if segment > 1 else SIZES[:-2]:
        expected = sum(addend(rank, numel) for rank in range(world))
        for data, ring, _rounds in around(numel, world, segment):
            assert torch.equal(data, expected), (numel, segment)
            assert not ring.failures
            assert not ring.is_lost


@looped("world", WORLDS)
def test_partitions_and_segments_cover_everything_once_and_are_as_equal_as_can_be(world: int) -> None:
    for numel in SIZES:
        for segment in (1, 4, 1 << 20):
            schedule = RingSchedule(numel, world, segment)
            places = [schedule.place(p, s) for p in range(world) for s in range(schedule.segments)]
            assert places[0][0] == 0
            assert places[-1][1] == numel
            assert all(one[1] == other[0] for one, other in pairwise(places))
            lengths = [stop - start for start, stop in places]
            assert max(lengths) <= schedule.longest_segment <= max(segment, 1)
            assert schedule.segments == 1 or schedule.segments >= 4


@looped("world", WORLDS)
def test_a_lap_issues_what_its_course_announces(world: int) -> None:
    for segment in (5, 1 << 20):
        schedule = RingSchedule(100, world, segment)
        announced = schedule.rounds(Plain().bound(schedule.longest_segment))
        for _data, _lap, rounds in around(100, world, segment):
            alone = schedule.messages if schedule.segments == 1 else 1
            assert len(rounds) == len(announced) == schedule.messages + alone
            assert all(allows(a, b) for a, b in zip(announced, rounds, strict=True))


def test_lengths_are_told_two_messages_ahead_if_there_are_several_segments() -> None:
    schedule = RingSchedule(100, 4, 10)
    assert [list(schedule.made(m)) for m in (0, 1, 21, 22, 23)] == [[0, 1, 2], [3], [23], [], []]
    assert [list(schedule.told(m)) for m in range(3)] == [[0, 1], [], []]
    alone = RingSchedule(100, 4, 100)
    assert [(list(alone.made(m)), list(alone.told(m))) for m in range(2)] == [([0], [0]), ([1], [1])]


@looped("world", [2, 3, 5])
def test_the_order_of_sums_is_that_of_a_ring_which_ends_at_the_owner(world: int) -> None:
    def body(comm: ThreadComm) -> Tensor:
        data = torch.randn(100, generator=torch.Generator().manual_seed(comm.rank))
        ring = RingAllReduce(data, Plain(), comm, RingSchedule(100, world, 7))
        ring.start()
        ring.finish()
        return data

    found = run_ranks(world, body)
    addends = [torch.randn(100, generator=torch.Generator().manual_seed(rank)) for rank in range(world)]
    for partition in range(world):
        here = slice(partition * 100 // world, (partition + 1) * 100 // world)
        expected = addends[partition][here]
        for hop in range(1, world):
            expected = addends[(partition + hop) % world][here] + expected
        for data in found:
            assert torch.equal(data[here], expected)


@looped("world", [2, 3, 4])
def test_the_owner_uses_what_its_frame_says(world: int) -> None:
    def body(comm: ThreadComm) -> Tensor:
        data = torch.randn(50, generator=torch.Generator().manual_seed(comm.rank)) * 9
        ring = RingAllReduce(data, Coarse(), comm, RingSchedule(50, world, 6))
        ring.start()
        ring.finish()
        return data

    first, *others = run_ranks(world, body)
    assert torch.equal(first, first.round())
    assert all(torch.equal(first, other) for other in others)


class Failing(Plain):
    """Fails in one place."""

    def __init__(self, verb: str, hop: int) -> None:
        super().__init__()
        self.verb, self.hop = verb, hop

    def encode(self, x: Tensor, start: int, hop: int, room: Tensor) -> int:
        if (self.verb, self.hop) == ("encode", hop):
            raise SystemExit
        return super().encode(x, start, hop, room)

    def decode(self, data: Tensor, out: Tensor, start: int, hop: int, add: bool) -> None:
        if (self.verb, self.hop) == ("decode", hop):
            raise WireError("broken")
        super().decode(data, out, start, hop, add)

    def round_trip(self, x: Tensor, start: int) -> None:
        if self.verb == "round_trip":
            raise ZeroDivisionError


@looped("segment", [5, 1 << 20])
@looped(
    ("verb", "hop"), [*((verb, hop) for verb in ("encode", "decode") for hop in range(3)), ("round_trip", 2)]
)
def test_a_failure_is_known_everywhere_it_matters_and_stops_nobody(verb: str, hop: int, segment: int) -> None:
    announced = RingSchedule(100, 3, segment).rounds(1000)
    found = around(100, 3, segment, lambda rank: Failing(verb, hop) if rank == 1 else Plain())
    assert found[1][1].failures
    assert all(not ring.failures for _data, ring, _rounds in (found[0], found[2]))
    expected = sum(addend(rank, 100) for rank in range(3))
    for data, ring, rounds in found:
        assert len(rounds) == len(announced)
        # No wrong number: what is lost is NaN, and a rank that has lost something knows it.
        wrong = data != expected
        assert data[wrong].isnan().all()
        assert ring.is_lost or not wrong.any()


@looped("segment", [5, 1 << 20])
@looped("failing", range(3))
def test_zeros_of_a_rank_that_fails_before_its_first_message_are_read(failing: int, segment: int) -> None:
    schedule = RingSchedule(100, 3, segment)
    announced = schedule.rounds(Plain().bound(schedule.longest_segment))

    def body(comm: ThreadComm) -> tuple[Tensor, list[Round]]:
        data, metered = addend(comm.rank, 100), MeteredComm(comm)
        if comm.rank == failing:
            owe_zeros(metered, announced[len(metered.rounds) :], data.device)
        else:
            ring = RingAllReduce(data, Plain(), metered, schedule)
            ring.start()
            ring.finish()
            assert ring.is_lost
            assert not ring.failures
        return data, metered.rounds

    for rank, (data, rounds) in enumerate(run_ranks(3, body)):
        assert len(rounds) == len(announced)
        assert all(allows(a, b) for a, b in zip(announced, rounds, strict=True))
        # It adds to every partition before its owner finishes it.
        assert data.isnan().all() or rank == failing


class Boasting:
    """A rank that announces longer frames than there may be, ahead of them or in their trailers."""

    def __init__(self, comm: ThreadComm, dtype: torch.dtype) -> None:
        self.rank, self._comm, self._dtype = comm.rank, comm, dtype

    def shift(self, out: Tensor, tensor: Tensor, by: int = 1, tells: int = 0) -> Pending:
        if tensor.dtype == self._dtype:
            words = tensor.view(torch.int64)
            words[-1] = 10_000
        return self._comm.shift(out, tensor, by)


@looped("dtype", [torch.int64, torch.uint8])
def test_a_length_beyond_the_bound_is_not_believed(dtype: torch.dtype) -> None:
    def body(comm: ThreadComm) -> None:
        among = Boasting(comm, dtype) if comm.rank == 1 else comm
        RingAllReduce(addend(comm.rank, 100), Plain(), among, RingSchedule(100, 3, 10)).start()

    with pytest.raises(TransportError, match="announces 10000 bytes"):
        run_ranks(3, body)

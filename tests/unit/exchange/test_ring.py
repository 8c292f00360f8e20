"""Frames go around a ring, whatever their lengths, and whatever fails on the way."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from gradwire.comm import Round, ThreadComm, owe_zeros, run_ranks
from gradwire.comm.base import Pending
from gradwire.errors import TransportError, WireError
from gradwire.exchange.ring import Course, Framing, Lap
from gradwire.measure.observed import Observed
from tests.unit.exchange.framings import Coarse, Plain

WORLDS = range(2, 9)
SIZES = (0, 1, 3, 7, 8, 100, 1009)


def addend(rank: int, numel: int) -> Tensor:
    """Integers by position and rank: sums are exact, and a misplaced element shows."""
    return (torch.arange(numel) % 101 + 1.0) * (rank + 1)


def around(
    numel: int, world: int, segment: int, framing: Callable[[int], Framing] = lambda _rank: Plain()
) -> list[tuple[Tensor, Lap, list[Round]]]:
    """What every rank holds after a lap."""

    def body(comm: ThreadComm) -> tuple[Tensor, Lap, list[Round]]:
        data, metered = addend(comm.rank, numel), Observed(comm)
        lap = Lap(data, framing(comm.rank), metered, Course(numel, world, segment))
        lap.start()
        issued = len(metered.rounds)
        lap.finish()
        assert len(metered.rounds) == issued
        return data, lap, metered.rounds

    return run_ranks(world, body)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("segment", [1, 5, 1 << 20])
def test_every_rank_gets_the_sum(world: int, segment: int) -> None:
    for numel in SIZES if segment > 1 else SIZES[:-2]:
        expected = sum(addend(rank, numel) for rank in range(world))
        for data, lap, _rounds in around(numel, world, segment):
            assert torch.equal(data, expected), (numel, segment)
            assert not lap.failures
            assert not lap.is_lost


@pytest.mark.parametrize("world", WORLDS)
def test_partitions_and_segments_cover_everything_once_and_are_as_equal_as_can_be(world: int) -> None:
    for numel in SIZES:
        for segment in (1, 4, 1 << 20):
            course = Course(numel, world, segment)
            places = [course.place(p, s) for p in range(world) for s in range(course.segments)]
            assert places[0][0] == 0
            assert places[-1][1] == numel
            assert all(one[1] == other[0] for one, other in pairwise(places))
            lengths = [stop - start for start, stop in places]
            assert max(lengths) <= course.longest_segment <= max(segment, 1)
            assert course.segments == 1 or course.segments >= 4


@pytest.mark.parametrize("world", WORLDS)
def test_a_lap_issues_what_its_course_announces(world: int) -> None:
    for segment in (5, 1 << 20):
        course = Course(100, world, segment)
        announced = course.rounds(Plain().bound(course.longest_segment))
        for _data, _lap, rounds in around(100, world, segment):
            alone = course.messages if course.segments == 1 else 1
            assert len(rounds) == len(announced) == course.messages + alone
            assert all(a.allows(b) for a, b in zip(announced, rounds, strict=True))


def test_lengths_are_told_two_messages_ahead_if_there_are_several_segments() -> None:
    course = Course(100, 4, 10)
    assert [list(course.made(m)) for m in (0, 1, 21, 22, 23)] == [[0, 1, 2], [3], [23], [], []]
    assert [list(course.told(m)) for m in range(3)] == [[0, 1], [], []]
    alone = Course(100, 4, 100)
    assert [(list(alone.made(m)), list(alone.told(m))) for m in range(2)] == [([0], [0]), ([1], [1])]


@pytest.mark.parametrize("world", [2, 3, 5])
def test_the_order_of_sums_is_that_of_a_ring_which_ends_at_the_owner(world: int) -> None:
    def body(comm: ThreadComm) -> Tensor:
        data = torch.randn(100, generator=torch.Generator().manual_seed(comm.rank))
        lap = Lap(data, Plain(), comm, Course(100, world, 7))
        lap.start()
        lap.finish()
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


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_owner_uses_what_its_frame_says(world: int) -> None:
    def body(comm: ThreadComm) -> Tensor:
        data = torch.randn(50, generator=torch.Generator().manual_seed(comm.rank)) * 9
        lap = Lap(data, Coarse(), comm, Course(50, world, 6))
        lap.start()
        lap.finish()
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

    def settle(self, x: Tensor, start: int) -> None:
        if self.verb == "settle":
            raise ZeroDivisionError


@pytest.mark.parametrize("segment", [5, 1 << 20])
@pytest.mark.parametrize(
    ("verb", "hop"), [*((verb, hop) for verb in ("encode", "decode") for hop in range(3)), ("settle", 2)]
)
def test_a_failure_is_known_everywhere_it_matters_and_stops_nobody(verb: str, hop: int, segment: int) -> None:
    announced = Course(100, 3, segment).rounds(1000)
    found = around(100, 3, segment, lambda rank: Failing(verb, hop) if rank == 1 else Plain())
    assert found[1][1].failures
    assert all(not lap.failures for _data, lap, _rounds in (found[0], found[2]))
    expected = sum(addend(rank, 100) for rank in range(3))
    for data, lap, rounds in found:
        assert len(rounds) == len(announced)
        # No wrong number: what is lost is NaN, and whoever has lost something knows it.
        wrong = data != expected
        assert data[wrong].isnan().all()
        assert lap.is_lost or not wrong.any()


@pytest.mark.parametrize("segment", [5, 1 << 20])
@pytest.mark.parametrize("failing", range(3))
def test_zeros_of_a_rank_that_fails_before_its_first_message_are_read(failing: int, segment: int) -> None:
    course = Course(100, 3, segment)
    announced = course.rounds(Plain().bound(course.longest_segment))

    def body(comm: ThreadComm) -> tuple[Tensor, list[Round]]:
        data, metered = addend(comm.rank, 100), Observed(comm)
        if comm.rank == failing:
            owe_zeros(metered, announced[len(metered.rounds) :], data.device)
        else:
            lap = Lap(data, Plain(), metered, course)
            lap.start()
            lap.finish()
            assert lap.is_lost
            assert not lap.failures
        return data, metered.rounds

    for rank, (data, rounds) in enumerate(run_ranks(3, body)):
        assert len(rounds) == len(announced)
        assert all(a.allows(b) for a, b in zip(announced, rounds, strict=True))
        # It adds to every partition before its owner finishes it.
        assert data.isnan().all() or rank == failing


class Boasting:
    """A rank that announces longer frames than there may be, ahead of them or in their tails."""

    def __init__(self, comm: ThreadComm, dtype: torch.dtype) -> None:
        self.rank, self._comm, self._dtype = comm.rank, comm, dtype

    def shift(self, out: Tensor, tensor: Tensor, by: int = 1) -> Pending:
        if tensor.dtype == self._dtype:
            words = tensor.view(torch.int64)
            words[-1] = 10_000
        return self._comm.shift(out, tensor, by)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_a_length_beyond_the_bound_is_not_believed(dtype: torch.dtype) -> None:
    def body(comm: ThreadComm) -> None:
        among = Boasting(comm, dtype) if comm.rank == 1 else comm
        Lap(addend(comm.rank, 100), Plain(), among, Course(100, 3, 10)).start()

    with pytest.raises(TransportError, match="announces 10000 bytes"):
        run_ranks(3, body)

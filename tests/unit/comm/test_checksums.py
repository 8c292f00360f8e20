"""Checked messages: what comes is right, or said to be damaged, on the ranks that must know."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradwire.comm import Comm, Pending, Round, ThreadComm, gathered, run_ranks
from gradwire.comm.base import DONE, SHORT_BYTES
from gradwire.comm.checksums import CheckedComm, SealedLayout
from gradwire.errors import PeerFailed, WireError
from tests.support.damage import Damage, DamagingComm
from tests.support.looped import looped
from tests.support.tiers import rest
from tests.support.verbs import CALLS, Call

WORLDS = (1, 2, 3, 4, 5, 7)
UNLUCKY = 1


@looped("world", WORLDS)
@looped("call", CALLS)
def test_undamaged_every_verb_does_what_it_did(call: Call, world: int) -> None:
    found = run_ranks(world, lambda comm: call.issue(CheckedComm(comm)))
    for rank, result in enumerate(found):
        assert torch.equal(result, call.expected(rank, world))


@looped("numel", [0, 1, 3, 1021, 4099])
@looped("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.float64])
@looped("world", [2, 3])
def test_sums_of_integers_are_those_of_the_inner_comm(numel: int, dtype: torch.dtype, world: int) -> None:
    def body(comm: ThreadComm) -> tuple[Tensor, Tensor]:
        plain = (torch.arange(numel) % 7 + comm.rank).to(dtype)
        checked = plain.clone()
        comm.all_reduce(plain).wait()
        CheckedComm(comm).all_reduce(checked).wait()
        return plain, checked

    for plain, checked in run_ranks(world, body):
        assert torch.equal(plain, checked)


LONG = 400  # elements of float32


def _gather(comm: Comm) -> None:
    comm.all_gather(torch.empty(comm.world, LONG), torch.ones(LONG)).wait()


def _all_to_all(comm: Comm) -> None:
    comm.all_to_all(torch.empty(comm.world, LONG), torch.ones(comm.world, LONG)).wait()


def _shift(comm: Comm) -> None:
    comm.shift(torch.empty(LONG), torch.ones(LONG)).wait()


def _sum(comm: Comm) -> None:
    comm.all_reduce(torch.ones(2 * comm.world * LONG)).wait()


def _tree(comm: Comm) -> None:
    comm.all_reduce(torch.ones(LONG), "tree").wait()


def _star(comm: Comm) -> None:
    comm.all_reduce(torch.ones(LONG), "star").wait()


def _broadcast(comm: Comm) -> None:
    comm.broadcast(torch.ones(comm.world * LONG), 0).wait()


ONE_KNOWS, ALL_KNOW = (_gather, _all_to_all, _shift), (_sum, _tree, _star, _broadcast)


def _messages(verb: Callable[[Comm], None], world: int) -> list[int]:
    """Sizes of those that the unlucky rank receives."""
    damage = Damage()

    def body(comm: ThreadComm) -> None:
        verb(CheckedComm(DamagingComm(comm, damage if comm.rank == UNLUCKY else Damage())))

    run_ranks(world, body)
    return damage.sizes


def _struck(verb: Callable[[Comm], None], world: int, damage: Damage) -> list[str]:
    """What each rank raises, by type and text; and that the next round is as any other."""

    def body(comm: ThreadComm) -> str:
        checked = CheckedComm(DamagingComm(comm, damage if comm.rank == UNLUCKY else Damage()))
        said = ""
        try:
            verb(checked)
        except (WireError, PeerFailed) as error:
            said = f"{type(error).__name__}: {error}"
        verb(checked)
        return said

    return run_ranks(world, body)


@pytest.mark.rest
@looped("world", [2, 3, 5])
@looped("verb", [*ONE_KNOWS, *ALL_KNOW])
def test_a_bit_of_a_long_message_is_noticed_by_those_who_must_know(
    verb: Callable[[Comm], None], world: int
) -> None:
    sizes = _messages(verb, world)
    long = [number for number, size in enumerate(sizes) if size > SHORT_BYTES]
    assert long
    for number in long:
        for bit in (0, 4 * sizes[number], 8 * sizes[number] - 1):  # the last is one of the checksum
            said = _struck(verb, world, Damage(number, (bit,)))
            unlucky = said.pop(UNLUCKY)
            assert unlucky.startswith(f"WireError: rank {UNLUCKY} received damaged bytes from rank ")
            assert "round 1, " in unlucky
            for other in said:
                assert other.startswith("PeerFailed: rank 1 received damaged") == (verb in ALL_KNOW)


@pytest.mark.parametrize("world", rest([2, 3, 5], but=[3]))
def test_a_bit_of_a_short_message_does_no_harm_and_is_logged(
    world: int, caplog: pytest.LogCaptureFixture
) -> None:
    def gather(comm: Comm) -> None:
        counts = torch.empty(comm.world, 3, dtype=torch.int64)
        comm.all_gather(counts, torch.tensor([comm.rank, 7, 9])).wait()
        assert counts.tolist() == [[rank, 7, 9] for rank in range(comm.world)]

    [size, *_] = _messages(gather, world)
    for bit in range(8 * size):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "gradwire"):
            assert _struck(gather, world, Damage(0, (bit,))) == [""] * world
        assert "received damaged bytes from rank 0, and a second copy" in caplog.text


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float64])
@pytest.mark.parametrize("numel", [0, 1, 128, 129, 3000])
def test_rows_by_which_ranks_decide_come_through_whatever_their_length(
    numel: int, dtype: torch.dtype
) -> None:
    def row(rank: int) -> Tensor:
        return (torch.arange(numel) % 99 + rank).to(dtype)

    def struck(damage: Damage) -> list[Tensor]:
        def body(comm: ThreadComm) -> Tensor:
            mine = damage if comm.rank == UNLUCKY else Damage()
            return gathered(CheckedComm(DamagingComm(comm, mine)), row(comm.rank))

        return run_ranks(3, body)

    whole = Damage()
    struck(whole)
    assert all(size <= 2 * (SHORT_BYTES + 8) for size in whole.sizes), "all of them travel twice"
    assert sum(whole.sizes) >= 2 * 2 * numel * dtype.itemsize
    for number in range(len(whole.sizes)):
        for each in struck(Damage(number, (5,))):
            assert torch.equal(each, torch.stack([row(rank) for rank in range(3)]))


def test_both_copies_damaged_are_noticed() -> None:
    def gather(comm: Comm) -> None:
        comm.all_gather(torch.empty(2, 2), torch.ones(2)).wait()

    said = _struck(gather, 2, Damage(0, (0, 8 * 16)))
    assert said[0] == ""
    assert said[UNLUCKY].startswith(
        "WireError: rank 1 received damaged bytes from rank 0: round 1, all_gather"
    )


def test_lengths_at_the_end_of_a_long_message_come_through() -> None:
    def body(comm: ThreadComm, bit: int) -> tuple[bool, int]:
        damage = Damage(0, (bit,) if comm.rank == UNLUCKY else ())
        checked = CheckedComm(DamagingComm(comm, damage))
        sent, came = torch.zeros(2008, dtype=torch.uint8), torch.empty(2008, dtype=torch.uint8)
        sent[2000:].view(torch.int64)[0] = 4711
        pending, is_damaged = checked.shift(came, sent, tells=1), False
        try:
            pending.wait()
        except WireError:
            is_damaged = True
        return is_damaged, int(came[2000:].view(torch.int64))

    for bit in (0, 8 * 1999 + 7, 8 * 2000, 8 * 2008, 8 * 2024, 8 * SealedLayout(2008, 8).bytes - 1):
        found = run_ranks(2, lambda comm, bit=bit: body(comm, bit))
        assert found == [(False, 4711), (bit < 8 * 2008, 4711)], "only what is not doubled is lost"


def test_a_message_of_another_round_or_rank_is_not_taken_for_this_one() -> None:
    payload, out = torch.arange(5000, dtype=torch.uint8), torch.empty(5000, dtype=torch.uint8)
    how = SealedLayout(5000)
    message = how.seal(payload, 17, torch.empty(how.bytes, dtype=torch.uint8))
    assert how.open(message, 17, out) == (True, True)
    assert torch.equal(out, payload)
    assert how.open(message, 18, out) == (False, False)

    class Losing(Comm):
        """Sends nothing of its first round."""

        def __init__(self, inner: Comm) -> None:
            self.rank, self.world, self.connections = inner.rank, inner.world, inner.connections
            self._inner, self._has_lost = inner, False

        def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
            if self._has_lost:
                return self._inner.issue(round_, tensor, out)
            self._has_lost = True
            return DONE

    def body(comm: ThreadComm) -> str:
        checked = CheckedComm(Losing(comm) if comm.rank == 0 else comm)
        if comm.rank == 0:  # which is one round ahead then
            with pytest.raises(WireError):
                _gather(checked)
        try:
            _gather(checked)
        except WireError as error:
            return str(error)
        return ""

    assert all("received damaged bytes" in said for said in run_ranks(2, body))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_what_checksums_add_is_counted(world: int) -> None:
    def body(comm: ThreadComm) -> tuple[float, float, float]:
        checked = CheckedComm(comm)
        _gather(checked)
        after_gather = checked.overhead_bytes
        checked.all_reduce(torch.ones(world * LONG)).wait()
        after_sum = checked.overhead_bytes - after_gather
        checked.all_gather(torch.empty(world, 1), torch.ones(1)).wait()
        return after_gather, after_sum, checked.overhead_bytes - after_gather - after_sum

    hops, votes = 1 if world == 2 else 2 * (world - 1), (world - 1).bit_length()
    for gather, total, short in run_ranks(world, body):
        assert gather == 8 * (world - 1)
        assert total == 8 * hops + 32 * votes
        assert short == (32 - 4) * (world - 1)


def test_the_inner_comm_sees_one_round_for_each() -> None:
    seen: list[Round] = []

    class Noting(DamagingComm):
        def issue(self, round_: Round, tensor: Tensor, out: Tensor):  # type: ignore[no-untyped-def]
            seen.append(round_)
            return super().issue(round_, tensor, out)

    run_ranks(1, lambda comm: _gather(CheckedComm(Noting(comm, Damage()))))
    assert seen == [Round("all_gather", LONG, torch.float32)], "alone nothing is checked"

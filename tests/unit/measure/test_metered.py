"""Rounds are noted once and timed from issue to end; what a failed rank did not send is owed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradwire.comm import Comm, Round, ThreadComm, owe_zeros, run_ranks
from gradwire.errors import RanksDisagree, TransportError
from gradwire.measure.clock import RoundTime, Trace
from gradwire.measure.metered import MeteredComm
from tests.support.looped import looped
from tests.support.verbs import CALLS, SIZE, Call


@looped("world", [1, 2, 3])
@looped("call", CALLS)
def test_verbs_pass_through_unchanged(call: Call, world: int) -> None:
    for rank, result in enumerate(run_ranks(world, lambda comm: call.issue(MeteredComm(comm)))):
        assert torch.equal(result, call.expected(rank, world))


def test_rounds_are_noted_in_order_with_the_payload_each_rank_hands_in() -> None:
    def body(comm: ThreadComm) -> MeteredComm:
        metered = MeteredComm(comm)
        for call in CALLS[:5]:
            call.issue(metered)
        metered.shift(torch.empty(SIZE), torch.empty(SIZE), -2)
        for call in CALLS[-2:]:
            call.issue(metered)
        return metered

    f32 = torch.float32
    for metered in run_ranks(3, body):
        assert metered.rounds == [
            Round("all_reduce", SIZE, f32),
            Round("all_gather", SIZE, f32),
            Round("broadcast", SIZE, f32, src=2),
            Round("all_to_all", 3 * SIZE, f32),
            Round("shift", SIZE, f32),
            Round("shift", SIZE, f32, -2),
            Round("all_reduce", SIZE, f32, algorithm="star"),
            Round("broadcast", SIZE, f32, src=1, algorithm="scatter"),
        ]
        assert metered.wire_bytes == sum(noted.wire_bytes(3) for noted in metered.rounds)


def test_round_that_could_not_be_issued_is_not_counted() -> None:
    def body(comm: ThreadComm) -> list[Round]:
        metered = MeteredComm(comm)
        with pytest.raises(RanksDisagree):
            metered.all_reduce(torch.zeros(1 + comm.rank))
        return metered.rounds

    assert run_ranks(2, body) == [[], []]


AGREED = (
    Round("all_reduce", 4, torch.float32),
    Round("all_gather", 3, torch.uint8),
    Round("all_to_all", 6, torch.float16),
    Round("shift", 5, torch.float64),
    Round("shift", 5, torch.float64, -1),
    Round("broadcast", 4, torch.int32, src=2),
    Round("broadcast", 4, torch.int32, src=1, algorithm="scatter"),
    Round("all_reduce", 4, torch.float32, algorithm="tree"),
)


def issue(comm: MeteredComm, round_: Round) -> None:
    ones = torch.ones(round_.numel, dtype=round_.dtype)
    if round_.verb == "all_reduce":
        comm.all_reduce(ones, round_.algorithm)
    elif round_.verb == "broadcast":
        comm.broadcast(ones, round_.src, round_.algorithm)
    elif round_.verb == "all_gather":
        comm.all_gather(ones.new_empty(comm.world, round_.numel), ones)
    elif round_.verb == "all_to_all":
        comm.all_to_all(torch.empty_like(ones.view(comm.world, -1)), ones.view(comm.world, -1))
    else:
        comm.shift(torch.empty_like(ones), ones, round_.by)


@pytest.mark.parametrize("sent", range(len(AGREED) + 1))
def test_failed_rank_keeps_the_order_with_zeros(sent: int) -> None:
    def body(comm: ThreadComm) -> list[Round]:
        metered = MeteredComm(comm)
        for round_ in AGREED[: sent if comm.rank == 1 else len(AGREED)]:
            issue(metered, round_)
        if comm.rank == 1:
            owe_zeros(metered, AGREED[sent:], torch.device("cpu"))
        return metered.rounds

    assert run_ranks(3, body) == [list(AGREED)] * 3


def test_owed_payload_is_zero() -> None:
    def body(comm: ThreadComm) -> float:
        metered, tensor = MeteredComm(comm), torch.ones(1)
        if comm.rank == 0:
            owe_zeros(metered, [Round("all_reduce", 1, torch.float32)], torch.device("cpu"))
        else:
            metered.all_reduce(tensor).wait()
        return tensor.item()

    assert run_ranks(3, body)[1:] == [2.0, 2.0]


def test_owed_broadcast_comes_from_its_root() -> None:
    def body(comm: ThreadComm) -> list[float]:
        metered, tensor = MeteredComm(comm), torch.ones(2)
        if comm.rank == 1:
            owe_zeros(metered, [Round("broadcast", 2, torch.float32, src=1)], torch.device("cpu"))
        else:
            metered.broadcast(tensor, 1).wait()
        return tensor.tolist()

    assert run_ranks(3, body)[::2] == [[0.0, 0.0]] * 2


TOLD = (
    Round("shift", 2, torch.int64, tells=2),
    Round("shift", 40, torch.uint8, at_most=True, least=8, tells=1),
    Round("shift", 40, torch.uint8, at_most=True, least=8),
    Round("shift", 40, torch.uint8, at_most=True, least=8),
    Round("all_gather", 9, torch.uint8, at_most=True),
)
"""Two lengths ahead, and a third in the tail of the first message; and what all leave out."""


def frames(comm: MeteredComm, sent: list[int], heard: list[int]) -> None:
    """Send and receive frames of so many bytes, with tails, as a rank that does not fail."""
    comm.shift(torch.empty(2, dtype=torch.int64), torch.tensor(sent[:2])).wait()
    for own, other, tail in zip(sent, heard, [sent[2], 0, 0], strict=True):
        frame = torch.cat([torch.ones(own, dtype=torch.uint8), torch.tensor([tail]).view(torch.uint8)])
        comm.shift(torch.empty(other + 8, dtype=torch.uint8), frame).wait()


def test_lengths_of_what_is_owed_are_read_where_they_are_told() -> None:
    def body(comm: ThreadComm) -> list[int]:
        metered = MeteredComm(comm)
        match comm.rank:
            case 0:
                frames(metered, [16, 32, 24], [8, 0, 8])
            case 1:
                owe_zeros(metered, TOLD, torch.device("cpu"))
            case _:
                frames(metered, [8, 0, 8], [0, 0, 0])
        return [round_.numel for round_ in metered.rounds]

    # A rank that owes sends no frame, only tails.
    assert run_ranks(3, body) == [[2, 24, 40, 32], [2, 8, 8, 8], [2, 16, 8, 16]]


def test_what_only_the_failed_exchange_has_been_told_cannot_be_paid() -> None:
    def body(comm: ThreadComm) -> None:
        metered = MeteredComm(comm)
        metered.shift(torch.empty(2, dtype=torch.int64), torch.tensor([8, 8])).wait()
        with pytest.raises(TransportError, match="failed between messages"):
            owe_zeros(metered, TOLD[len(metered.rounds) :], torch.device("cpu"))

    run_ranks(2, body)


@pytest.mark.parametrize("length", [-8, 40])
def test_a_length_beyond_what_was_announced_is_not_received(length: int) -> None:
    def body(comm: ThreadComm) -> None:
        if comm.rank == 1:
            comm.shift(torch.empty(2, dtype=torch.int64), torch.tensor([length, 8])).wait()
            return
        with pytest.raises(TransportError, match=f"a peer announces {length + 8} elements"):
            owe_zeros(MeteredComm(comm), TOLD, torch.device("cpu"))

    run_ranks(2, body)


class Later:
    """A collective that ends when the test says so."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], None]] = []

    def wait(self) -> None:
        pass

    def then(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)


class OnePending(Comm):
    """All its rounds return the same pending."""

    rank, world = 0, 2

    def __init__(self, pending: Later) -> None:
        self._pending = pending

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Later:
        return self._pending


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets what the clock shows."""
    now = [0.0]
    for module in ("clock", "metered"):
        monkeypatch.setattr(f"gradwire.measure.{module}.now_s", lambda: now[0])
    return lambda at_s: now.__setitem__(0, at_s)


def test_the_end_is_announced_before_anybody_waits(clock: Callable[[float], None]) -> None:
    trace, later = Trace(), Later()
    pending = MeteredComm(OnePending(later), trace, "unit").all_reduce(torch.zeros(5))
    pending.then(lambda: None)
    clock(2.0)
    later.callbacks[0]()
    clock(7.0)
    pending.wait()
    assert trace.rounds == [RoundTime("all_reduce", 20, 0.0, 2.0)]
    assert trace.rounds[0].seconds == 2.0


def test_an_algorithm_of_our_own_is_named() -> None:
    comm = MeteredComm(OnePending(Later()), trace := Trace(), "unit")
    comm.all_reduce(torch.zeros(1), "tree")
    comm.broadcast(torch.zeros(1), 0, "scatter")
    comm.broadcast(torch.zeros(1), 0)
    assert [each.verb for each in trace.rounds] == ["all_reduce/tree", "broadcast/scatter", "broadcast"]


def test_messages_that_announce_nothing_end_when_somebody_has_waited(clock: Callable[[float], None]) -> None:
    trace, later = Trace(), Later()
    pending = MeteredComm(OnePending(later), trace, "unit").shift(torch.zeros(3), torch.zeros(3))
    pending.then(lambda: None)
    later.callbacks[0]()
    assert trace.rounds[0].seconds == 0.0
    clock(3.0)
    pending.wait()
    clock(4.0)
    pending.wait()
    assert trace.rounds == [RoundTime("shift", 12, 0.0, 3.0)]

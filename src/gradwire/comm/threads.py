"""Ranks as threads of one process: every law runs on this, and misuse raises instead of hanging.

All verbs are one rendezvous: each rank lays down what it wants (verb, shape, dtype, argument) and a
copy of its payload; when all are there the wishes are compared, and every rank computes its own result
from the same payloads in rank order. Real transports add in other orders, which the laws allow for.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from gradwire.comm.base import DONE, Algorithm, Broadcasting, Comm, Pending, Round
from gradwire.comm.hops import ALL_REDUCES, BROADCASTS
from gradwire.errors import RanksDisagree

T = TypeVar("T")


@dataclass(frozen=True)
class _Wish:
    verb: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    argument: int


class _Turns:
    """One rank runs at a time, until it waits for others; then the next one that need not wait does.

    torch gives up the interpreter's lock in every operation: ranks that ran freely would fight for it. And
    when nobody can go on, it is known at once, and stays so.
    """

    def __init__(self, world: int) -> None:
        self._starts = [threading.Lock() for _rank in range(world)]
        self._awaited: list[Callable[[], bool] | None] = [lambda: True] * world
        self._stuck = False
        for start in self._starts:
            start.acquire()

    def begin(self, rank: int) -> None:
        """Wait for the first turn, which somebody passes on."""
        self._starts[rank].acquire()

    def wait(self, rank: int, until: Callable[[], bool]) -> bool:
        """Let others run until this rank can go on, or nobody can; returns whether it can."""
        if not self._stuck and not until():
            self._awaited[rank] = until
            self.pass_on(rank)
            self._starts[rank].acquire()
        return not self._stuck and until()

    def end(self, rank: int) -> None:
        """Never run again."""
        self._awaited[rank] = None
        self.pass_on(rank)

    def pass_on(self, rank: int) -> None:
        """To the next rank that can go on; if none can, to the next, which sees that it cannot."""
        world = len(self._starts)
        following = [each % world for each in range(rank + 1, rank + world + 1)]
        left = [(each, until) for each in following if (until := self._awaited[each]) is not None]
        able = [each for each, until in left if until()]
        self._stuck = self._stuck or (not able and bool(left))
        if left:
            self._starts[able[0] if able else left[0][0]].release()


class _Meeting:
    """Where the threads of one world meet: two rooms in turn, for what they lay down.

    Whoever comes to a room again has been through the other one meanwhile, and there with everybody: so all
    have left this one, and what lies in it has been read.
    """

    def __init__(self, members: Sequence[int], turns: _Turns) -> None:
        """`members` are the threads, by their numbers in `turns`."""
        self.members, self.turns = tuple(members), turns
        self.world = world = len(members)
        self.parts: dict[tuple[int, ...], _Meeting] = {}
        self._wishes: list[list[_Wish | None]] = [[None] * world, [None] * world]
        self._payloads: list[list[Tensor | None]] = [[None] * world, [None] * world]
        self._rounds = [0] * world
        self.mail: list[list[deque[Tensor]]] = [
            [deque() for _target in range(world)] for _source in range(world)
        ]

    def exchange(self, rank: int, wish: _Wish, payload: Tensor) -> list[Tensor]:
        number = self._rounds[rank]
        wishes, payloads = self._wishes[number % 2], self._payloads[number % 2]
        wishes[rank], payloads[rank] = wish, payload.clone()
        self._rounds[rank] += 1
        if not self.turns.wait(self.members[rank], lambda: min(self._rounds) > number):
            raise RanksDisagree("a rank stopped issuing collectives while others wait for it")
        self._payloads[1 - number % 2][rank] = None  # all have left the other room: no need for memory there
        if any(other != wishes[0] for other in wishes):
            raise RanksDisagree(f"ranks issued different collectives: {dict(enumerate(wishes))}")
        return [payload for payload in payloads if payload is not None]


class ThreadComm(Comm):
    """`Comm` between threads. Verbs complete before they return."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.world = meeting.world
        self.peers = ThreadPeers(rank, meeting)
        self._meeting = meeting

    def split(self, groups: Sequence[Sequence[int]]) -> ThreadComm:
        """A comm among those of `groups`, the same on all ranks, that this rank is in."""
        [mine] = [tuple(group) for group in groups if self.rank in group]
        members, turns = [self._meeting.members[rank] for rank in mine], self._meeting.turns
        part = self._meeting.parts.setdefault(mine, _Meeting(members, turns))
        return ThreadComm(mine.index(self.rank), part)

    def _meet(self, verb: str, payload: Tensor, argument: int = 0, any_length: bool = False) -> list[Tensor]:
        shape = () if any_length else tuple(payload.shape)
        wish = _Wish(verb, shape, payload.dtype, argument)
        return self._meeting.exchange(self.rank, wish, payload)

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
        """Meet all ranks, and work out this one's result. Sums add in rank order, or as `algorithm` does."""
        match round_.verb:
            case "shift":
                received = self._meet("shift", tensor, round_.by, any_length=True)
                _land(received[(self.rank - round_.by) % self.world], out)
            case "all_reduce" | "broadcast" if round_.algorithm != "library":
                self._meet(f"{round_.verb} by {round_.algorithm}", tensor, round_.src)
                self._hop(round_, tensor)
            case "all_reduce":
                first, *rest = self._meet("all_reduce", tensor)
                out.copy_(reduce(torch.add, rest, first))
            case "broadcast":
                out.copy_(self._meet("broadcast", tensor, round_.src)[round_.src])
            case "all_gather":
                out.copy_(torch.stack(self._meet("all_gather", tensor)).view_as(out))
            case "all_to_all":
                payloads = self._meet("all_to_all", tensor)
                out.copy_(torch.stack([payload[self.rank] for payload in payloads]))
        return DONE

    def _hop(self, round_: Round, tensor: Tensor) -> None:
        if round_.verb == "all_reduce":
            ALL_REDUCES[cast(Algorithm, round_.algorithm)](tensor, self.peers)
        else:
            BROADCASTS[cast(Broadcasting, round_.algorithm)](tensor, round_.src, self.peers)


def _land(received: Tensor, out: Tensor) -> None:
    if received.shape != out.shape:
        raise RanksDisagree(f"a shift brings {tuple(received.shape)}, room is for {tuple(out.shape)}")
    out.copy_(received)


class ThreadPeers:
    """The other threads; see `gradwire.comm.hops.Peers`. A message is a copy in the receiver's mail."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.world = meeting.world
        self._meeting = meeting

    def send(self, tensor: Tensor, target: int) -> Pending:
        """See `Peers.send`; returns at once."""
        if tensor.numel() > 0:
            self._meeting.mail[self.rank][target].append(tensor.clone())
        return DONE

    def receive(self, out: Tensor, source: int) -> Pending:
        """See `Peers.receive`; the message is awaited in `wait`."""
        thread = self._meeting.members[self.rank]
        return _Arrival(out, thread, self._meeting.mail[source][self.rank], self._meeting.turns)


class _Arrival:
    """A message to come."""

    def __init__(self, out: Tensor, rank: int, mail: deque[Tensor], turns: _Turns) -> None:
        self._out, self._rank, self._mail, self._turns = out, rank, mail, turns

    def wait(self) -> None:
        if self._out.numel() > 0:
            if not self._turns.wait(self._rank, lambda: bool(self._mail)):
                raise RanksDisagree("a rank waits for a message that nobody sends")
            self._out.copy_(self._mail.popleft())

    def then(self, callback: Callable[[], None]) -> None:
        callback()


def run_ranks(world: int, body: Callable[[ThreadComm], T]) -> list[T]:
    """Run `body(comm)` on `world` threads and return the results in rank order.

    Ranks take turns: whatever else a body waits for must not depend on another rank. The first exception
    that is not a mere consequence of another rank's is raised again here.

    >>> run_ranks(3, lambda comm: comm.rank)
    [0, 1, 2]
    """
    meeting = _Meeting(range(world), _Turns(world))
    results: list[Any] = [None] * world
    errors: list[BaseException | None] = [None] * world

    def rank_main(rank: int) -> None:
        meeting.turns.begin(rank)
        try:
            results[rank] = body(ThreadComm(rank, meeting))
        except BaseException as error:
            errors[rank] = error
        finally:
            meeting.turns.end(rank)

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    meeting.turns.pass_on(world - 1)
    for thread in threads:
        thread.join()
    _raise_first(errors)
    return results


def _raise_first(errors: Sequence[BaseException | None]) -> None:
    raised = [error for error in errors if error is not None]
    causes = [error for error in raised if not isinstance(error, RanksDisagree)]
    for error in causes or raised:
        raise error

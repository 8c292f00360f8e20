"""Ranks as threads of one process, for tests: misuse raises instead of hanging.

All verbs are one rendezvous. Each rank deposits a request (verb, shape, dtype, argument) and a copy of its
payload. When all requests are there they are compared, and every rank computes its result from the same
payloads in rank order. Real transports add in other orders, which the laws allow for.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradwire.comm.algorithms import Collective, PointToPointComm, collective_of
from gradwire.comm.base import DONE, Finishing, Pending, Round
from gradwire.errors import RanksDisagree

T = TypeVar("T")


@dataclass(frozen=True)
class _Wish:
    verb: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    argument: int


class _Turns:
    """Scheduler that runs one rank at a time. When it has to wait for others, the next runnable rank runs.

    torch releases the interpreter's lock in every operation, so ranks that ran freely would compete for it.
    The scheduler also detects a deadlock at once: no rank can run. A deadlock is final.
    """

    def __init__(self, world: int) -> None:
        self._starts = [threading.Lock() for _rank in range(world)]
        self._awaited: list[Callable[[], bool] | None] = [lambda: True] * world
        self._stuck = False
        for start in self._starts:
            start.acquire()

    def begin(self, rank: int) -> None:
        """Wait for this rank's first turn."""
        self._starts[rank].acquire()

    def wait(self, rank: int, until: Callable[[], bool]) -> bool:
        """Let other ranks run until this one can go on, or none can. Returns True if this one can."""
        if not self._stuck and not until():
            self._awaited[rank] = until
            self.pass_on(rank)
            self._starts[rank].acquire()
        return not self._stuck and until()

    def end(self, rank: int) -> None:
        """Mark this rank as finished; it is not scheduled again."""
        self._awaited[rank] = None
        self.pass_on(rank)

    def pass_on(self, rank: int) -> None:
        """Start the next rank that can go on. If none can, start the next one, which then raises."""
        world = len(self._starts)
        following = [each % world for each in range(rank + 1, rank + world + 1)]
        left = [(each, until) for each in following if (until := self._awaited[each]) is not None]
        able = [each for each, until in left if until()]
        self._stuck = self._stuck or (not able and bool(left))
        if left:
            self._starts[able[0] if able else left[0][0]].release()


class _Meeting:
    """Rendezvous of the threads of one world, with two sets of slots that collectives use alternately.

    A rank that returns to a set has completed a collective on the other set in between, together with all
    ranks. So all ranks have read this set, and its slots may be overwritten.
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
        self._payloads[1 - number % 2][rank] = None  # all have read the other set: free its memory
        if any(other != wishes[0] for other in wishes):
            raise RanksDisagree(f"ranks issued different collectives: {dict(enumerate(wishes))}")
        return [payload for payload in payloads if payload is not None]


class ThreadComm(PointToPointComm):
    """`Comm` between threads. Verbs complete before they return."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.world = meeting.world
        self.peers = ThreadPeers(rank, meeting)
        self._meeting = meeting

    def split(self, groups: Sequence[Sequence[int]]) -> ThreadComm:
        """A comm over the group of `groups` that contains this rank. `groups` is the same on all ranks."""
        [mine] = [tuple(group) for group in groups if self.rank in group]
        members, turns = [self._meeting.members[rank] for rank in mine], self._meeting.turns
        part = self._meeting.parts.setdefault(mine, _Meeting(members, turns))
        return ThreadComm(mine.index(self.rank), part)

    def _meet(self, verb: str, payload: Tensor, argument: int = 0, any_length: bool = False) -> list[Tensor]:
        shape = () if any_length else tuple(payload.shape)
        wish = _Wish(verb, shape, payload.dtype, argument)
        return self._meeting.exchange(self.rank, wish, payload)

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
        """Meet all ranks and compute this one's result. Sums add in rank order, or in that of `algorithm`."""
        match round_.verb:
            case "shift":
                received = self._meet("shift", tensor, round_.by, any_length=True)
                _deliver(received[(self.rank - round_.by) % self.world], out)
            case "all_reduce" | "broadcast" if round_.algorithm != "library":
                self._meet(f"{round_.verb} by {round_.algorithm}", tensor, round_.src)
                self.hop(collective_of(round_, tensor))
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

    def hop(self, collective: Collective) -> Pending:
        """See `PointToPointComm.hop`; done on return."""
        collective(self.peers)
        return DONE


def _deliver(received: Tensor, out: Tensor) -> None:
    if received.shape != out.shape:
        raise RanksDisagree(f"a shift brings {tuple(received.shape)}, room is for {tuple(out.shape)}")
    out.copy_(received)


class ThreadPeers:
    """`gradwire.comm.algorithms.Peers` between threads. A message is a copy in the receiver's mailbox."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.world = meeting.world
        self._meeting = meeting

    def send(self, tensor: Tensor, target: int) -> Pending:
        """Put a copy into the mailbox of `target`; returns at once."""
        if tensor.numel() > 0:
            self._meeting.mail[self.rank][target].append(tensor.clone())
        return DONE

    def receive(self, out: Tensor, source: int) -> Pending:
        """Return at once; `wait` blocks until the message is there and copies it to `out`."""
        return Finishing(DONE, partial(self._take, out, source)) if out.numel() > 0 else DONE

    def _take(self, out: Tensor, source: int) -> None:
        mail = self._meeting.mail[source][self.rank]
        if not self._meeting.turns.wait(self._meeting.members[self.rank], lambda: bool(mail)):
            raise RanksDisagree("a rank waits for a message that no rank sends")
        out.copy_(mail.popleft())


def run_ranks(world: int, body: Callable[[ThreadComm], T]) -> list[T]:
    """Run `body(comm)` on `world` threads and return the results in rank order.

    Ranks take turns, so a body must not wait for another rank except through its comm. The first exception
    is raised again here; `RanksDisagree`, which follows from another rank's failure, only if there is no
    other.

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
    raised = [error for error in errors if error is not None]
    causes = [error for error in raised if not isinstance(error, RanksDisagree)]
    for error in causes or raised:
        raise error
    return results

"""Ranks as threads of one process: every law runs on this, and misuse raises instead of hanging.

All verbs are one rendezvous: each rank lays down what it wants (verb, shape, dtype, argument) and a
copy of its payload; when all are there the wishes are compared, and every rank computes its own result
from the same payloads in rank order. Real transports add in other orders, which the laws allow for.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradwire.comm.base import DONE, Algorithm, Broadcasting, Pending
from gradwire.comm.hops import ALL_REDUCES, BROADCASTS
from gradwire.errors import RanksDisagree

T = TypeVar("T")


@dataclass(frozen=True)
class _Wish:
    verb: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    argument: int


class _Room:
    """What the ranks lay down in one round, and the barrier behind which all of it is there."""

    def __init__(self, world: int, timeout_s: float) -> None:
        self.wishes: list[_Wish | None] = [None] * world
        self.payloads: list[Tensor | None] = [None] * world
        self.barrier = threading.Barrier(world, timeout=timeout_s)


class _Turns:
    """One rank computes at a time: a rank keeps its turn until it waits for others.

    torch gives up the interpreter's lock in every operation. Ranks that fight for it take a quarter more time.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """While a rank computes."""
        with self._turn:
            yield

    @contextmanager
    def given_up(self) -> Iterator[None]:
        """While it waits."""
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()


class _Meeting:
    """Where the threads of one world meet: two rooms in turn.

    Whoever comes to a room again has been through the other one meanwhile, and there with everybody: so all
    have left this one, and what lies in it has been read.
    """

    def __init__(self, world: int, timeout_s: float) -> None:
        self.world = world
        self._rooms = _Room(world, timeout_s), _Room(world, timeout_s)
        self._rounds = [0] * world
        self.timeout_s = timeout_s
        self.turns = _Turns()
        self.mail: list[list[queue.SimpleQueue[Tensor]]] = [
            [queue.SimpleQueue() for _target in range(world)] for _source in range(world)
        ]

    def exchange(self, rank: int, wish: _Wish, payload: Tensor) -> list[Tensor]:
        room = self._room(rank)
        room.wishes[rank], room.payloads[rank] = wish, payload.clone()
        self._await(room.barrier)
        self._rounds[rank] += 1
        self._room(rank).payloads[rank] = None  # all have left the other room: its payloads need no memory
        wishes, payloads = list(room.wishes), list(room.payloads)
        if any(other != wishes[0] for other in wishes):
            raise RanksDisagree(f"ranks issued different collectives: {dict(enumerate(wishes))}")
        return [payload for payload in payloads if payload is not None]

    def _room(self, rank: int) -> _Room:
        return self._rooms[self._rounds[rank] % 2]

    def _await(self, barrier: threading.Barrier) -> None:
        try:
            with self.turns.given_up():
                barrier.wait()
        except threading.BrokenBarrierError:
            raise RanksDisagree("a rank stopped issuing collectives while others wait for it") from None

    def depart(self, rank: int) -> None:
        """Free those who wait, or will, in the room where this rank would be next.

        Whoever is still on the way out of the room before must not be disturbed.
        """
        self._room(rank).barrier.abort()


class ThreadComm:
    """`Comm` between threads. Verbs complete before they return."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.world = meeting.world
        self.peers = ThreadPeers(rank, meeting)
        self._meeting = meeting

    def _meet(self, verb: str, payload: Tensor, argument: int = 0, any_length: bool = False) -> list[Tensor]:
        shape = () if any_length else tuple(payload.shape)
        wish = _Wish(verb, shape, payload.dtype, argument)
        return self._meeting.exchange(self.rank, wish, payload)

    def all_reduce(self, tensor: Tensor, algorithm: Algorithm = "library") -> Pending:
        """See `Comm.all_reduce`; adds in rank order, or as the `algorithm` does."""
        if algorithm != "library":
            self._meet(f"all_reduce by {algorithm}", tensor)
            ALL_REDUCES[algorithm](tensor, self.peers)
            return DONE
        first, *rest = self._meet("all_reduce", tensor)
        for other in rest:
            first = first + other
        tensor.copy_(first)
        return DONE

    def all_gather(self, out: Tensor, tensor: Tensor) -> Pending:
        """See `Comm.all_gather`."""
        out.copy_(torch.stack(self._meet("all_gather", tensor)).view_as(out))
        return DONE

    def broadcast(self, tensor: Tensor, src: int, algorithm: Broadcasting = "library") -> Pending:
        """See `Comm.broadcast`."""
        if algorithm != "library":
            self._meet(f"broadcast by {algorithm}", tensor, src)
            BROADCASTS[algorithm](tensor, src, self.peers)
            return DONE
        tensor.copy_(self._meet("broadcast", tensor, src)[src])
        return DONE

    def all_to_all(self, out: Tensor, tensor: Tensor) -> Pending:
        """See `Comm.all_to_all`."""
        payloads = self._meet("all_to_all", tensor)
        out.copy_(torch.stack([payload[self.rank] for payload in payloads]))
        return DONE

    def shift(self, out: Tensor, tensor: Tensor, by: int = 1) -> Pending:
        """See `Comm.shift`."""
        payloads = self._meet("shift", tensor, by, any_length=True)
        received = payloads[(self.rank - by) % self.world]
        if received.shape != out.shape:
            raise RanksDisagree(f"a shift brings {tuple(received.shape)}, room is for {tuple(out.shape)}")
        out.copy_(received)
        return DONE


class ThreadPeers:
    """The other threads; see `gradwire.comm.hops.Peers`. A message is a copy in the receiver's mail."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank = rank
        self.world = meeting.world
        self._meeting = meeting

    def send(self, tensor: Tensor, target: int) -> Pending:
        """See `Peers.send`; returns at once."""
        if tensor.numel() > 0:
            self._meeting.mail[self.rank][target].put(tensor.clone())
        return DONE

    def receive(self, out: Tensor, source: int) -> Pending:
        """See `Peers.receive`; the message is awaited in `wait`."""
        return _Arrival(out, self._meeting.mail[source][self.rank], self._meeting)


class _Arrival:
    """A message to come."""

    def __init__(self, out: Tensor, mail: queue.SimpleQueue[Tensor], meeting: _Meeting) -> None:
        self._out, self._mail, self._meeting = out, mail, meeting

    def wait(self) -> None:
        if self._out.numel() > 0:
            try:
                with self._meeting.turns.given_up():
                    message = self._mail.get(timeout=self._meeting.timeout_s)
            except queue.Empty:
                raise RanksDisagree("a rank waits for a message that nobody sends") from None
            self._out.copy_(message)

    def then(self, callback: Callable[[], None]) -> None:
        callback()


def run_ranks(world: int, body: Callable[[ThreadComm], T], timeout_s: float = 30.0) -> list[T]:
    """Run `body(comm)` on `world` threads and return the results in rank order.

    Ranks take turns: whatever else a body waits for must not depend on another rank. The first exception
    that is not a mere consequence of another rank's is raised again here.

    >>> run_ranks(3, lambda comm: comm.rank)
    [0, 1, 2]
    """
    meeting = _Meeting(world, timeout_s)
    results: list[Any] = [None] * world
    errors: list[BaseException | None] = [None] * world

    def rank_main(rank: int) -> None:
        try:
            with meeting.turns.taken():
                results[rank] = body(ThreadComm(rank, meeting))
        except BaseException as error:
            errors[rank] = error
        finally:
            meeting.depart(rank)

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _raise_first(errors)
    return results


def _raise_first(errors: Sequence[BaseException | None]) -> None:
    raised = [error for error in errors if error is not None]
    causes = [error for error in raised if not isinstance(error, RanksDisagree)]
    for error in causes or raised:
        raise error

"""The five verbs of communication, and their cost on the wire.

Vocabulary: a *round* is one collective of one unit. *Bytes on the wire* are the bytes that a rank sends, as
the mean over ranks (the mean received is the same).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from gradwire.errors import DAMAGED, TransportError

Verb = Literal["all_reduce", "all_gather", "broadcast", "all_to_all", "shift"]

Algorithm = Literal["library", "ring", "tree", "star", "direct"]
"""Algorithm of an all-reduce: the transport library's choice, or one of our own
(`gradwire.comm.algorithms`)."""

Broadcasting = Literal["library", "scatter"]
"""Algorithm of a broadcast: the library's, or a scatter and an all-gather of our own."""


def check_algorithm(algorithm: Algorithm) -> Algorithm:
    """Return `algorithm` if it is one of an all-reduce; raises `ValueError` if not."""
    if algorithm not in get_args(Algorithm):
        raise ValueError(f"algorithm={algorithm!r} is none of {', '.join(get_args(Algorithm))}")
    return algorithm


DIRECT_WORLD = 8
"""Among at most this many ranks few bytes go direct: every rank sends them to all others."""
MESSAGE_BYTES = 1875
"""The bytes that pass in the time of a message: 0.3 ms (`planning.costs.NOMINAL`) at 50 Mbit/s, the slowest
link for which compression is meant."""


def shortest_sum(world: int, payload_bytes: int = 0, latency: float = 1.0) -> Algorithm:
    """The best algorithm for an all-reduce of few bytes that all ranks wait for.

    A direct all-reduce takes one latency where a ring takes 2(N-1), and half as many messages (a quarter of
    gloo's, which halves each part). It sends N/2 times as many bytes. Among more ranks, a tree takes 2·log N
    latencies; it sends log N times as many bytes on the busiest link, and as many in the mean. Both are best
    up to a payload whose additional bytes take as long as the latencies saved: 8.4 kB among 3 ranks, 6.2 kB
    among 4, 4.6 kB among 8, 21 kB among 64. A `latency`, as a multiple of a message's time, multiplies these
    sizes.

    >>> [shortest_sum(world) for world in (2, 4, 64)]
    ['library', 'direct', 'tree']
    >>> shortest_sum(4, 6000), shortest_sum(8, 6000)
    ('direct', 'library')
    >>> shortest_sum(8, 6000, latency=10.0)
    'direct'
    """
    if world <= 2:
        return "library"
    in_a_row, passed = 2 * (world - 1), 2 * (world - 1) / world
    way: Algorithm = "direct" if world <= DIRECT_WORLD else "tree"
    latencies, payloads = (1, world - 1) if way == "direct" else (2 * (world - 1).bit_length(),) * 2
    saved, more = in_a_row - latencies, payloads - passed
    return way if more * payload_bytes <= saved * latency * MESSAGE_BYTES else "library"


@dataclass(frozen=True)
class Round:
    """One collective: its verb, and the payload of *each* rank (elements and dtype).

    - `by`: distance of a shift. `src`: root of a broadcast. A rank that owes such a round must meet its
      peers.
    - `algorithm`: that of an all-reduce or a broadcast.
    - `at_most`: the round may be shorter, or left out at the end, as ranks agree while the step runs. If a
      rank contributes zeros to that agreement, all ranks leave the round out. An `at_most` shift always takes
      place, because only two ranks know its length, which an earlier shift has sent.
    - `tells`: number of int64 at the end of a shift. Each is the number of elements beyond `least` in one of
      the next `at_most` shifts, in order.
    """

    verb: Verb
    numel: int
    dtype: torch.dtype
    by: int = 1
    at_most: bool = False
    src: int = 0
    algorithm: Algorithm | Broadcasting = "library"
    least: int = field(default=0, compare=False)
    tells: int = field(default=0, compare=False)

    @cached_property
    def name(self) -> str:
        """The verb, with the algorithm if it is one of our own: "all_reduce", "all_reduce/tree"."""
        return self.verb if self.algorithm == "library" else f"{self.verb}/{self.algorithm}"

    @cached_property
    def payload_bytes(self) -> int:
        """Bytes that one rank hands in."""
        return self.numel * self.dtype.itemsize

    def wire_bytes(self, world: int) -> float:
        """Bytes sent per rank, averaged over `world` ranks, by the algorithms that gloo and NCCL run.

        Ring all-reduce 2(N-1)/N·M, ring all-gather (N-1)·M, tree broadcast (N-1)/N·M in the mean,
        pairwise all-to-all (N-1)/N·M, shift M (nothing when alone). In the mean over ranks our own
        algorithms send as much: of an all-reduce 2(N-1) payloads in all, wherever they are added up, and
        of a broadcast N-1. How it is shared out between ranks differs (`gradwire.comm.algorithms`), and with
        it the time. Only a direct all-reduce sends more, (N-1)·M.

        >>> Round("all_reduce", 1000, torch.float32).wire_bytes(4)
        6000.0
        """
        others = world - 1
        share = {
            "all_reduce": others if self.algorithm == "direct" else 2 * others / world,
            "all_gather": others,
            "broadcast": others / world,
            "all_to_all": others / world,
            "shift": min(others, 1),
        }[self.verb]
        return float(share * self.payload_bytes)


round_of = lru_cache(maxsize=1024)(Round)
"""`Round`, made once for the same arguments: the same rounds come in every step."""


class Pending(Protocol):
    """A collective that is running."""

    def wait(self) -> None:
        """Block until the result is in place. Raises `TransportError` when the transport broke."""

    def then(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, from any thread, when the collective has ended well or badly.

        The callback must neither block nor issue a collective.
        """


class Done:
    """Pending of a collective that has ended already."""

    def wait(self) -> None:
        """Return at once."""

    def then(self, callback: Callable[[], None]) -> None:
        """Call back at once."""
        callback()


DONE = Done()


class Finishing:
    """A collective and a callback, `finish`, which completes its result; called once.

    The waiting thread calls it, in its own stream, so that sums, copies and checks cost no other thread's
    time.
    """

    def __init__(self, inner: Pending, finish: Callable[[], None]) -> None:
        self._inner = inner
        self._finish: Callable[[], None] | None = finish
        self.then = inner.then

    def wait(self) -> None:
        """Block until the collective has ended, and finish it, unless that has been done."""
        self._inner.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class Unannounced:
    """A collective of whose end nobody is told, but who waits: `then` calls back at once."""

    wait: Callable[[], None]
    """See `Pending`."""

    def __init__(self, inner: Pending) -> None:
        self.wait = inner.wait

    def then(self, callback: Callable[[], None]) -> None:
        """Call back at once; the callback then waits."""
        callback()


class Comm(ABC):
    """Communication of an exchange with its peers: one rank of `world`.

    Implementations have one method, `issue`; the five verbs are its spellings. Every rank must issue the same
    rounds in the same order. Buffers belong to the caller and must not be touched until the returned
    `Pending` has been waited for.
    """

    rank: int
    world: int
    announces = True
    """True if `then` calls back at the end. If not, neither it nor `wait` tells the time of the end."""
    verifies = False
    """True if `wait` may raise `WireError` or `PeerFailed` for damaged bytes, as `comm.checksums` does."""
    connections = 1
    """Over how many connections a long message travels from one rank to another."""
    overhead_bytes = 0.0
    """The bytes sent beside payloads so far, in the sense of `Round.wire_bytes`."""

    @property
    def carrier(self) -> Comm:
        """The comm that counts `overhead_bytes`: itself, unless it hands copies to another one."""
        return self

    @abstractmethod
    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
        """Start one collective: `tensor` is handed in, `out` takes what comes. Does not block.

        Sums and broadcasts work in place: `out` is `tensor`. Raises `TransportError` if the transport broke.
        """

    def all_reduce(self, tensor: Tensor, algorithm: Algorithm = "library") -> Pending:
        """Sum `tensor` over all ranks, in place."""
        round_ = round_of("all_reduce", tensor.numel(), tensor.dtype, algorithm=algorithm)
        return self.issue(round_, tensor, tensor)

    def all_gather(self, out: Tensor, tensor: Tensor) -> Pending:
        """Fill `out` (world, numel) with every rank's `tensor` (numel,)."""
        return self.issue(round_of("all_gather", tensor.numel(), tensor.dtype), tensor, out)

    def broadcast(self, tensor: Tensor, src: int, algorithm: Broadcasting = "library") -> Pending:
        """Overwrite `tensor` with that of rank `src`."""
        round_ = Round("broadcast", tensor.numel(), tensor.dtype, src=src, algorithm=algorithm)
        return self.issue(round_, tensor, tensor)

    def all_to_all(self, out: Tensor, tensor: Tensor) -> Pending:
        """Send row r of `tensor` (world, n) to rank r; row r of `out` comes from rank r."""
        return self.issue(round_of("all_to_all", tensor.numel(), tensor.dtype), tensor, out)

    def shift(self, out: Tensor, tensor: Tensor, by: int = 1, tells: int = 0) -> Pending:
        """Send `tensor` to rank + by and receive `out` from rank - by (modulo the world).

        `out` has the length of that rank's tensor, which may differ from that of `tensor`. `tells` is as in
        `Round`, and the same on all ranks.
        """
        return self.issue(Round("shift", tensor.numel(), tensor.dtype, by, tells=tells), tensor, out)


SHORT_BYTES = 1024
"""Size up to which a checked message is sent twice: 0.04 ms more at 200 Mbit/s."""


def gathered(comm: Comm, mine: Tensor) -> Tensor:
    """Every rank's `mine` (numel,) as (world, numel), on the CPU: the numbers of a joint decision. One
    all-gather.

    With checked messages, one all-gather per `SHORT_BYTES`: only the receiver would notice damage of a long
    one.

    >>> from gradwire.comm import run_ranks
    >>> run_ranks(2, lambda comm: gathered(comm, torch.tensor([comm.rank, 5])).tolist())
    [[[0, 5], [1, 5]], [[0, 5], [1, 5]]]
    """
    numel = max(mine.numel(), 1)
    size = SHORT_BYTES // mine.itemsize if comm.verifies else numel
    rows = []
    for start in range(0, numel, size):
        piece = mine[start : start + size]
        rows.append(piece.new_empty(comm.world, piece.numel()))
        comm.all_gather(rows[-1], piece).wait()
    return torch.cat(rows, dim=1)


def issue_alone(comm: Comm, round_: Round, payload: Tensor) -> Pending:
    """Issue `round_` with `payload` (numel,) on `comm`; room for its result is allocated here, and the result
    is not read.
    """
    if round_.verb == "all_reduce" or round_.verb == "broadcast":
        return comm.issue(round_, payload, payload)
    if round_.verb == "all_gather":
        return comm.issue(round_, payload, payload.new_empty(comm.world, round_.numel))
    tensor = payload.view(comm.world, -1) if round_.verb == "all_to_all" else payload
    return comm.issue(round_, tensor, torch.empty_like(tensor))


def owe_zeros(comm: Comm, owed: Sequence[Round], device: torch.device) -> None:
    """Issue the rounds `owed`, which this rank has announced and not issued, with zeros on `device`, so that
    peers find the expected order on `comm`.

    Called on a rank whose encoding failed. The step is committed on no rank, so values do not matter. Blocks
    until the zeros have been sent. Raises `TransportError` if a length is owed that only the failed exchange
    knew.
    """
    announced: deque[int] = deque()
    for round_ in owed:
        if round_.verb == "shift":
            announced.extend(_owe_shift(comm, round_, announced, device))
        elif not round_.at_most:
            zeros = torch.zeros(round_.numel, dtype=round_.dtype, device=device)
            wait_unread(issue_alone(comm, round_, zeros))


def wait_unread(pending: Pending) -> None:
    """Wait for a round whose payload is not read; a damaged payload is ignored."""
    with suppress(*DAMAGED):
        pending.wait()


def _owe_shift(comm: Comm, round_: Round, announced: deque[int], device: torch.device) -> list[int]:
    """Carry out one owed shift with zeros, as few as possible.

    Args:
        round_: the shift.
        announced: lengths of later shifts, as the sending rank has told them, oldest first; one is taken from
            it if the round's length is known at run time only.
        device: device of the tensors.

    Returns the lengths that the received message announces. Raises `TransportError` if a length is unknown or
    impossible.
    """
    sent = received = round_.numel
    if round_.at_most:
        if not announced:
            raise TransportError(
                "this rank failed between messages, and only the code that failed knew their lengths"
            )
        sent, received = round_.least, round_.least + announced.popleft()
    if not sent <= received <= round_.numel:
        raise TransportError(f"a peer announces {received} elements, where there are {round_.numel} at most")
    out = torch.empty(received, dtype=round_.dtype, device=device)
    zeros = torch.zeros(sent, dtype=round_.dtype, device=device)
    wait_unread(comm.shift(out, zeros, round_.by, round_.tells))
    trailer = out.view(torch.uint8)[out.nbytes - 8 * round_.tells :].clone()
    words: list[int] = trailer.view(torch.int64).tolist()
    return words

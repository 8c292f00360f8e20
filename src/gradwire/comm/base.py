"""The five verbs through which a payload leaves the process, and what they cost on the wire.

Vocabulary: a *round* is one collective of one unit; *bytes on the wire* are the bytes that a rank
sends, averaged over ranks (what one rank sends another receives, so the mean received is the same).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

Verb = Literal["all_reduce", "all_gather", "broadcast", "all_to_all", "shift"]

Algorithm = Literal["library", "ring", "tree", "star"]
"""How an all-reduce goes: as the transport's library likes, or by hops of our own (`gradwire.comm.hops`)."""

Broadcasting = Literal["library", "scatter"]
"""How a broadcast goes: by the library, or as a scatter and an all-gather of our own."""


def check_algorithm(algorithm: Algorithm) -> Algorithm:
    """Return `algorithm` when it is one of an all-reduce, else raise."""
    if algorithm not in get_args(Algorithm):
        raise ValueError(f"algorithm={algorithm!r} is none of {', '.join(get_args(Algorithm))}")
    return algorithm


@dataclass(frozen=True)
class Round:
    """One collective: the verb, and the payload that *each* rank hands in (elements and dtype).

    `by` is how far a shift goes, and `src` where a broadcast comes from: a rank that owes one must meet its
    peers. They say nothing of other verbs. `algorithm` is how an all-reduce or a broadcast goes.
    A round announced as `at_most` may be shorter, or left out at the end, as ranks agree on the way: where
    one brings zeros to what is agreed by, all leave it out. An `at_most` shift always takes place, because
    its length is known to two ranks only. An earlier shift has told it to the receiver: the last `tells`
    int64 of a shift are how many elements beyond `least` the next `at_most` shifts have, in their order.
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

    def allows(self, issued: Round) -> bool:
        """Whether `issued` is what this round has announced."""
        if not self.at_most:
            return issued == self
        shorter = replace(self, numel=issued.numel, at_most=False)
        return issued == shorter and issued.numel <= self.numel

    @property
    def payload_bytes(self) -> int:
        """Bytes that one rank hands in."""
        return self.numel * self.dtype.itemsize

    def wire_bytes(self, world: int) -> float:
        """Bytes sent per rank, averaged over `world` ranks, by the algorithms that gloo and NCCL run.

        Ring all-reduce 2(N-1)/N·M, ring all-gather (N-1)·M, tree broadcast (N-1)/N·M in the mean,
        pairwise all-to-all (N-1)/N·M, shift M (nothing when alone). In the mean over ranks our own
        algorithms send as much: of an all-reduce 2(N-1) payloads in all, wherever they are added up, and
        of a broadcast N-1. How it is shared out between ranks differs (`gradwire.comm.hops`), and with it
        the time.

        >>> Round("all_reduce", 1000, torch.float32).wire_bytes(4)
        6000.0
        """
        others = world - 1
        share = {
            "all_reduce": 2 * others / world,
            "all_gather": others,
            "broadcast": others / world,
            "all_to_all": others / world,
            "shift": min(others, 1),
        }[self.verb]
        return float(share * self.payload_bytes)


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Block until the result is in place. Raises `TransportError` when the transport broke."""

    def then(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, from any thread, when the collective has ended well or badly.

        The callback must neither block nor issue a collective.
        """


class Done:
    """Nothing is under way."""

    def wait(self) -> None:
        """Return at once."""

    def then(self, callback: Callable[[], None]) -> None:
        """Call back at once."""
        callback()


DONE = Done()


class Comm(Protocol):
    """What an exchange may use to talk to its peers. All verbs are asynchronous.

    Every rank must issue the same verbs with the same sizes in the same order. Buffers belong to the
    caller and must not be touched until the returned `Pending` has been waited for.
    """

    @property
    def rank(self) -> int:
        """This rank's number within the group."""

    @property
    def world(self) -> int:
        """Number of ranks in the group."""

    def all_reduce(self, tensor: Tensor, algorithm: Algorithm = "library") -> Pending:
        """Sum `tensor` over all ranks, in place."""

    def all_gather(self, out: Tensor, tensor: Tensor) -> Pending:
        """Fill `out` (world, numel) with every rank's `tensor` (numel,)."""

    def broadcast(self, tensor: Tensor, src: int, algorithm: Broadcasting = "library") -> Pending:
        """Overwrite `tensor` with that of rank `src`."""

    def all_to_all(self, out: Tensor, tensor: Tensor) -> Pending:
        """Send row r of `tensor` (world, n) to rank r; row r of `out` comes from rank r."""

    def shift(self, out: Tensor, tensor: Tensor, by: int = 1) -> Pending:
        """Send `tensor` to rank + by and receive `out` from rank - by (modulo the world).

        `out` is as long as what that rank sends, which may be another length than that of `tensor`.
        """

"""Ranks as threads whose messages are counted."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gradwire.comm import ThreadComm, run_ranks
from gradwire.comm.algorithms import Peers
from gradwire.comm.base import Pending
from gradwire.comm.threads import ThreadPeers


class Counted:
    """The other threads; `sent` are the elements of every message that left this rank, by target."""

    def __init__(self, peers: ThreadPeers) -> None:
        self._peers = peers
        self.rank, self.world = peers.rank, peers.world
        self.sent: list[tuple[int, int]] = []

    def send(self, tensor: Tensor, target: int) -> Pending:
        """See `Peers.send`."""
        self.sent.append((target, tensor.numel()))
        return self._peers.send(tensor, target)

    def receive(self, out: Tensor, source: int) -> Pending:
        """See `Peers.receive`."""
        return self._peers.receive(out, source)


def messages(world: int, collective: Callable[[Peers], None]) -> list[list[tuple[int, int]]]:
    """What every rank has sent (target, elements) by the end of `collective`."""

    def body(comm: ThreadComm) -> list[tuple[int, int]]:
        peers = Counted(comm.peers)
        collective(peers)
        return peers.sent

    return run_ranks(world, body)

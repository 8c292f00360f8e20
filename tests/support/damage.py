"""Damaged bytes: a comm of threads in which bits of what one rank receives are flipped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradwire.comm import Pending, Round, ThreadComm
from gradwire.comm.algorithms import Collective, Peers, PointToPointComm
from gradwire.comm.base import DONE


@dataclass
class Damage:
    """What happens to the messages that one rank receives, which have numbers from 0.

    `flips` are the bits to flip in message `message`, and in all after it if the damage is `lasting`. `sizes`
    are the bytes of all messages so far.
    """

    message: int = -1
    flips: tuple[int, ...] = ()
    lasting: bool = False
    sizes: list[int] = field(default_factory=list)

    def strike(self, received: Tensor) -> None:
        """Note a message, and damage it if its turn has come."""
        raw = received.view(-1).view(torch.uint8)
        number = len(self.sizes)
        if number == self.message or (self.lasting and number > self.message):
            for bit in self.flips:
                raw[bit // 8 % raw.numel()] ^= 1 << bit % 8
        self.sizes.append(raw.numel())


class DamagingComm(PointToPointComm):
    """A comm between threads, on a rank whose messages `damage` strikes."""

    def __init__(self, inner: ThreadComm, damage: Damage) -> None:
        self.rank, self.world = inner.rank, inner.world
        self._inner, self._damage = inner, damage

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
        """As `Comm.issue`; done on return."""
        self._inner.issue(round_, tensor, out)
        if round_.verb in ("all_gather", "all_to_all"):
            for rank, row in enumerate(out.view(self.world, -1)):
                if rank != self.rank:
                    self._damage.strike(row)
        else:
            self._damage.strike(out)
        return DONE

    def hop(self, collective: Collective) -> Pending:
        """As `PointToPointComm.hop`; done on return."""
        return self._inner.hop(lambda peers: collective(_DamagingPeers(peers, self._damage)))


class _DamagingPeers:
    def __init__(self, peers: Peers, damage: Damage) -> None:
        self.rank, self.world = peers.rank, peers.world
        self.send = peers.send
        self._peers, self._damage = peers, damage

    def receive(self, out: Tensor, source: int) -> Pending:
        return _Struck(self._peers.receive(out, source), lambda: self._damage.strike(out))


class _Struck:
    def __init__(self, coming: Pending, strike: Callable[[], None]) -> None:
        self.then = coming.then
        self._coming, self._strike = coming, strike

    def wait(self) -> None:
        self._coming.wait()
        self._strike()

"""Ring all-reduce: N-1 hops that add up, N-1 hops that hand on (Thakur et al. 2005, section 4.4's ring).

Every rank sends 2(N-1)/N·M: 2(N-1)α + 2(N-1)/N·Mβ.

Order of addition: part p is added up from rank p on, ((x_p + x_(p+1)) + x_(p+2)) + …, and complete at rank
p-1, whose bits all others get.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.comm.hops.base import Peers, parts_of


def ring_all_reduce(tensor: Tensor, peers: Peers) -> None:
    """Sum `tensor` over all ranks, in place. Takes memory for one part beside it."""
    parts = parts_of(tensor, peers.world)
    _add_up(parts, peers)
    _hand_on(parts, peers)


def _neighbours(peers: Peers) -> tuple[int, int]:
    """To whom a rank sends, and from whom it receives."""
    return (peers.rank + 1) % peers.world, (peers.rank - 1) % peers.world


def _add_up(parts: Sequence[Tensor], peers: Peers) -> None:
    """Afterwards this rank holds the sum of part rank + 1."""
    target, source = _neighbours(peers)
    scratch = torch.empty_like(parts[0])
    for hop in range(peers.world - 1):
        part = parts[(peers.rank - hop - 1) % peers.world]
        incoming = scratch[: part.numel()]
        came = peers.receive(incoming, source)  # announced before anything is sent: see `ProcessGroupComm`
        sent = peers.send(parts[(peers.rank - hop) % peers.world], target)
        came.wait()
        torch.add(incoming, part, out=part)
        sent.wait()


def _hand_on(parts: Sequence[Tensor], peers: Peers) -> None:
    """From one part each, rank + 1, to all parts on all ranks."""
    target, source = _neighbours(peers)
    for hop in range(peers.world - 1):
        came = peers.receive(parts[(peers.rank - hop) % peers.world], source)
        sent = peers.send(parts[(peers.rank + 1 - hop) % peers.world], target)
        came.wait()
        sent.wait()

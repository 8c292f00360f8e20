"""Broadcast as a scatter and an all-gather (van de Geijn; Thakur et al. 2005, section 4.2).

The root gives every rank a part, and a ring passes the parts round: Nα + 2(N-1)/N·Mβ, the root's bytes,
against log N·(α + Mβ) of a binomial tree. From three ranks on that is less where bandwidth is what lacks,
and more where latency is. Nothing is sent to the root, which has it all, so that N-1 payloads travel
altogether, as in a tree.
"""

from __future__ import annotations

from torch import Tensor

from gradwire.comm.hops.base import Peers, parts_of


def scatter_broadcast(tensor: Tensor, src: int, peers: Peers) -> None:
    """Overwrite `tensor` with that of rank `src`."""
    parts, world = parts_of(tensor, peers.world), peers.world
    place = (peers.rank - src) % world  # how far behind the root
    target, source = (peers.rank + 1) % world, (peers.rank - 1) % world
    sent = []
    if place == 0:
        sent += [peers.send(parts[number], (src + number) % world) for number in range(1, world)]
    else:
        peers.receive(parts[place], src).wait()
    for hop in range(world - 1):
        came = None if place == 0 else peers.receive(parts[(place - hop - 1) % world], source)
        if target != src:
            sent.append(peers.send(parts[(place - hop) % world], target))
        if came is not None:
            came.wait()
    for each in sent:
        each.wait()

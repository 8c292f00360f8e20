"""Star all-reduce: rank 0 is the parameter server (Li et al. 2014), and trains as all others do.

Tyagi and Swany 2024, "Flexible communication …", table I: 2α + 2(N-1)Mβ, because the server's link carries
everybody's payload, both ways.

Order of addition: by rank, ((x_0 + x_1) + x_2) + …, at rank 0, whose bits all others get.
"""

from __future__ import annotations

from torch import Tensor

from gradwire.comm.hops.base import Peers


def star_all_reduce(tensor: Tensor, peers: Peers) -> None:
    """Sum `tensor` over all ranks, in place. The server takes N-1 times as much memory beside it."""
    flat, others = tensor.view(-1), range(1, peers.world)
    if peers.rank != 0:
        peers.send(flat, 0).wait()
        peers.receive(flat, 0).wait()
        return
    received = flat.new_empty(len(others), flat.numel())
    pending = [peers.receive(row, source) for row, source in zip(received, others, strict=True)]
    for row, arrival in zip(received, pending, strict=True):
        arrival.wait()
        flat += row
    for sent in [peers.send(flat, target) for target in others]:
        sent.wait()

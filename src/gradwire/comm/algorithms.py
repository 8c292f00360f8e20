"""Collectives of our own, on point-to-point messages: the same code over processes and over threads.

Vocabulary: a *hop* is one message; M is the payload of a rank in bytes, N the number of ranks. α is the
latency of a hop and β the seconds per byte. The algorithms block; a caller that must not block runs them on
another thread (`gradwire.comm.progress`). Messages of no elements are left out by sender and receiver.

A *stripe* is a part of a message that travels over a connection of its own (`stripes`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeAlias, cast

import torch
from torch import Tensor

from gradwire.comm.base import Algorithm, Broadcasting, Comm, Pending, Round


class Peers(Protocol):
    """The other ranks. Messages between two ranks arrive in the order in which they were sent."""

    @property
    def rank(self) -> int:
        """This rank's number."""

    @property
    def world(self) -> int:
        """Number of ranks."""

    def send(self, tensor: Tensor, target: int) -> Pending:
        """Send `tensor` (numel,) to rank `target`; it must not be written to before the wait."""

    def receive(self, out: Tensor, source: int) -> Pending:
        """Fill `out` (numel,) with what rank `source` sends."""


Collective: TypeAlias = Callable[[Peers], None]
"""A function that blocks until this rank's share is done. All ranks call it, in the same order."""


class PointToPointComm(Comm):
    """A `Comm` that carries messages, and so collectives of our own."""

    @abstractmethod
    def hop(self, collective: Collective) -> Pending:
        """Run `collective` after those issued before; does not block."""


def parts_of(tensor: Tensor, world: int) -> Sequence[Tensor]:
    """Views of `world` parts of `tensor`; the first may have one element more than the last.

    >>> import torch
    >>> [part.tolist() for part in parts_of(torch.arange(5), 3)]
    [[0, 1], [2, 3], [4]]
    """
    return tensor.view(-1).tensor_split(world)


STRIPE_BYTES = 2**15
"""Least size of a stripe, in bytes. A new or rested connection sends 15 kB before it waits for an answer, so
a message of less than two such flights gains nothing from a second connection."""


def stripes(message: Tensor, connections: int) -> Sequence[Tensor]:
    """Views of `message` (numel,), one for each connection that carries a part of it, in order.

    Sender and receiver know the length of a message and the number of connections, and so cut alike. A
    connection keeps its order: a stripe is the n-th one on its connection for both sides. So messages arrive
    in order, whichever connection is ahead. Short messages take the first connection alone.

    >>> message = torch.empty(3 * STRIPE_BYTES + 1, dtype=torch.uint8)
    >>> [part.numel() for part in stripes(message, 2)], len(stripes(message, 8)), len(stripes(message[:9], 8))
    ([49153, 49152], 3, 1)
    """
    count = min(connections, message.nbytes // STRIPE_BYTES)
    return message.view(-1).tensor_split(count) if count > 1 else [message]


def ring_all_reduce(tensor: Tensor, peers: Peers) -> None:
    """Sum `tensor` over all ranks, in place: N-1 hops that add up, N-1 hops that hand on.

    The ring of Thakur et al. 2005, section 4.4. Every rank sends 2(N-1)/N·M: 2(N-1)α + 2(N-1)/N·Mβ. Takes
    memory for one part beside the tensor.

    Order of addition: part p is added up from rank p on, ((x_p + x_(p+1)) + x_(p+2)) + …, and complete at
    rank p-1, whose bits all others get.
    """
    parts = parts_of(tensor, peers.world)
    _ring_sum(parts, peers)
    _ring_gather(parts, peers)


def _ring_neighbours(peers: Peers) -> tuple[int, int]:
    """The ranks that this one sends to and receives from, in a ring."""
    return (peers.rank + 1) % peers.world, (peers.rank - 1) % peers.world


def _ring_sum(parts: Sequence[Tensor], peers: Peers) -> None:
    """Add up around the ring. Afterwards this rank holds the sum of part rank + 1."""
    target, source = _ring_neighbours(peers)
    scratch = torch.empty_like(max(parts, key=Tensor.numel))
    for hop in range(peers.world - 1):
        part = parts[(peers.rank - hop - 1) % peers.world]
        incoming = scratch[: part.numel()]
        came = peers.receive(incoming, source)  # announced before anything is sent: see `ProcessGroupComm`
        sent = peers.send(parts[(peers.rank - hop) % peers.world], target)
        came.wait()
        torch.add(incoming, part, out=part)
        sent.wait()


def _ring_gather(parts: Sequence[Tensor], peers: Peers) -> None:
    """Hand parts on: each rank begins with part rank + 1, and all ranks end with all parts."""
    target, source = _ring_neighbours(peers)
    for hop in range(peers.world - 1):
        came = peers.receive(parts[(peers.rank - hop) % peers.world], source)
        sent = peers.send(parts[(peers.rank + 1 - hop) % peers.world], target)
        came.wait()
        sent.wait()


GLOO_SEGMENT_BYTES = 2**20
"""Largest segment, in bytes, into which gloo cuts a sum."""


class Reversed:
    """`peers`, numbered the other way round: a ring among them runs backwards."""

    def __init__(self, peers: Peers) -> None:
        self._peers, self.world = peers, peers.world
        self.rank = -peers.rank % peers.world

    def send(self, tensor: Tensor, target: int) -> Pending:
        return self._peers.send(tensor, -target % self.world)

    def receive(self, out: Tensor, source: int) -> Pending:
        return self._peers.receive(out, -source % self.world)


def gloo_all_reduce(tensor: Tensor, peers: Peers) -> None:
    """Sum `tensor` over all ranks, in place, with the bits of gloo's own ring. Costs as `ring_all_reduce`.

    gloo's messages take one connection, and these as many as `peers` has. Both leave the same bits, so a
    run's numbers do not depend on how many connections there are.

    Order of addition: gloo gives each rank as many segments, and its ring runs backwards. Rank c's part is
    added up from rank c-1 on, ((x_(c-1) + x_(c-2)) + x_(c-3)) + …, and complete at rank c.
    """
    flat, world = tensor.view(-1), peers.world
    each = max(-(-flat.nbytes // (world * GLOO_SEGMENT_BYTES)), 2)  # segments of a rank
    segment = -(-flat.numel() // (world * each))
    chunks = [flat[rank * each * segment : (rank + 1) * each * segment] for rank in range(world)]
    parts, backwards = [chunks[(1 - part) % world] for part in range(world)], Reversed(peers)
    _ring_sum(parts, backwards)
    _ring_gather(parts, backwards)


def ring_all_gather(rows: Tensor, peers: Peers) -> None:
    """Fill `rows` (world, numel) where each rank has filled its own. (N-1)α + (N-1)·Mβ, as gloo's."""
    _ring_gather([rows[part - 1] for part in range(peers.world)], peers)


def swap_all_reduce(tensor: Tensor, peers: Peers) -> None:
    """Sum `tensor` over two ranks, in place: they swap, and both add x_0 + x_1. α + Mβ.

    As many bytes as a ring of two in half as many hops. Takes as much memory as the tensor beside it.
    """
    flat = tensor.view(-1)
    other = torch.empty_like(flat)
    came = peers.receive(other, 1 - peers.rank)
    sent = peers.send(flat, 1 - peers.rank)
    came.wait()
    sent.wait()  # before the sum takes the place of what is sent
    torch.add(*((flat, other) if peers.rank == 0 else (other, flat)), out=flat)


def strides(world: int) -> tuple[int, ...]:
    """1, 2, 4 … below `world`: how far partners are apart, level by level.

    >>> strides(5), strides(1)
    ((1, 2, 4), ())
    """
    return tuple(2**level for level in range((world - 1).bit_length()))


def tree_all_reduce(tensor: Tensor, peers: Peers) -> None:
    """Sum `tensor` over all ranks, in place: a binomial tree adds up towards rank 0, then hands the sum down.

    Tyagi and Swany 2023, "Flexible communication …", table I: 2α·log N + 2·log N·Mβ. Rank 0 sends log N·M
    and receives as much, a leaf sends and receives M. Nothing is pipelined (NCCL's tree is), so large
    payloads take log N times as long as they must. Ranks that add take as much memory beside the tensor.

    Order of addition: sums of neighbouring ranks, then of neighbouring pairs, and so on, the lower rank's sum
    first: (x_0 + x_1) + (x_2 + x_3). Rank 0 has the sum, whose bits all others get.
    """
    flat = tensor.view(-1)
    _tree_sum(flat, peers)
    _tree_broadcast(flat, peers)


def _tree_sum(flat: Tensor, peers: Peers) -> None:
    other: Tensor | None = None
    for by in strides(peers.world):
        if peers.rank % (2 * by) == by:
            peers.send(flat, peers.rank - by).wait()
            return
        if peers.rank + by < peers.world:
            other = torch.empty_like(flat) if other is None else other
            peers.receive(other, peers.rank + by).wait()
            flat += other


def _tree_broadcast(flat: Tensor, peers: Peers) -> None:
    for by in reversed(strides(peers.world)):
        if peers.rank % (2 * by) == by:
            peers.receive(flat, peers.rank - by).wait()
        elif peers.rank % (2 * by) == 0 and peers.rank + by < peers.world:
            peers.send(flat, peers.rank + by).wait()


def star_all_reduce(tensor: Tensor, peers: Peers) -> None:
    """Sum `tensor` over all ranks, in place: rank 0 is the parameter server, and trains as all others do.

    Li et al. 2014; Tyagi and Swany 2023, "Flexible communication …", table I: 2α + 2(N-1)Mβ, because the
    server's link carries every rank's payload, both ways. The server takes N-1 times the tensor's memory
    beside it.

    Order of addition: by rank, ((x_0 + x_1) + x_2) + …, at rank 0, whose bits all others get.
    """
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


def direct_all_reduce(tensor: Tensor, peers: Peers) -> None:
    """Sum `tensor` over all ranks, in place: every rank sends it to every other one, and adds what it
    receives.

    α + (N-1)·Mβ: the shortest algorithm if only latency counts. Takes memory for N-1 further tensors.

    Order of addition: by rank, ((x_0 + x_1) + x_2) + …, so that all ranks get the same bits.
    """
    flat, others = tensor.view(-1), [rank for rank in range(peers.world) if rank != peers.rank]
    received = flat.new_empty(len(others), flat.numel())
    came = [peers.receive(row, source) for row, source in zip(received, others, strict=True)]
    sent = [peers.send(flat, target) for target in others]
    for each in (*came, *sent):
        each.wait()
    add_by_rank(flat, received, peers.rank)


def add_by_rank(own: Tensor, others: Tensor, rank: int) -> None:
    """Add `others` (world - 1, numel), from all ranks but this one, to `own` (numel,), in rank order.

    `others` is scratch afterwards.

    >>> own = torch.tensor([1.0])
    >>> add_by_rank(own, torch.tensor([[2.0], [4.0]]), rank=1)
    >>> own
    tensor([7.])
    """
    before, after = others[:rank], others[rank:]
    for row in before[1:]:
        before[0].add_(row)
    if rank > 0:
        torch.add(before[0], own, out=own)
    for row in after:
        own.add_(row)


def scatter_broadcast(tensor: Tensor, src: int, peers: Peers) -> None:
    """Overwrite `tensor` with that of rank `src`, by a scatter and an all-gather.

    Van de Geijn's algorithm; Thakur et al. 2005, section 4.2. The root gives every rank a part, and a ring
    passes the parts round: Nα + 2(N-1)/N·Mβ on the root's link, against log N·(α + Mβ) of a binomial tree.
    From three ranks on, this is faster if bandwidth is scarce, and slower if latency is high. Nothing is sent
    to the root, which has everything, so N-1 payloads are sent altogether, as in a tree.
    """
    parts, world = parts_of(tensor, peers.world), peers.world
    place = (peers.rank - src) % world  # hops after the root in the ring
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


ALL_REDUCES: Mapping[Algorithm, Callable[[Tensor, Peers], None]] = {
    "ring": ring_all_reduce,
    "tree": tree_all_reduce,
    "star": star_all_reduce,
    "direct": direct_all_reduce,
}
"""All-reduces of our own by algorithm, without the library's."""

BROADCASTS: Mapping[Broadcasting, Callable[[Tensor, int, Peers], None]] = {"scatter": scatter_broadcast}
"""Broadcasts of our own by algorithm."""


def collective_of(round_: Round, tensor: Tensor) -> Collective:
    """The all-reduce or broadcast of `tensor` by the round's algorithm, one of our own."""
    if round_.verb == "all_reduce":
        return partial(ALL_REDUCES[cast(Algorithm, round_.algorithm)], tensor)
    return partial(BROADCASTS[cast(Broadcasting, round_.algorithm)], tensor, round_.src)

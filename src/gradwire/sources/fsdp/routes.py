"""Routes of rows between ranks: directly, or by way of the ranks that share a node.

If S ranks of W share a node, an all-to-all among all W sends S(W - S) rows over the node's link. A ring sends
about W of them. Two levels send W - S: the ranks of a node sum their rows first, uncoded, and then ranks of
equal place in their nodes exchange codes.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm import Pending, ProcessGroupComm
from gradwire.comm.base import DONE, Finishing
from gradwire.comm.groups import Borrowed
from gradwire.sources.nodes.members import NodeTable


class Route(Protocol):
    """The collectives of scatters and gathers over `world` ranks."""

    world: int
    targets: tuple[int, ...]
    """Ranks to which this rank sends coded rows, itself among them, in the order of rows."""

    across: int
    inside: int
    """Rows that a rank sends in a collective: (over the link of its node, or its own; inside the node)."""
    of_rings: float
    """Rows that a ring would send over the link of its node, per rank."""

    def rows(self, x: Tensor) -> Tensor:
        """The rows (targets, elements) that this rank has to code of x (world · elements,)."""
        ...

    def scatter(self, received: Tensor, rows: Tensor) -> Pending:
        """Send each target one of `rows` (targets, bytes), and receive as many rows."""
        ...

    rank: int
    place: int
    """This rank, and its place in `targets`."""

    def gather(self, rows: Tensor, row: Tensor) -> Pending:
        """Fill `rows` (world, bytes) with every rank's `row` (bytes,)."""
        ...

    def exchange(self, rows: Tensor, row: Tensor) -> Pending:
        """Fill `rows` (targets, …) with the `row` of each target."""
        ...

    def spare(self, out: Tensor) -> Tensor:
        """Room that `relay` needs to fill `out`."""
        ...

    def relay(self, rows: Tensor, out: Tensor, spare: Tensor) -> Pending:
        """Fill `out` (world · elements,) with the rows of all ranks, of which this rank has those of its
        targets in `rows`; `spare` is from `spare`.
        """
        ...

    def heard(self, words: list[int]) -> Generator[Pending, None, list[list[int]]]:
        """The `words` of each rank that relays for others of the same gather; yields a collective to be
        waited for, if one is needed.
        """
        ...


class Straight:
    """A `Route` of one collective among all ranks of `group`."""

    inside = 0

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._comm = ProcessGroupComm(group)
        self.world = self._comm.world
        self.targets = tuple(range(self.world))
        self.rank = self.place = self._comm.rank
        self.across = self.world - 1
        self.of_rings = float(self.across)

    def rows(self, x: Tensor) -> Tensor:
        """Return all of x: nothing is summed before."""
        return x.view(self.world, -1)

    def scatter(self, received: Tensor, rows: Tensor) -> Pending:
        """Issue one all-to-all."""
        return self._comm.all_to_all(received, rows)

    def gather(self, rows: Tensor, row: Tensor) -> Pending:
        """Issue one all-gather."""
        return self._comm.all_gather(rows, row)

    exchange = gather

    def spare(self, out: Tensor) -> Tensor:
        """Nothing: all rows come from the ranks themselves."""
        return out[:0]

    def relay(self, rows: Tensor, out: Tensor, spare: Tensor) -> Pending:
        """Copy `rows`: they are those of all ranks."""
        out.view(rows.shape).copy_(rows)
        return DONE

    def heard(self, words: list[int]) -> Generator[Pending, None, list[list[int]]]:
        """The words of this rank: it has heard all others."""
        yield DONE
        return [words]

    def close(self) -> None:
        """End the comm's thread."""
        self._comm.close()


def targets_of(nodes: NodeTable | None, rank: int, world: int) -> tuple[int, ...]:
    """Ranks to which `rank` sends coded rows: all, or on `nodes` those with its place in their nodes.

    They are in ascending order, in which process groups number their ranks.

    >>> targets_of(None, 1, 4), targets_of(NodeTable(((0, 3), (1, 2))), 3, 4)
    ((0, 1, 2, 3), (2, 3))
    """
    return tuple(range(world)) if nodes is None else tuple(sorted(nodes.between(rank)))


class ByNodes:
    """A `Route` of two levels. A scatter adds up inside the node, in the type of x and in rank order, and
    sends codes between nodes. A gather brings codes from other nodes first, and then those of the neighbours.
    """

    def __init__(
        self,
        nodes: NodeTable,
        rank: int,
        inside: dist.ProcessGroup,
        between: dist.ProcessGroup,
        where: torch.device,
    ) -> None:
        """Prepare the route of this `rank`.

        Args:
            nodes: the ranks of each node.
            rank: this rank in the mesh.
            inside: group of the ranks of its node, for this route alone.
            between: group of the ranks in `targets`, for this route alone.
            where: device of the rows.
        """
        self._inside, self._between = Borrowed(inside), Borrowed(between)
        self.groups = inside, between
        per_node, count = nodes.per_node, len(nodes.nodes)
        self.world = per_node * count
        self.targets = targets_of(nodes, rank, self.world)
        self.rank, self.place = rank, self.targets.index(rank)
        self.across, self.inside = count - 1, (per_node - 1) * count
        self.of_rings = (self.world - 1) / per_node
        by_place = [targets_of(nodes, each, self.world) for each in nodes.nodes[0]]
        self._order = torch.tensor([each for ranks in by_place for each in ranks], device=where)
        """All ranks, sorted by place in the node."""

    def rows(self, x: Tensor) -> Tensor:
        """The node's sums of the targets' rows: one all-to-all inside the node."""
        mine = x.view(self.world, -1)[self._order].view(self._inside.world, -1)
        parts = torch.empty_like(mine)
        self._inside.all_to_all(parts, mine).wait()
        total = parts[0]
        for part in parts[1:]:
            total.add_(part)
        return total.view(len(self.targets), -1)

    def scatter(self, received: Tensor, rows: Tensor) -> Pending:
        """Issue one all-to-all between nodes."""
        return self._between.all_to_all(received, rows)

    def gather(self, rows: Tensor, row: Tensor) -> Pending:
        """Issue one all-gather between nodes; `wait` adds one inside the node."""
        of_place = row.new_empty(len(self.targets), row.numel())

        def finish() -> None:
            self.relay(of_place, rows, self.spare(rows)).wait()

        return Finishing(self.exchange(of_place, row), finish)

    def exchange(self, rows: Tensor, row: Tensor) -> Pending:
        """Issue one all-gather between nodes."""
        return self._between.all_gather(rows, row)

    def spare(self, out: Tensor) -> Tensor:
        """As much as `out`: rows come in another order."""
        return torch.empty_like(out)

    def relay(self, rows: Tensor, out: Tensor, spare: Tensor) -> Pending:
        """Issue one all-gather inside the node; `wait` puts rows in order."""
        of_all = spare.view(self._inside.world, -1)

        def finish() -> None:
            found = out.view(self.world, -1)
            found[self._order] = of_all.view(found.shape)

        return Finishing(self._inside.all_gather(of_all, rows.reshape(-1)), finish)

    def heard(self, words: list[int]) -> Generator[Pending, None, list[list[int]]]:
        """Issue one small all-gather inside the node."""
        mine = torch.tensor(words, dtype=torch.int64, device=self._order.device)
        found = mine.new_empty(self._inside.world, len(words))
        yield self._inside.all_gather(found, mine)
        told: list[list[int]] = found.tolist()
        return told

    def close(self) -> None:
        """End the comms' threads, and give back the groups if nothing runs on them, or has failed there."""
        self._inside.close()
        self._between.close()


class Routes:
    """Routes of one model: one for each process group over which FSDP2 sends, or two levels for all."""

    def __init__(self) -> None:
        self._straight: dict[str, Straight] = {}
        self.control: Borrowed | None = None
        """That over which ranks agree, if its group goes with the model."""
        self.by_nodes: ByNodes | None = None

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The groups that were made for these routes."""
        return () if self.by_nodes is None else self.by_nodes.groups

    def over(self, group: dist.ProcessGroup) -> Route:
        """The route among the ranks of `group`. Two levels are for groups of all ranks of the mesh."""
        if self.by_nodes is not None and group.size() == self.by_nodes.world:
            return self.by_nodes
        name = group.group_name
        if name not in self._straight:
            self._straight[name] = Straight(group)
        return self._straight[name]

    def close(self) -> None:
        """End the threads of all routes, and give back the groups that were made for them."""
        for each in (*self._straight.values(), self.by_nodes, self.control):
            if each is not None:
                each.close()
        self._straight.clear()
        self.by_nodes = self.control = None

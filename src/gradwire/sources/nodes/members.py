"""Agreement of all ranks on which of them share a node.

Two levels need nodes of equal size, several of them, each of several ranks. Any other world is flat.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gradwire.comm import Comm, gathered

Nodes: TypeAlias = Literal["auto"] | Iterable[Iterable[int] | dist.ProcessGroup] | DeviceMesh | None
""""auto", as the launcher says; the ranks of every node, or their groups; a mesh of two dimensions, nodes by
the ranks of each; or `None` for a flat world."""

Members: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class NodeTable:
    """Members of all nodes, as ascending ranks of the model's process group."""

    nodes: tuple[Members, ...]

    @property
    def per_node(self) -> int:
        """Ranks on each."""
        return len(self.nodes[0])

    def inside(self, rank: int) -> Members:
        """The ranks of `rank`'s node.

        >>> table = NodeTable(((0, 1), (2, 3)))
        >>> table.inside(2), table.between(2)
        ((2, 3), (0, 2))
        """
        return next(node for node in self.nodes if rank in node)

    def between(self, rank: int) -> Members:
        """The ranks that have the same place in their nodes as `rank` has: one per node."""
        place = self.inside(rank).index(rank)
        return tuple(node[place] for node in self.nodes)


def kind_of(nodes: Nodes) -> str:
    """The kind of `nodes`, which must be the same on all ranks before they exchange more.

    >>> kind_of("auto"), kind_of(None), kind_of([[0, 1], [2, 3]])
    ('auto', 'flat', 'given')
    """
    return "flat" if nodes is None else "auto" if isinstance(nodes, str) else "given"


def neighbours(nodes: Nodes, ranks: Sequence[int], rank: int) -> Members:
    """Members of `rank`'s node, by numbers within the group; `ranks` are the group's global ranks.

    Only `rank` itself, if the world is flat. Raises `ValueError` for nodes that leave it out.
    """
    mine = _global_neighbours(nodes, ranks[rank])
    members = tuple(sorted(ranks.index(each) for each in set(mine) if each in ranks))
    if kind_of(nodes) == "given" and len(members) != len(mine):
        raise ValueError(f"nodes has a node of ranks {sorted(mine)}, the model's ranks are {list(ranks)}")
    return members


def _global_neighbours(nodes: Nodes, rank: int) -> list[int]:
    if nodes is None:
        return [rank]
    if isinstance(nodes, str):
        if nodes != "auto":
            raise ValueError(f"nodes={nodes!r} is neither 'auto', a list of nodes, a DeviceMesh, nor None")
        shared = _per_node()
        first = rank // shared * shared
        return list(range(first, first + shared))
    if isinstance(nodes, DeviceMesh):
        if nodes.ndim != 2:
            raise ValueError(
                f"nodes is a mesh of {nodes.ndim} dimensions; it takes two: nodes, and ranks of each"
            )
        listed = [[int(each) for each in row] for row in nodes.mesh]
    else:
        listed = [_ranks_of(each) for each in _several(nodes)]
    mine = [node for node in listed if rank in node]
    if len(mine) != 1:
        raise ValueError(f"nodes={listed} has rank {rank} {len(mine)} times; every rank is on one node")
    return mine[0]


def _several(nodes: object) -> Iterable[Any]:
    if not isinstance(nodes, Iterable):
        raise ValueError(f"nodes={nodes!r} is neither 'auto', a list of nodes, a DeviceMesh, nor None")
    return nodes


def _ranks_of(node: Any) -> list[int]:
    without_us: object = dist.GroupMember.NON_GROUP_MEMBER
    if node is without_us:
        return []
    if isinstance(node, dist.ProcessGroup):
        return dist.get_process_group_ranks(node)
    try:
        return [index(each) for each in node]
    except TypeError as error:
        raise ValueError(f"nodes has {node!r}, which is neither the ranks of a node nor a group") from error


def _per_node() -> int:
    """The ranks per node by torchrun and other launchers, which number ranks node by node; 1 if unknown."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return int(text) if text.isdecimal() and int(text) > 0 else 1


def agreed(kind: str, mine: Members, comm: Comm) -> tuple[NodeTable | None, str]:
    """Agree on the nodes. A collective: one all-gather of a byte per pair of ranks.

    Args:
        kind: "given" if the user named the nodes, else they were detected.
        mine: ranks of this rank's node.
        comm: all ranks.

    Returns the nodes, or `None` if the world is flat; and a text that says why detected nodes cannot be used,
    else empty. Raises `ValueError` on all ranks if given nodes contradict each other or differ in size.
    """
    row = torch.zeros(comm.world, dtype=torch.uint8, device="cpu")
    row[list(mine)] = 1
    said = [tuple(int(each) for each in row.nonzero()) for row in gathered(comm, row)]
    wrong = _complaint(said)
    if wrong is not None:
        if kind == "given":
            raise ValueError(f"nodes: {wrong}")
        return None, wrong
    nodes = tuple(sorted(set(said)))
    return NodeTable(nodes) if 1 < len(nodes) < comm.world else None, ""


def _complaint(said: Sequence[Members]) -> str | None:
    """Reason why these are no nodes of equal size, by rank; `None` if they are."""
    for rank, members in enumerate(said):
        if rank not in members or any(said[other] != members for other in members):
            return f"rank {rank} says that ranks {list(members)} share its node, and these say otherwise"
    sizes = sorted({len(members) for members in said})
    if len(sizes) > 1:
        return f"nodes differ in size, from {sizes[0]} to {sizes[-1]} ranks"
    return None

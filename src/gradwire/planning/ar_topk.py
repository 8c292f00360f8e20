"""AR-Topk's collectives and when to use which (Tyagi, Swany 2024, equations 4 and 5).

Differences from the paper: equation 5a divides by zero for two ranks, where ring and tree cost the same;
and the choice is made by the smallest calibrated cost (`fastest`), which these thresholds only check.
"""

from __future__ import annotations

import math

from gradwire.planning.collectives import Sends, Transfer, levels

ALL_GATHER, RING, TREE, STAR = "all_gather", "ring", "tree", "star"


def ways(value_bytes: float, index_bytes: float | None = None) -> dict[str, tuple[Sends, ...]]:
    """The collectives of every way to agree on k chosen values of `value_bytes` together.

    `index_bytes` is what their places take: as much as the values in the paper, less if they are coded.
    Everybody's places and values by all-gather, in its tree form; or the leader's places by a tree
    broadcast and the values by an all-reduce.
    """
    places = value_bytes if index_bytes is None else index_bytes
    spread = Transfer("broadcast", places, "tree")
    return {
        ALL_GATHER: (Transfer("all_gather", value_bytes + places, "tree"),),
        RING: (spread, Transfer("all_reduce", value_bytes, "ring")),
        TREE: (spread, Transfer("all_reduce", value_bytes, "tree")),
        STAR: (spread, Transfer("all_reduce", value_bytes, "star")),
    }


def ring_over_tree(world: int, kept_bytes: float) -> float:
    """Equation 5a: the ring is faster below this α/β (bytes); infinite where it never loses.

    >>> ring_over_tree(2, 1e6)
    inf
    """
    hops = world - 1
    if hops == levels(world):
        return math.inf
    return (levels(world) - hops / world) / (hops - levels(world)) * kept_bytes


def ring_over_all_gather(world: int, kept_bytes: float) -> float:
    """Equation 5b: AR-Topk by a ring is faster than the all-gather below this α/β (bytes)."""
    return (1 - 1 / world - levels(world) / (2 * (world - 1))) * kept_bytes


def tree_over_all_gather(world: int, kept_bytes: float) -> float:
    """Equation 5c: AR-Topk by a tree is faster than the all-gather below this α/β (bytes)."""
    return ((world - 1) / levels(world) - 1.5) * kept_bytes


def by_thresholds(world: int, kept_bytes: float, latency_bytes: float) -> str:
    """The paper's rule: the better of ring and tree by 5a, if 5b or 5c puts it before the all-gather.

    `latency_bytes` is α/β, the bytes that could have travelled during one latency.

    >>> [by_thresholds(8, kept, 1.25e6) for kept in (5e4, 2e6, 5e7)]
    ['all_gather', 'tree', 'ring']
    """
    if latency_bytes < ring_over_tree(world, kept_bytes):
        return RING if latency_bytes < ring_over_all_gather(world, kept_bytes) else ALL_GATHER
    return TREE if latency_bytes < tree_over_all_gather(world, kept_bytes) else ALL_GATHER

"""Clusters: the time of a collective between ranks that share nodes, and the delay by the slowest rank.

A flat collective does not know about nodes. Ranks are numbered node by node, and the ranks of a node share
its link. In a ring, one rank of each node sends over that link at a time; in an all-to-all pattern, all of
them do. The bytes over a node's link decide the time. The latency is that of the link between nodes.

A two-level collective reduces inside each node, exchanges one shard per rank between the nodes, and gathers
inside the nodes (`gradwire.sources.nodes`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from gradwire.planning.collectives import ALGORITHMS, GLOO, Sends, algorithm_of, latency_of, levels, time_of
from gradwire.planning.costs import Link, Network

MOST_RANKS = 1 << 20
"""Far more than any cluster has. A forecast may take memory for each rank."""


@dataclass(frozen=True)
class Cluster:
    """A cluster of `workers` ranks, `per_node` on each node.

    `link` connects a node to the others; it is a rank's own link if there is one rank per node. `inside`
    connects a rank to the others of its node. Measurements of flat collectives (`measured`) take precedence
    over both. Raises `ValueError` for more than `MOST_RANKS`, if nodes are not full, or if ranks share a node
    and `inside` is missing.
    """

    workers: int
    link: Link
    per_node: int = 1
    inside: Link | None = None
    measured: Network | None = None

    def __post_init__(self) -> None:
        if self.workers < 1 or self.per_node < 1:
            raise ValueError(f"workers={self.workers}, per_node={self.per_node}: there must be at least one")
        if self.workers > MOST_RANKS:
            raise ValueError(f"workers={self.workers} are more than 2^20, of which plans are made")
        if self.workers % self.per_node != 0:
            raise ValueError(f"workers={self.workers} do not fill nodes of per_node={self.per_node}")
        if self.per_node > 1 and self.inside is None:
            raise ValueError(f"per_node={self.per_node} ranks share a node: say what the link inside is like")

    @property
    def nodes(self) -> int:
        return self.workers // self.per_node

    @property
    def shares_links(self) -> bool:
        """True if there are several nodes with several ranks each. Only then can a two-level collective pay
        off.
        """
        return 1 < self.per_node < self.workers

    @cached_property
    def network(self) -> Network:
        """The links as flat collectives find them, by verb and algorithm.

        >>> node, inside = Link(0.0, 1.0), Link(0.0, 0.0)
        >>> network = Cluster(32, node, per_node=8, inside=inside).network
        >>> network.of("all_reduce/ring").beta_s, round(network.of("all_to_all/pairs").beta_s, 2)
        (1.0, 6.19)
        """
        if self.measured is not None:
            return self.measured
        inside = self.inside
        if inside is None or self.per_node == 1:
            return self._direct(self.link)
        if self.nodes == 1:
            return Network(inside)
        links = {}
        for (verb, name), algorithm in ALGORITHMS.items():
            share = self._crossing(verb, name) / algorithm.volume(self.workers)
            links[f"{verb}/{name}"] = Link(self.link.alpha_s, max(share * self.link.beta_s, inside.beta_s))
        if self.link.is_long:  # a gather is a ring, in which each payload crosses the link of a node once
            links["all_to_all/pairs"] = replace(links["all_to_all/pairs"], at_once=True)
        return Network(self.link, links)

    @staticmethod
    def _direct(link: Link) -> Network:
        """Ranks with a `link` each. Where it is long, messages of gather and all-to-all leave at once."""
        if not link.is_long:
            return Network(link)
        at_once = replace(link, at_once=True)
        return Network(link, {"all_gather/ring": at_once, "all_to_all/pairs": at_once})

    def seconds(self, sent: Sends) -> float:
        """The time of one collective of all ranks."""
        return time_of(sent, self.workers, self.network)

    def latency_s(self, sent: Sends) -> float:
        """The part of `seconds` in which the link is free for others."""
        return latency_of(sent, self.workers, self.network)

    def node_bytes(self, sent: Sends) -> float:
        """Bytes that one collective of all ranks sends over the busiest node's link."""
        if self.nodes == 1:
            return 0.0
        named = getattr(sent, "algorithm", None)
        name = GLOO[sent.verb] if named in (None, "library") else named
        return self._crossing(sent.verb, name) * sent.payload_bytes

    def between_bytes(self, sent: Sends) -> float:
        """Bytes that the ranks of a node send over its link in a collective of `between_s`."""
        volume = algorithm_of(sent.verb, getattr(sent, "algorithm", None)).volume(self.nodes)
        return self.per_node * volume * sent.payload_bytes

    def _crossing(self, verb: str, name: str) -> float:
        """The bytes over the busiest node's link, in its busier direction, for one byte per rank."""
        shared = self.per_node
        match verb, name:
            case "all_to_all", "pairs":
                return shared * (self.workers - shared) / self.workers
            case "broadcast", "tree":  # at worst all ranks of a node send at once
                return shared * levels(self.nodes)
            case "all_reduce", "tree":
                return 2 * shared * levels(self.nodes)
            case "all_reduce", "star":
                return 2 * (self.workers - shared)
            case "all_reduce", "direct":
                return shared * (self.workers - shared)
        return algorithm_of(verb, name).volume(self.workers)  # from neighbour to neighbour

    def inside_s(self, share_bytes: float) -> float:
        """Seconds to add up, or gather, inside a node; each rank ends up with, or brings, `share_bytes`."""
        if self.inside is None:
            return 0.0
        return algorithm_of("all_gather", "ring").seconds(share_bytes, self.per_node, self.inside)

    def between_s(self, sent: Sends) -> float:
        """Seconds of a collective of one rank per node, which all ranks of a node run at once, in groups.

        >>> from gradwire.planning.collectives import Transfer
        >>> nodes = Cluster(4, Link(0.0, 1.0), per_node=2, inside=Link(0.0, 0.0))
        >>> half = Transfer("all_reduce", 0.5)
        >>> nodes.between_s(half) / nodes.seconds(Transfer("all_reduce", 1.0))
        0.6666666666666666
        """
        return time_of(sent, self.nodes, self._shared)

    def between_latency_s(self, sent: Sends) -> float:
        """The part of `between_s` in which the node's link is free for others."""
        return latency_of(sent, self.nodes, self._shared)

    @property
    def _shared(self) -> Network:
        return self._direct(Link(self.link.alpha_s, self.per_node * self.link.beta_s))


def straggler_factors(spread: float, workers: int, steps: int, seed: int = 0) -> tuple[float, ...]:
    """The computing time of the slowest of `workers` in each of `steps`, relative to a rank's mean time.

    Each rank's time in each step is drawn by itself, log-normally with mean 1 and `spread` as the standard
    deviation of its logarithm. Ranks keep their draws when others are added, so more workers are never
    faster. Raises `ValueError` for a spread below 0, and where there is nothing to draw.

    >>> straggler_factors(0.0, 4096, 2)
    (1.0, 1.0)
    >>> few, many = (straggler_factors(0.1, workers, 100) for workers in (8, 512))
    >>> round(sum(few) / 100, 2), round(sum(many) / 100, 2)
    (1.15, 1.35)
    """
    if not 0.0 <= spread < float("inf"):
        raise ValueError(f"spread={spread} must be at least 0")
    if workers < 1 or steps < 1:
        raise ValueError(f"workers={workers}, steps={steps}: there must be at least one")
    drawn = np.random.default_rng(seed).standard_normal((workers, steps))
    return tuple(np.exp(spread * drawn.max(axis=0) - spread**2 / 2).tolist())

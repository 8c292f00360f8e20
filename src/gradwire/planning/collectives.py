"""Time of collectives by algorithm: consecutive messages, and bytes on the busiest link.

Every algorithm costs (messages)·α + (volume)·M·β seconds, if each rank contributes a payload of M bytes. Both
factors depend on the world size only, so that α and β can be computed from the times of two sizes. The
formulas are those of "Flexible communication …" (Tyagi, Swany 2023, table I). Algorithms that the table lacks
are counted by their definition.

Differences from the paper: a tree over N ranks has ⌈log2 N⌉ levels. Added are shift, all-to-all, the
scatter–all-gather broadcast, and the ring all-gather, which gloo uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple, Protocol

from gradwire.planning.costs import Link, Network


class Sends(Protocol):
    """Interface of a collective to the cost model. `comm.Round` implements it."""

    @property
    def verb(self) -> str:
        """One of the five verbs."""

    @property
    def payload_bytes(self) -> float:
        """Bytes that each rank hands in."""


class Transfer(NamedTuple):
    """A collective as numbers. Without an `algorithm`, the default one of its verb runs.

    During the last `latency_s` of its time, other collectives may use the link.
    """

    verb: str
    payload_bytes: float
    algorithm: str | None = None
    latency_s: float = 0.0


HOP_S = 1e-3
"""Seconds that a hop may take in software. Latencies of short links of busy machines are not above it."""


def levels(world: int) -> int:
    """⌈log2 N⌉: the rounds after which a binomial tree has reached all ranks.

    >>> [levels(world) for world in (1, 2, 3, 4, 8)]
    [0, 1, 2, 2, 3]
    """
    return (world - 1).bit_length()


@dataclass(frozen=True)
class Algorithm:
    """Costs of one algorithm for a collective among N ranks.

    Each field is a function of N. `messages` is the number of consecutive messages, and `volume` the payloads
    that pass a link one after another. `side_by_side` messages leave a rank at the same time.
    """

    messages: Callable[[int], float]
    volume: Callable[[int], float]
    side_by_side: Callable[[int], float] = lambda _world: 1

    def seconds(self, payload_bytes: float, world: int, link: Link) -> float:
        """Seconds of the collective for M = `payload_bytes` bytes of each of `world` ranks: messages·α +
        volume·M·β. 0 for a rank that is alone.
        """
        if world == 1:
            return 0.0
        return self.messages(world) * link.alpha_s + self.volume(world) * payload_bytes * link.beta_s


def _others(world: int) -> float:
    return world - 1


def _others_share(world: int) -> float:
    return (world - 1) / world


def _twice(factor: Callable[[int], float]) -> Callable[[int], float]:
    return lambda world: 2 * factor(world)


def _once(_world: int) -> float:
    return 1


ALGORITHMS: Mapping[tuple[str, str], Algorithm] = {
    # Reduce-scatter and all-gather, N−1 hops each, of M/N bytes.
    ("all_reduce", "ring"): Algorithm(_twice(_others), _twice(_others_share)),
    # Up to a root and down again, whole payloads on every level.
    ("all_reduce", "tree"): Algorithm(_twice(levels), _twice(levels)),
    # A parameter server: its one link carries all ranks' payloads in, and the sum to all ranks.
    ("all_reduce", "star"): Algorithm(_twice(_once), _twice(_others)),
    # Every rank sends all of it to every other, at once.
    ("all_reduce", "direct"): Algorithm(_once, _others, side_by_side=_others),
    # Doubling: twice as much in every round.
    ("all_gather", "tree"): Algorithm(levels, _others),
    ("all_gather", "ring"): Algorithm(_others, _others),
    ("broadcast", "tree"): Algorithm(levels, levels),
    # The root sends 1/N to each, one latency for all, then a ring in which they complete their parts.
    ("broadcast", "scatter"): Algorithm(lambda world: world, _twice(_others_share)),
    # An all-reduce to which all but one bring zeros: no root, and no order to agree on.
    ("broadcast", "zeros"): Algorithm(_twice(_others), _twice(_others_share)),
    # Every rank exchanges a row with every other, pair by pair.
    ("all_to_all", "pairs"): Algorithm(_others, _others_share),
    ("shift", "direct"): Algorithm(_once, _once),
}
"""(verb, algorithm) to its cost."""

_AT_ONCE = tuple(
    ALGORITHMS[key]
    for key in (
        ("all_reduce", "direct"),
        ("all_gather", "ring"),
        ("all_to_all", "pairs"),
        ("shift", "direct"),
    )
)
"""Ways whose messages leave a rank at once on a long link. There a gather is no ring, unless ranks share
nodes."""

GLOO: Mapping[str, str] = {
    "all_reduce": "ring",
    "all_gather": "ring",
    "broadcast": "tree",
    "all_to_all": "pairs",
    "shift": "direct",
}
"""The algorithm that gloo runs for each verb, and therefore the default."""


def algorithm_of(verb: str, algorithm: str | None = None) -> Algorithm:
    """The named way to run `verb`, or gloo's. `ValueError` for unknown names."""
    key = (verb, algorithm or GLOO.get(verb, ""))
    if key not in ALGORITHMS:
        known = ", ".join(f"{verb} by {name}" for verb, name in ALGORITHMS)
        raise ValueError(f"no cost is known for {verb!r} by {algorithm or 'default'!r}; known are {known}")
    return ALGORITHMS[key]


def time_of(round_: Sends, world: int, network: Network, algorithm: str | None = None) -> float:
    """Seconds of the collective `round_` among `world` ranks, by the calibrated links of `network`.

    The algorithm that a `Transfer` names overrides `algorithm`. A link that was calibrated for
    "verb/algorithm" overrides that of the verb.

    >>> network = Network(Link(alpha_s=1e-3, beta_s=1e-8))
    >>> round(time_of(Transfer("all_reduce", 1e6), 4, network), 6)
    0.021
    >>> round(time_of(Transfer("all_reduce", 1e6, "tree"), 4, network), 6)
    0.044
    """
    found, link = _run_by(round_, network, algorithm)
    return found.seconds(round_.payload_bytes, world, link)


def latency_of(round_: Sends, world: int, network: Network) -> float:
    """Seconds of the collective `round_` among `world` ranks in which its bytes are in flight and the link is
    free for others.

    Each latency above `HOP_S`, the software time of a hop, counts. Only messages that leave a rank at the
    same time let others pass. Hops of rings and trees wait for each other, and the next ring waits for the
    last hop. Between two ranks, a ring is a swap.

    >>> network = Network(Link(alpha_s=11e-3, beta_s=1e-8))
    >>> [round(latency_of(Transfer(verb, 1e6), 4, network), 6) for verb in ("all_to_all", "all_reduce")]
    [0.03, 0.0]
    """
    found, link = _run_by(round_, network)
    if world == 1 or not (
        link.at_once or found in _AT_ONCE or (world == 2 and found is ALGORITHMS["all_reduce", "ring"])
    ):
        return 0.0
    return found.messages(world) * max(link.alpha_s - HOP_S, 0.0)


def _run_by(round_: Sends, network: Network, algorithm: str | None = None) -> tuple[Algorithm, Link]:
    """The algorithm by which a collective runs, and the link that prices it.

    The algorithm is the one that `round_` names, else `algorithm`, else gloo's for this verb. The link is the
    one calibrated for "verb/algorithm", else for the verb. If the link sends all messages at once, the
    algorithm counts one latency.
    """
    named = _named_in(round_, algorithm)
    found = algorithm_of(round_.verb, named)
    name = f"{round_.verb}/{named or GLOO[round_.verb]}"
    link = network.calibrated.get(name) or network.of(round_.verb)
    return (replace(found, messages=_once) if link.at_once else found), link


def _named_in(round_: Sends, otherwise: str | None = None) -> str | None:
    named: str | None = getattr(round_, "algorithm", None)
    return otherwise if named in (None, "library") else named


def messages_of(rounds: Iterable[Sends], world: int) -> float:
    """Number of messages that a rank sends for several collectives; each takes processor time.

    >>> messages_of([Transfer("all_reduce", 1.0), Transfer("all_reduce", 1.0, "direct")], world=4)
    9
    """
    found = [algorithm_of(each.verb, _named_in(each)) for each in rounds] if world > 1 else []
    return sum(each.messages(world) * each.side_by_side(world) for each in found)


def total_time(rounds: Iterable[Sends], world: int, network: Network) -> float:
    """Seconds of several collectives, one after another, among `world` ranks. Each takes the `time_of` its
    verb.
    """
    return sum(time_of(round_, world, network) for round_ in rounds)


def fastest(
    ways: Mapping[str, Sequence[Sends]],
    world: int,
    network: Network,
    lead: float = 0.0,
    now: str = "",
    more_s: Mapping[str, float] | None = None,
) -> tuple[str, float]:
    """The cheapest of several sequences of collectives by calibrated cost, with its seconds.

    Args:
        ways: the collectives of each candidate, by the candidate's name.
        world: the number of ranks.
        network: the calibrated links.
        lead: the share by which another candidate must be faster than `now`, so that two with equal costs do
            not alternate.
        now: the candidate in use; empty if there is none.
        more_s: known extra seconds of a candidate.

    >>> ways = {"whole": (Transfer("all_reduce", 8e6),), "coded": (Transfer("all_gather", 1e6),)}
    >>> fastest(ways, 4, Network(Link(alpha_s=0.0, beta_s=2.0**-20)))
    ('coded', 2.86102294921875)
    """
    more_s = more_s or {}
    seconds = {
        name: total_time(rounds, world, network) + more_s.get(name, 0.0) for name, rounds in ways.items()
    }
    best = min(seconds, key=lambda name: seconds[name])
    if now in seconds and seconds[best] > (1.0 - lead) * seconds[now]:
        best = now
    return best, seconds[best]


@lru_cache(maxsize=64)
def _named(name: str) -> Algorithm:
    verb, _, algorithm = name.partition("/")
    return algorithm_of(verb, algorithm or None)


@lru_cache(maxsize=256)
def hops(verb: str, world: int) -> float:
    """Number of consecutive latencies in `verb`, or in "verb/algorithm" for an algorithm of gradwire's own.

    Between two ranks, an all-reduce is a swap, which halves the number of hops. A calibrated α includes that,
    and the cost of software.

    >>> hops("all_reduce", 4), hops("all_gather", 4), hops("broadcast", 5), hops("shift", 4)
    (6, 3, 3, 1)
    >>> hops("all_reduce/tree", 4), hops("all_reduce/star", 4)
    (4, 2)
    """
    return _named(verb).messages(world) if world > 1 else 0


@lru_cache(maxsize=256)
def volume(verb: str, world: int) -> float:
    """Payloads that pass the busiest link one after the other, of a `verb` as for `hops`.

    >>> volume("all_reduce", 4), volume("all_gather", 4)
    (1.5, 3)
    """
    return _named(verb).volume(world) if world > 1 else 0.0


def serial_bytes(verb: str, payload_bytes: float, world: int) -> float:
    """Bytes that pass the busiest link one after the other in a `verb` among `world` ranks, of which each
    hands in `payload_bytes`.

    >>> serial_bytes("all_reduce", 1000, 4), serial_bytes("all_gather", 1000, 4)
    (1500.0, 3000)
    """
    return volume(verb, world) * payload_bytes


def payload_for(verb: str, wire_bytes: float, world: int) -> int:
    """The payload, in bytes, for which `verb` among `world` ranks has about `wire_bytes` serial bytes. It is
    at least 4·world bytes and a multiple of that, so that ranks and rows have whole float32.
    """
    each = wire_bytes / max(serial_bytes(verb, 1.0, world), 1e-9)
    step = 4 * world
    return max(round(each / step), 1) * step

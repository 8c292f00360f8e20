"""How often a collective waits for a hop, and how many bytes pass one after the other, as gloo runs it.

A verb's time is hops · α + bytes · β, with the factors of `gradwire.planning.collectives`: what is fitted
here is what plans are made of there. A name is a verb's, or "verb/algorithm" for one of our own. Between
two ranks an all-reduce is a swap, which saves half of the hops; a calibrated α contains that, as it
contains what the software costs.
"""

from __future__ import annotations

from gradwire.planning.collectives import Algorithm, algorithm_of


def _algorithm(name: str) -> Algorithm:
    verb, _, algorithm = name.partition("/")
    return algorithm_of(verb, algorithm or None)


def hops(verb: str, world: int) -> float:
    """Latencies that follow upon each other.

    >>> hops("all_reduce", 4), hops("all_gather", 4), hops("broadcast", 5), hops("shift", 4)
    (6, 3, 3, 1)
    >>> hops("all_reduce/tree", 4), hops("all_reduce/star", 4)
    (4, 2)
    """
    return _algorithm(verb).messages(world) if world > 1 else 0


def serial_bytes(verb: str, payload_bytes: float, world: int) -> float:
    """Bytes that pass the busiest link one after the other when each rank hands in `payload_bytes`.

    >>> serial_bytes("all_reduce", 1000, 4), serial_bytes("all_gather", 1000, 4)
    (1500.0, 3000)
    """
    return _algorithm(verb).volume(world) * payload_bytes if world > 1 else 0.0


def payload_for(verb: str, wire_bytes: float, world: int) -> int:
    """The payload, in whole float32 of each rank and row, with about so many serial bytes."""
    each = wire_bytes / max(serial_bytes(verb, 1.0, world), 1e-9)
    step = 4 * world
    return max(round(each / step), 1) * step

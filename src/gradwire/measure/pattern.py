"""How often a collective waits for a hop, and how many bytes pass one after the other, as gloo runs it.

A verb's time is hops · α + bytes · β. What runs: all-reduce and all-gather in a ring, all-to-all
pair by pair, and a shift is one message. Where the hops are fewer in truth (between two ranks an all-reduce
is a swap) a calibrated α contains that, as it contains what the software costs.
"""

from __future__ import annotations

from gradwire.comm.base import Verb


def hops(verb: Verb, world: int) -> int:
    """Latencies that follow upon each other.

    >>> hops("all_reduce", 4), hops("all_gather", 4), hops("broadcast", 5), hops("shift", 4)
    (6, 3, 3, 1)
    """
    ring = world - 1
    return {
        "all_reduce": 2 * ring,
        "all_gather": ring,
        "broadcast": ring.bit_length(),
        "all_to_all": ring,
        "shift": min(ring, 1),
    }[verb]


def serial_bytes(verb: Verb, payload_bytes: float, world: int) -> float:
    """Bytes that pass the busiest link one after the other when each rank hands in `payload_bytes`.

    >>> serial_bytes("all_reduce", 1000, 4), serial_bytes("all_gather", 1000, 4)
    (1500.0, 3000.0)
    """
    ring = world - 1
    share = {
        "all_reduce": 2 * ring / world,
        "all_gather": float(ring),
        "broadcast": float(ring.bit_length()),
        "all_to_all": ring / world,
        "shift": float(min(ring, 1)),
    }[verb]
    return share * payload_bytes


def payload_for(verb: Verb, wire_bytes: float, world: int) -> int:
    """The payload, in whole float32 of each rank and row, with about so many serial bytes."""
    each = wire_bytes / max(serial_bytes(verb, 1.0, world), 1e-9)
    step = 4 * world
    return max(round(each / step), 1) * step

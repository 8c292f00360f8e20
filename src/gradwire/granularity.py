"""Granularity of work by the place of codecs: one value for the CPU, and one for a device.

The CPU's were measured. A device's were reasoned from 10 µs for a launch and 200 to 400 µs for a unit, on the
thread of the backward pass and whatever the size. Beside an H100 a compensation, one launch and one operator,
took 49 to 98 µs and a unit of `int8` 1.5 to 2.6 ms. That speaks for few and large pieces even more; no other
sizes were tried.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Granularity:
    """Sizes and counts that trade the cost of a piece for what overlaps with it. The same on all ranks."""

    segment: int
    """Elements of a segment of `scatter_reduce`: one is encoded, and summed, while another is on the wire."""
    buckets: int
    """Approximate number of buckets, if encoding shall begin early."""
    under_way: int
    """Units that are sent before the first of them is decoded, where no end of a collective is announced."""
    curve: tuple[int, ...]
    """Elements of the units on which codecs are timed: powers of two, ascending."""


ON_HOST = Granularity(
    # Half of it would double the messages, each of which costs a rank a third of a millisecond of CPU time.
    segment=1 << 20,
    # Encoding takes long, so it should begin while most of the backward pass is still to come.
    buckets=32,
    # A unit is decoded when its bytes are there.
    under_way=1,
    # Closer together where memory begins to slow codecs down, because most of a gradient is in large units:
    # the line has to serve those.
    curve=tuple(1 << power for power in (6, 8, 10, 12, 14, 16, 17, 18, 19, 20)),
)

ON_DEVICE = Granularity(
    # Longer than a unit, which so takes two collectives: 190 a step for GPT-2 of 1.6 billion parameters.
    # Segments of 2^20 make some 3,000, or 100 to 200 ms of the host's time, and send 16 kB to each of 64
    # ranks.
    segment=1 << 25,
    # Each unit takes the host 1.5 to 2.6 ms, and each bucket a part of it; encoding a bucket takes the device
    # less than launching it, so that nothing is gained by beginning earlier.
    buckets=8,
    # In one stream: while the second is encoded, the first is on the wire, which would idle otherwise. 1 % of
    # a unit takes a link of 25 to 100 Gbit/s 0.3 to 0.8 ms, less than its launches.
    under_way=2,
    # Up to 2^20 elements only launches are measured: `int8` moves 24 MB there, which take 8 µs of 150.
    curve=tuple(1 << power for power in (10, 14, 18, 20, 22, 24, 26)),
)


def granularity(*, is_host: bool) -> Granularity:
    """The granularity of codecs on the host, or on a device."""
    return ON_HOST if is_host else ON_DEVICE

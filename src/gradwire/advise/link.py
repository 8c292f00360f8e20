"""Facts that the system tells about the link between ranks. Nothing is sent for them."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CARDS = Path("/sys/class/net")

_ACKED, _RECEIVED, _LEAST_RTT = 120, 128, 148
"""Offsets of `tcpi_bytes_acked`, `tcpi_bytes_received` and `tcpi_min_rtt` in Linux' `struct tcp_info`."""

_ESTABLISHED = 1


def card_bit_per_s(cards: Path = CARDS) -> float | None:
    """The rate of the slowest network card that has a link, as Linux tells it.

    Args:
        cards: the folder in which the kernel describes network cards.

    Returns:
        Bits per second; `None` where no card tells a rate, as virtual ones do not.

    Example:
        >>> card_bit_per_s(Path("/nowhere"))
    """
    rates = []
    for card in sorted(cards.glob("*")):
        with suppress(OSError, ValueError):  # a card without a link raises OSError
            if (card / "operstate").read_text().strip() == "up":
                rates.append(int((card / "speed").read_text()))
    known = [rate for rate in rates if rate > 0]
    return min(known) * 1e6 if known else None


def latency_s() -> float | None:
    """The one-way delay that the kernel has seen on the connections that carry this process's gradients.

    It is half of the least round trip, in the median over the TCP connections that have carried a tenth or
    more of the bytes of the busiest one. Nothing is sent for it.

    Returns:
        Seconds; `None` without a connection, or where the system does not tell.
    """
    found = list(_connections())
    most_bytes = max((carried for carried, _ in found), default=0)
    trips_s = sorted(trip_s for carried, trip_s in found if 10 * carried >= most_bytes)
    return trips_s[len(trips_s) // 2] / 2 if trips_s else None


def _connections() -> Iterator[tuple[int, float]]:
    """Yield (bytes carried, least round trip) of each TCP connection of this process."""
    if not hasattr(socket, "TCP_INFO"):
        return
    for entry in Path("/proc/self/fd").glob("*"):
        with suppress(OSError, struct.error):
            if not os.readlink(entry).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as copy:
                if copy.type != socket.SOCK_STREAM or copy.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                told = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            carried = struct.unpack_from("=Q", told, _ACKED)[0] + struct.unpack_from("=Q", told, _RECEIVED)[0]
            least_us = struct.unpack_from("=I", told, _LEAST_RTT)[0]
            if told[0] == _ESTABLISHED and 0 < least_us < 2**31:
                yield carried, least_us * 1e-6

"""Emulated link: rate, delay, and bytes carried."""

import math
import mmap
import os
import struct
import tempfile
from dataclasses import dataclass
from typing import Self

from gradwire.quantities import rate_bit_per_s, time_s

UNLIMITED = frozenset({"unlimited", "none"})
WIRE_VARIABLE = "GRADWIRE_WIRE"
"""Path of the file that holds the link of backend mode; absent in the other modes."""


@dataclass(frozen=True)
class EmulatedLink:
    """One rank's connection to the switch.

    `rate_bit_per_s` applies in each direction (`None`: unshaped). `delay_s` is added once to every packet
    between two ranks, so a round trip takes twice as long.

    >>> EmulatedLink(200e6, 0.005).delay_s
    0.005
    """

    rate_bit_per_s: float | None = None
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        rate = self.rate_bit_per_s
        if rate is not None and not (math.isfinite(rate) and rate >= 8e3):
            raise ValueError(f"rate_bit_per_s={rate}: must be None (unshaped) or at least 8000 bit/s")
        if not (math.isfinite(self.delay_s) and 0 <= self.delay_s <= 10):
            raise ValueError(f"delay_s={self.delay_s}: must lie between 0 and 10 seconds")

    def __str__(self) -> str:
        rate = "unlimited" if self.rate_bit_per_s is None else f"{self.rate_bit_per_s / 1e6:g} Mbit/s"
        return f"{rate}, {self.delay_s * 1e3:g} ms" if self.delay_s else rate


@dataclass(frozen=True)
class Counters:
    """Traffic of one rank's interface since it exists; bytes include headers."""

    rx_bytes: int
    tx_bytes: int
    tx_packets: int = 0

    def __sub__(self, earlier: "Counters") -> "Counters":
        return Counters(
            self.rx_bytes - earlier.rx_bytes,
            self.tx_bytes - earlier.tx_bytes,
            self.tx_packets - earlier.tx_packets,
        )


def parse_rate(text: str | None) -> float | None:
    """Bits per second from `200mbit`, `1.5 Gbit/s`, `64kbps`; None from None, `none` and `unlimited`.

    >>> parse_rate("200mbit")
    200000000.0
    """
    if text is None or text.strip().lower() in UNLIMITED:
        return None
    try:
        rate = rate_bit_per_s(text)
    except ValueError as error:
        raise ValueError(f"rate={error}, or unlimited") from None
    return EmulatedLink(rate).rate_bit_per_s


def parse_delay(text: str | None) -> float:
    """Seconds from `5ms`, `250us`, `0.1s`; 0 from None, `none` and `0`.

    >>> parse_delay("5ms")
    0.005
    """
    if text is None or text.strip().lower() in {"none", "0"}:
        return 0.0
    try:
        delay_s = time_s(text)
    except ValueError as error:
        raise ValueError(f"delay={error}") from None
    return EmulatedLink(None, delay_s).delay_s


_FORMAT = struct.Struct("dd")  # bits per second (infinite: unshaped), seconds


class WireFile:
    """A small mapped file.

    Two doubles are written one after the other; a reader may see the new rate with the old delay once, which
    is as harmless as having started a moment earlier.
    """

    def __init__(self, path: str, *, owner: int | None = None) -> None:
        self.path, self._owner = path, owner
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _FORMAT.size)

    @classmethod
    def create(cls, link: EmulatedLink) -> Self:
        """A new file that workers open by its `path` while the owner lives."""
        if hasattr(os, "memfd_create"):  # has no name on disk, so that a killed owner leaves nothing
            descriptor = os.memfd_create("gradwire-wire")
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
        else:
            descriptor, path = tempfile.mkstemp(prefix="gradwire-wire-")
        os.write(descriptor, bytes(_FORMAT.size))
        wire = cls(path, owner=descriptor)
        wire.write(link)
        return wire

    def write(self, link: EmulatedLink) -> None:
        """Make `link` what every worker sees from its next transfer on."""
        rate = math.inf if link.rate_bit_per_s is None else link.rate_bit_per_s
        _FORMAT.pack_into(self._memory, 0, rate, link.delay_s)

    def read(self) -> tuple[float, float]:
        """Rate in bit/s (may be infinite) and delay in seconds."""
        rate, delay_s = _FORMAT.unpack_from(self._memory)
        return rate, delay_s

    def close(self) -> None:
        """Unmap, and give the file up if it is ours."""
        self._memory.close()
        if self._owner is not None:
            os.close(self._owner)
            if not self.path.startswith("/proc/"):
                os.unlink(self.path)
            self._owner = None

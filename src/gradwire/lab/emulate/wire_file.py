"""The link of backend mode in sixteen shared bytes: workers follow a change at their next transfer."""

import math
import mmap
import os
import struct
import tempfile
from typing import Self

from gradwire.lab.emulate.link import Link

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
    def create(cls, link: Link) -> Self:
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

    def write(self, link: Link) -> None:
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

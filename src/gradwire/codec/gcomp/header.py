"""The first 48 bytes of a frame: what it is, and what it belongs to. `docs/wire-format.md` is the layout."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gradwire.errors import WireError

MAGIC = b"GWgc"
VERSION = 1
_LAYOUT = struct.Struct("<4sBBBBQIIIIQQ")
HEADER_BYTES = _LAYOUT.size
ROW_BYTES = 16
CHECKSUM_BYTES = 8
CHUNK = 1 << 16
"""Elements of a chunk; the directory, and half a word lost in each segment, are 0.2 % of its symbols."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FLUSH, _EXPLICIT, _THRESHOLDS = 1, 2, 4


@dataclass(frozen=True)
class Key:
    """What a frame belongs to: a receiver that expects another refuses it.

    `hop` counts the messages of one exchange. `state` is a fingerprint of what sender and receiver must hold
    alike to understand it, such as the thresholds; 0 where there is nothing. `step` has 64 bits, the rest 32.

    >>> Key(step=3, unit=0, hop=1)
    Key(step=3, unit=0, hop=1, state=0)
    """

    step: int
    unit: int
    hop: int
    state: int = 0

    def __post_init__(self) -> None:
        for name, bits in (("step", 64), ("unit", 32), ("hop", 32), ("state", 32)):
            value = getattr(self, name)
            if not 0 <= value < 1 << bits:
                raise ValueError(f"{name}={value} does not fit into {bits} bits without a sign")


class Header(NamedTuple):
    """All that a frame says of itself."""

    key: Key
    dtype: torch.dtype
    numel: int
    table: int
    length: int
    drop: int = 0
    flush: bool = False
    explicit: bool = False
    thresholds: bool = False

    def pack(self) -> bytes:
        """The bytes."""
        flags = _FLUSH * self.flush | _EXPLICIT * self.explicit | _THRESHOLDS * self.thresholds
        key = self.key
        return _LAYOUT.pack(
            MAGIC, VERSION, DTYPES.index(self.dtype), flags, self.drop,
            key.step, key.unit, key.hop, key.state, self.table, self.numel, self.length,
        )  # fmt: skip

    @staticmethod
    def unpack(data: bytes) -> Header:
        """The header of a frame that begins with `data`; `WireError` if this version reads none there."""
        if len(data) < HEADER_BYTES:
            raise WireError(f"{len(data)} bytes are less than a frame's header has")
        magic, version, dtype, flags, drop, step, unit, hop, state, table, numel, length = (
            _LAYOUT.unpack_from(data)
        )
        if magic != MAGIC:
            raise WireError(f"a frame begins with {MAGIC!r}, not {magic!r}")
        if version != VERSION:
            raise WireError(f"the frame is of version {version}; this gradwire reads version {VERSION}")
        if dtype >= len(DTYPES) or flags >= 2 * _THRESHOLDS:
            raise WireError(f"a frame has no type {dtype} or no flags {flags:#x}")
        key = Key(step, unit, hop, state)
        modes = bool(flags & _FLUSH), bool(flags & _EXPLICIT), bool(flags & _THRESHOLDS)
        return Header(key, DTYPES[dtype], numel, table, length, drop, *modes)


def chunks_of(numel: int) -> int:
    """How many chunks hold `numel` elements.

    >>> chunks_of(0), chunks_of(1), chunks_of(65536), chunks_of(65537)
    (0, 1, 1, 2)
    """
    return -(-numel // CHUNK)


def largest_frame(numel: int, dtype: torch.dtype) -> int:
    """The most bytes that a frame of `numel` elements can have, whatever they are: all of it stored raw.

    >>> largest_frame(1_000_000, torch.float32)
    4000312
    """
    whole, rest = divmod(numel, CHUNK)
    raw = whole * CHUNK * dtype.itemsize + -(-rest * dtype.itemsize // 8) * 8
    return HEADER_BYTES + raw + ROW_BYTES * chunks_of(numel) + CHECKSUM_BYTES

"""A code for exponents that ranks can name, send, and build in advance."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from gradwire.codec.gcomp.lengths import N_THETA, ZERO, code_lengths
from gradwire.errors import WireError
from gradwire.kernels.checksums import checksum
from gradwire.kernels.huffman import ESCAPE, LONGEST, SYMBOLS, Lookups

PACKED_BYTES = SYMBOLS // 2


def fingerprint(data: Tensor) -> int:
    """32 bits that tell one tensor from another, at memory speed: the lower half of its XXH64.

    >>> fingerprint(torch.zeros(3)) == fingerprint(torch.zeros(4))
    False
    """
    return checksum(data) & 0xFFFFFFFF


@dataclass(frozen=True)
class Table:
    """The lengths of a complete code of at most 12 bits, one for each symbol; 0 is a symbol that is escaped.

    Symbols are exponents, but for 254, a number next to zero that is kept exactly, and 255, which escapes
    everything without a code, exponents 254 and 255 among it. Zero and the escape have one.
    `WireError` where lengths are no such code.

    >>> counts = torch.zeros(SYMBOLS, dtype=torch.int64)
    >>> counts[118:122] = torch.tensor([10, 20, 40, 30])
    >>> table = Table.from_histogram(counts)
    >>> table.lengths[118:122].tolist(), Table.from_tensor(table.to_tensor()) == table
    ([4, 3, 1, 2], True)
    """

    packed: bytes
    """Two lengths a byte, the lower half first."""

    def __post_init__(self) -> None:
        if len(self.packed) != PACKED_BYTES:
            raise WireError(f"a table of exponents has {PACKED_BYTES} bytes, not {len(self.packed)}")
        used = self.lengths[self.lengths > 0].astype(np.int64)
        if used.size < 2 or int(used.max()) > LONGEST:
            raise WireError(f"a table of exponents has two codes or more, of at most {LONGEST} bits")
        space = int((1 << (LONGEST - used)).sum())
        if space != 1 << LONGEST:
            what = "oversubscribed" if space > 1 << LONGEST else "incomplete"
            raise WireError(
                f"a table of exponents is {what}: its codes take {space / (1 << LONGEST):.3f} of 1"
            )
        if not (self.lengths[ZERO] and self.lengths[ESCAPE]):
            raise WireError("a table of exponents lacks the code of zero or of the escape")

    @staticmethod
    def from_histogram(histogram: Tensor, longest: int = N_THETA) -> Table:
        """The best table for symbols that occur as often as int64 `histogram` (256,) says."""
        counts = histogram.cpu().numpy()
        if counts.shape != (SYMBOLS,) or counts.min() < 0:
            raise ValueError(f"a histogram has {SYMBOLS} counts, none below 0")
        return _of_lengths(code_lengths(counts.astype(np.int64), longest))

    @staticmethod
    def prior(dtype: torch.dtype = torch.float32) -> Table:
        """A table for gradients of which nothing is known: any scale, 2^-10 the likeliest.

        A normal distribution's exponents fall by half for each step down and by much more for each step up;
        of layers of different scale, and over a training run, the centre is uncertain by some 2^±6.
        """
        places = np.arange(SYMBOLS)
        centre, most = (5, 31) if dtype == torch.float16 else (117, 253)
        counts = np.where((places > 0) & (places <= most), 2e6 * 0.8 ** np.abs(places - centre), 0.0)
        counts[ZERO] = 3e5
        counts[ESCAPE] = 2e3
        return _of_lengths(code_lengths(counts.astype(np.int64)))

    @staticmethod
    def from_tensor(packed: Tensor) -> Table:
        """The table that `to_tensor` gave; `WireError` if there is none."""
        if packed.dtype != torch.uint8:
            raise WireError(f"a table of exponents travels as uint8, not {packed.dtype}")
        return Table(packed.cpu().contiguous().numpy().tobytes())

    def to_tensor(self) -> Tensor:
        """uint8 (128,)."""
        return torch.frombuffer(bytearray(self.packed), dtype=torch.uint8)

    @cached_property
    def id(self) -> int:
        """A fingerprint of the lengths, by which frames name the table: 32 bits."""
        return fingerprint(self.to_tensor())

    @cached_property
    def lengths(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """(256,) bits of each symbol's code."""
        halves = np.frombuffer(self.packed, np.uint8)
        return np.stack([halves & 15, halves >> 4], 1).reshape(-1)

    @cached_property
    def lookups(self) -> Lookups:
        """What coding with it looks up."""
        return Lookups(self.lengths)

    def bits(self, histogram: Tensor) -> int:
        """Bits that symbols of such a histogram take, escapes' bytes included.

        >>> Table.prior().bits(torch.zeros(SYMBOLS, dtype=torch.int64))
        0
        """
        escaped = (self.lengths == 0) | (np.arange(SYMBOLS) == ESCAPE)
        each = np.where(escaped, int(self.lengths[ESCAPE]) + 8, self.lengths.astype(np.int64))
        return int((histogram.cpu().numpy() * each).sum())


def _of_lengths(lengths: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> Table:
    return Table((lengths[::2] | lengths[1::2] << 4).astype(np.uint8).tobytes())

"""A code for exponents that ranks can name, send, and build in advance: its lengths, the table, and a cache.

Lengths are those of a length-limited Huffman code: package-merge over the symbols that are worth a code
(Larmore and Hirschberg 1990, "A fast algorithm for optimal length-limited Huffman codes", section 2, the coin
collector's problem, with the packages' contents as rows of a matrix).

Differences from GComp (Li et al. 2024, section 4): there, a Huffman code without a limit is cut off where
codes get too long. Here the code is the best one under the limit, for the symbols that are frequent and for
an escape that weighs as much as all others together. A symbol with a share p of all costs the limit n in
bits if coded and the escape's length and 8 more if not; but a code of n bits takes 2^-n of the code space,
which makes all other codes longer by 2^-n · log2(e). So it is worth a code above p = 2^-n · log2(e) / 8 or
so (the escape is about as long as the longest code).

Tables are built on a thread of their own, so that no step waits for one. What ranks agree on and checkpoints
hold is the counts. A table follows from them, so that a caller that asks early waits for it, and none can get
another. It lives as long as the tensor of its counts.
"""

from __future__ import annotations

import math
import os
from collections.abc import MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from threading import Lock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gradwire.errors import WireError
from gradwire.kernels.frames import checksum
from gradwire.kernels.huffman import ESCAPE, LONGEST, SYMBOLS, Lookups

N_THETA = 12
"""Bits of the longest code, as measured by `benchmarks/huffman.py --lengths`: from 8 to 12 bits the size
falls by 0.3 to 0.7 %, and decoding takes no longer, often less, because a longer window holds more codes.
The decoder's look-up table then takes 32 KiB; twice that would leave the first-level cache."""

ZERO = 0


def package_merge(weights: NDArray[np.int64], longest: int) -> NDArray[np.uint8]:
    """Lengths (n,) of an optimal prefix code for n ≥ 2 positive `weights`, none above `longest`.

    Raises `ValueError` if n is below 2 or above 2^longest.

    >>> [package_merge(np.array([1, 1, 2, 4, 8]), longest).tolist() for longest in (4, 3)]
    [[4, 4, 3, 2, 1], [3, 3, 3, 3, 1]]
    """
    n = weights.size
    if not 2 <= n <= 1 << longest:
        raise ValueError(f"{n} symbols have no prefix code of at most {longest} bits; 2 … {1 << longest} do")
    order = np.argsort(weights, kind="stable")
    leaves, one_each = weights[order], np.eye(n, dtype=np.int64)
    items, contents = leaves, one_each
    for _ in range(longest - 1):
        even = items.size // 2 * 2
        items = np.concatenate([items[:even:2] + items[1:even:2], leaves])
        contents = np.concatenate([contents[:even:2] + contents[1:even:2], one_each])
        rank = np.argsort(items, kind="stable")
        items, contents = items[rank], contents[rank]
    lengths = np.empty(n, np.uint8)
    lengths[order] = contents[: 2 * n - 2].sum(0)
    return lengths


def code_lengths(counts: NDArray[np.int64], longest: int = N_THETA) -> NDArray[np.uint8]:
    """Lengths (256,) of codes for symbols that occur `counts` times; 0 for symbols that are not worth a code.

    Zero and the escape always have a code.

    >>> counts = np.zeros(256, np.int64)
    >>> counts[[0, 120, 121]] = 10, 60, 30
    >>> code_lengths(counts)[[0, 119, 120, 121, 255]].tolist()
    [3, 0, 1, 2, 3]
    """
    total = int(counts.sum())
    chosen = counts > total * math.log2(math.e) / 8 / (1 << longest)
    chosen[[ZERO, ESCAPE]] = True
    weights = np.maximum(counts, 1)
    weights[ESCAPE] = max(1, int(counts[~chosen].sum()) + int(counts[ESCAPE]))
    lengths = np.zeros(SYMBOLS, np.uint8)
    lengths[chosen] = package_merge(weights[chosen], longest)
    return lengths


PACKED_BYTES = SYMBOLS // 2


def fingerprint(data: Tensor) -> int:
    """32 bits that tell one tensor from another, at memory speed: the lower half of its XXH64.

    >>> fingerprint(torch.zeros(3)) == fingerprint(torch.zeros(4))
    False
    """
    return checksum(data) & 0xFFFFFFFF


@dataclass(frozen=True)
class CodeTable:
    """Huffman table: the length of a code of at most 12 bits for each symbol; 0 for symbols that are escaped.

    Symbols are exponents, with two exceptions: 254 is a number below the normal range that is kept exactly;
    255 escapes every symbol without a code, and exponents 254 and 255. Zero and the escape always have a
    code. Raises `WireError` unless the lengths make up a complete code.

    >>> counts = torch.zeros(SYMBOLS, dtype=torch.int64)
    >>> counts[118:122] = torch.tensor([10, 20, 40, 30])
    >>> table = CodeTable.from_histogram(counts)
    >>> table.lengths[118:122].tolist()
    [4, 3, 1, 2]
    """

    packed: bytes
    """Lengths, two per byte, the first in the lower half."""

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
    def from_histogram(histogram: Tensor, longest: int = N_THETA) -> CodeTable:
        """Build the shortest table for symbols with these counts, int64 (256,).

        Raises `ValueError` for another shape or a negative count.
        """
        counts = histogram.cpu().numpy()
        if counts.shape != (SYMBOLS,) or counts.min() < 0:
            raise ValueError(f"a histogram has {SYMBOLS} counts, none below 0")
        return _of_lengths(code_lengths(counts.astype(np.int64), longest))

    @staticmethod
    def prior(dtype: torch.dtype = torch.float32) -> CodeTable:
        """Build a table for unknown gradients of any scale, with exponents around 2^-10 the likeliest.

        A normal distribution's exponents fall by half for each step down and by much more for each step up;
        of layers of different scale, and over a training run, the centre is uncertain by some 2^±6.
        """
        places = np.arange(SYMBOLS)
        centre, most = (5, 31) if dtype == torch.float16 else (117, 253)
        counts = np.where((places > 0) & (places <= most), 2e6 * 0.8 ** np.abs(places - centre), 0.0)
        counts[ZERO] = 3e5
        counts[ESCAPE] = 2e3
        return _of_lengths(code_lengths(counts.astype(np.int64)))

    def to_tensor(self) -> Tensor:
        """The packed lengths as uint8 (128,)."""
        return torch.frombuffer(bytearray(self.packed), dtype=torch.uint8)

    @cached_property
    def id(self) -> int:
        """Fingerprint (32 bits) of the lengths, by which frames name the table."""
        return fingerprint(self.to_tensor())

    @cached_property
    def lengths(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Length of each symbol's code, (256,)."""
        halves = np.frombuffer(self.packed, np.uint8)
        return np.stack([halves & 15, halves >> 4], 1).reshape(-1)

    @cached_property
    def lookups(self) -> Lookups:
        """Tables for encoding and decoding with this code."""
        return Lookups(self.lengths)

    def bits(self, histogram: Tensor) -> int:
        """Bits that symbols with these counts take, with the bytes of escapes.

        >>> CodeTable.prior().bits(torch.zeros(SYMBOLS, dtype=torch.int64))
        0
        """
        escaped = (self.lengths == 0) | (np.arange(SYMBOLS) == ESCAPE)
        each = np.where(escaped, int(self.lengths[ESCAPE]) + 8, self.lengths.astype(np.int64))
        return int((histogram.cpu().numpy() * each).sum())


def _of_lengths(lengths: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> CodeTable:
    return CodeTable((lengths[::2] | lengths[1::2] << 4).astype(np.uint8).tobytes())


_LOCK = Lock()
_CACHE: MutableMapping[Tensor, Future[CodeTable]] = WeakTensorKeyDictionary()


def begin_table(counts: Tensor) -> Future[CodeTable]:
    """Start to build the table for `counts` (SYMBOLS,) int64, which must not be changed any more."""
    with _LOCK:
        future = _CACHE.get(counts)
        if future is None or (future.done() and future.exception() is not None):
            future = _CACHE[counts] = _builder().submit(_built, counts.numpy().tobytes())
        return future


def table_of(counts: Tensor) -> CodeTable:
    """The shortest table for `counts` (SYMBOLS,) int64, ready for use; waits if it is still being built.

    >>> counts = torch.zeros(256, dtype=torch.int64)
    >>> counts[100:103] = 5
    >>> _ = begin_table(counts)
    >>> table_of(counts) == CodeTable.from_histogram(counts)
    True
    """
    return begin_table(counts).result()


@lru_cache(maxsize=1)
def _builder() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="gradwire-tables")


def _built(counts: bytes) -> CodeTable:
    table = CodeTable.from_histogram(torch.frombuffer(bytearray(counts), dtype=torch.int64))
    _ = table.lookups.encoding, table.lookups.decoding
    return table


def _forget_threads() -> None:
    """Reset lock, cache and thread pool in a forked child, which inherits the futures but not the thread."""
    global _LOCK, _CACHE
    _LOCK, _CACHE = Lock(), WeakTensorKeyDictionary()
    _builder.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)

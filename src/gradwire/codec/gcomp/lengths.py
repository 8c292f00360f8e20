"""Lengths of a length-limited Huffman code: package-merge over the symbols that are worth a code.

Larmore and Hirschberg 1990, "A fast algorithm for optimal length-limited Huffman codes", section 2 (the coin
collector's problem), with the packages' contents as rows of a matrix.

Differences from GComp (Li et al. 2024, section 4): there, a Huffman code without a limit is cut off where
codes get too long. Here the code is the best one under the limit, for the symbols that are frequent and for
an escape that weighs as much as all others together. A symbol with a share p of all costs the limit n in
bits if coded and the escape's length and 8 more if not; but a code of n bits takes 2^-n of the code space,
which makes all other codes longer by 2^-n · log2(e). So it is worth a code above p = 2^-n · log2(e) / 8 or
so (the escape is about as long as the longest code).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from gradwire.kernels.huffman import ESCAPE, SYMBOLS

N_THETA = 12
"""Bits of the longest code, as measured by `benchmarks/huffman.py --lengths`: from 8 to 12 bits the size
falls by 0.3 to 0.7 %, and decoding takes no longer, often less, because a longer window holds more codes. The
decoder's look-up has 32 KiB then, and twice that would leave the first-level cache."""

ZERO = 0


def package_merge(weights: NDArray[np.int64], longest: int) -> NDArray[np.uint8]:
    """Lengths (n,) of an optimal prefix code for n ≥ 2 positive `weights`, none above `longest`.

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
    """Lengths (256,) for symbols that occur `counts` times; 0 where they are not worth a code.

    Zero and the escape always have one.

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

"""Random numbers that are functions of a key: words by counting, and indices without replacement.

A word is a bijection of the index, given the key: the finalizer of MurmurHash3 (Appleby 2011, public domain),
applied to a Weyl sequence with the golden ratio's multiplier. Kernels draw such noise where they need it, and
never store it.

Differences from the original: two halves of a hashed key enter, one before each of its two rounds, so that
streams of different keys are not each other's words in another order. The second half is mixed by one round
only; that keys which differ in a bit have nothing in common is the work of SplitMix64, which hashes them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.dispatch import checked

WORD = 0xFFFFFFFF


def _is_subset(n: int, k: int, seed: int) -> None:
    if not 0 <= k <= n:
        raise ValueError(f"k={k} is outside 0 … n={n}")


def _has_stretches(n: int, size: int, seed: int) -> None:
    if not 0 <= size <= n:
        raise ValueError(f"size={size} is outside 0 … n={n}")


def random_words(key: int, count: int, start: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Uniform words (count,) int64, 0 … 2^32 - 1, of a 64-bit `key` and the indices start, start + 1, …

    Indices count modulo 2^32: elements so far apart share their noise. Not for secrets.

    >>> random_words(5, 2).tolist() == [random_words(5, 1, start=i).item() for i in (0, 1)]
    True
    """
    low, high = halves(key)
    # int64 products wrap, and their lower 32 bits are right all the same.
    h = torch.arange(start, start + count, device=device) & WORD
    h = (h * 0x9E3779B1 + low) & WORD
    h = ((h ^ h >> 16) * 0x85EBCA6B) & WORD
    h = h ^ high
    h = ((h ^ h >> 13) * 0xC2B2AE35) & WORD
    return h ^ h >> 16


@checked(_is_subset)
def sample_indices(n: int, k: int, seed: int) -> Tensor:
    """k of n indices (k,) int64, ascending, uniformly without replacement; equal seeds give equal draws.

    On the CPU: an index depends on those before it (Floyd's algorithm, O(k) draws). The modulo's bias is
    below n / 2^63. `gradwire.kernels.sample_indices` keeps the last 32 draws, because encoding and both
    decodings of a unit ask for the same one: do not write into it.

    >>> sample_indices(10, 10, seed=1).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    chosen: set[int] = set()
    state = seed
    for top in range(n - k, n):
        state, bits = splitmix64(state)
        draw = (bits >> 1) % (top + 1)
        chosen.add(top if draw in chosen else draw)
    return torch.tensor(sorted(chosen), dtype=torch.int64, device="cpu")


@checked(_has_stretches)
def stratified_indices(n: int, size: int, seed: int) -> Tensor:
    """A random index out of each of `size` equal stretches of 0 … n - 1: (size,) int64, ascending.

    On the CPU.

    Every index is as likely as any other (up to the rounding of the stretches), and columns of a matrix
    cannot fall in step with it as they can with a stride.

    >>> stratified_indices(4, 4, seed=1)
    tensor([0, 1, 2, 3])
    """
    indices, state = [], seed
    for j in range(size):
        start, stop = j * n // size, (j + 1) * n // size
        state, bits = splitmix64(state)
        indices.append(start + (bits >> 1) % (stop - start))
    return torch.tensor(indices, dtype=torch.int64, device="cpu")


def halves(key: int) -> tuple[int, int]:
    """The lower and the upper 32 bits of the hash of a key of 64."""
    _, hashed = splitmix64(key)
    return hashed & WORD, hashed >> 32


def splitmix64(state: int) -> tuple[int, int]:
    """One step of Vigna's SplitMix64 generator: (next state, 64 random bits)."""
    mask = (1 << 64) - 1
    state = (state + 0x9E3779B97F4A7C15) & mask
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return state, z ^ (z >> 31)

"""Counter-based random numbers: each word is a function of a key and an index.

For a given key, the word is a bijection of the index: the finalizer of MurmurHash3 (Appleby 2011, public
domain), applied to a Weyl sequence with the golden ratio's multiplier. Kernels compute such noise where they
need it, and never store it.

Differences from the original: two halves of a hashed key enter, one before each of its two rounds, so that
streams of different keys are not each other's words in another order. Only one round mixes the second half.
Similar keys give unrelated streams because SplitMix64 hashes the keys first.
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 0xFFFFFFFF


def random_words(key: int, count: int, start: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Uniform random words (count,) int64, 0 … 2^32 - 1, for a 64-bit `key` and the indices start, start + 1,
    …

    Indices 2^32 apart get equal words. Not for cryptography.

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


def halves(key: int) -> tuple[int, int]:
    """Lower and upper 32 bits of the 64-bit hash of `key`."""
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

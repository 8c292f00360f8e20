"""Random words by counting, in plain torch: the oracle of the noise that kernels draw as they go.

A word is a bijection of the index, given the key: the finalizer of MurmurHash3 (Appleby 2011, public domain),
applied to a Weyl sequence with the golden ratio's multiplier.

Differences from the original: two halves of a hashed key enter, one before each of its two rounds, so that
streams of different keys are not each other's words in another order. The second half is mixed by one round
only; that keys which differ in a bit have nothing in common is the work of SplitMix64, which hashes them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.reference import splitmix64

WORD = 0xFFFFFFFF


def halves(key: int) -> tuple[int, int]:
    """The lower and the upper 32 bits of the hash of a key of 64."""
    _, hashed = splitmix64(key)
    return hashed & WORD, hashed >> 32


def random_words(key: int, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """The words (count,) int64, 0 … 2^32 - 1, of indices start, start + 1, … modulo 2^32."""
    low, high = halves(key)
    # int64 products wrap, and their lower 32 bits are right all the same.
    h = torch.arange(start, start + count, device=device) & WORD
    h = (h * 0x9E3779B1 + low) & WORD
    h = ((h ^ h >> 16) * 0x85EBCA6B) & WORD
    h = h ^ high
    h = ((h ^ h >> 13) * 0xC2B2AE35) & WORD
    return h ^ h >> 16

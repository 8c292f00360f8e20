"""Random words by counting, and indices without replacement: the same numbers as the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.cpu.jit import kernel
from gradwire.kernels.cpu.prepared import prepared
from gradwire.kernels.dispatch import DECLINED, Declined
from gradwire.kernels.reference.draws import halves


def random_words(
    key: int, count: int, start: int = 0, device: torch.device | str = "cpu"
) -> Tensor | Declined:
    """A hash of key and index, so that the noise of every element stands alone."""
    if torch.device(device).type != "cpu":
        return DECLINED
    words = np.empty(count, np.uint32)
    low, high = halves(key)
    _random_words(np.uint32(low), np.uint32(high), start, words)
    return torch.from_numpy(words.astype(np.int64))


def sample_indices(n: int, k: int, seed: int) -> Tensor:
    """Floyd's sampling with a bitmap."""
    return torch.from_numpy(_sample_indices(n, k, seed))


def stratified_indices(n: int, size: int, seed: int) -> Tensor:
    """One step of SplitMix64 for each stretch."""
    return torch.from_numpy(_stratified_indices(n, size, seed))


@kernel
def random_word(index: Any, low: Any, high: Any) -> Any:
    """uint32 of an index and the two halves of a key, uint32 each; the same numbers as the reference."""
    # Every step is cut to 32 bits at once: what Numba widens to 64 would halve the lanes of a vector.
    h = np.uint32(np.uint32(index) * np.uint32(0x9E3779B1) + low)
    h = np.uint32((h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    h = np.uint32(h ^ high)
    h = np.uint32((h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.uint32(h ^ (h >> np.uint32(16)))


@prepared("uint32, uint32, int64, uint32[::1]")
@kernel
def _random_words(low: Any, high: Any, start: Any, out: Any) -> None:
    """uint32: the words of indices start, start + 1, …"""
    for i in range(out.size):
        out[i] = random_word(start + i, low, high)


@prepared("int64, int64, int64")
@kernel
def _sample_indices(n: Any, k: Any, seed: Any) -> Any:
    """Floyd's sampling with a bitmap; the same numbers as the reference."""
    taken = np.zeros((n + 63) // 64, np.uint64)
    state, one = np.uint64(seed), np.uint64(1)
    for top in range(n - k, n):
        state += np.uint64(0x9E3779B97F4A7C15)
        z = state
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        draw = ((z ^ (z >> np.uint64(31))) >> one) % np.uint64(top + 1)
        if (taken[draw >> np.uint64(6)] >> (draw & np.uint64(63))) & one:
            draw = np.uint64(top)
        taken[draw >> np.uint64(6)] |= one << (draw & np.uint64(63))
    out = np.empty(k, np.int64)
    count = 0
    for word in range(taken.size):
        bits = taken[word]
        if bits != 0:
            for bit in range(64):
                if (bits >> np.uint64(bit)) & one:
                    out[count] = word * 64 + bit
                    count += 1
    return out


@prepared("int64, int64, int64")
@kernel
def _stratified_indices(n: Any, size: Any, seed: Any) -> Any:
    """One index of each of `size` stretches by SplitMix64; the same numbers as the reference."""
    out = np.empty(size, np.int64)
    state = np.uint64(seed)
    for j in range(size):
        start = j * n // size
        stop = (j + 1) * n // size
        state += np.uint64(0x9E3779B97F4A7C15)
        z = state
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = (z ^ (z >> np.uint64(31))) >> np.uint64(1)
        out[j] = start + np.int64(z % np.uint64(stop - start))
    return out

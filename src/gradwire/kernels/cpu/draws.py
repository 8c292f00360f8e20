"""Random indices without replacement, equal to those of the contracts."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.cpu.jit import kernel
from gradwire.kernels.cpu.prepared import prepared


def sample_indices(n: int, k: int, seed: int) -> Tensor:
    """Twin of `gradwire.kernels.draws.sample_indices`. Draw by Floyd's algorithm, with a bitmap of the
    indices already drawn.
    """
    return torch.from_numpy(_sample_indices(n, k, seed))


def stratified_indices(n: int, size: int, seed: int) -> Tensor:
    """Twin of `gradwire.kernels.draws.stratified_indices`. Draw one index per stretch, by one step of
    SplitMix64 each.
    """
    return torch.from_numpy(_stratified_indices(n, size, seed))


@prepared("int64, int64, int64")
@kernel
def _sample_indices(n: Any, k: Any, seed: Any) -> Any:
    """Draw k of n indices by Floyd's algorithm with a bitmap; the same draws as the contract's."""
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
    """Draw one index from each of `size` equal stretches of 0 … n - 1, by SplitMix64 from `seed`; the same
    draws as the contract's.
    """
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

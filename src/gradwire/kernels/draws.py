"""Random indices without replacement; equal seeds give equal draws."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.dispatch import contract
from gradwire.kernels.noise import splitmix64


def _is_subset(n: int, k: int, seed: int) -> None:
    if not 0 <= k <= n:
        raise ValueError(f"k={k} is outside 0 … n={n}")


def _has_stretches(n: int, size: int, seed: int) -> None:
    if not 0 <= size <= n:
        raise ValueError(f"size={size} is outside 0 … n={n}")


@contract(_is_subset)
def sample_indices(n: int, k: int, seed: int) -> Tensor:
    """Draw k of n indices uniformly without replacement: (k,) int64, ascending, on the CPU.

    Each draw depends on those before it (Floyd's algorithm, O(k) draws), so there is no kernel for a device.
    The modulo's bias is below n / 2^63.

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


@contract(_has_stretches)
def stratified_indices(n: int, size: int, seed: int) -> Tensor:
    """Draw one index from each of `size` equal stretches of 0 … n - 1: (size,) int64, ascending, on the CPU.

    Every index is equally likely, up to the rounding of stretches. Unlike a fixed stride, the draws cannot
    fall on one column of a matrix.

    >>> stratified_indices(4, 4, seed=1)
    tensor([0, 1, 2, 3])
    """
    indices, state = [], seed
    for j in range(size):
        start, stop = j * n // size, (j + 1) * n // size
        state, bits = splitmix64(state)
        indices.append(start + (bits >> 1) % (stop - start))
    return torch.tensor(indices, dtype=torch.int64, device="cpu")

"""Random indices without replacement."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradwire.kernels.cpu.jit import kernel


@kernel
def sample_indices(n: Any, k: Any, seed: Any) -> Any:
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

"""Elements at given indices, and the indices as bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradwire.kernels.cpu.jit import kernel


@kernel
def take(x: Any, indices: Any, weight: Any, values: Any) -> None:
    """float32: values = weight · x[indices], then x[indices] = 0."""
    for j in range(indices.size):
        values[j] = weight * x[indices[j]]
    # A second pass, so that an index that occurs twice counts twice, as in the reference.
    for j in range(indices.size):
        x[indices[j]] = 0.0


@kernel
def scatter(out: Any, indices: Any, values: Any) -> None:
    """float32: out[indices] = values."""
    for j in range(indices.size):
        out[indices[j]] = values[j]


@kernel
def add_at(out: Any, indices: Any, values: Any, weight: Any) -> None:
    """float32: out[indices] += weight · values."""
    for j in range(indices.size):
        out[indices[j]] += weight * values[j]


@kernel
def pack_bits(indices: Any, words: Any) -> None:
    """Set a bit of int32 `words` for each index."""
    for j in range(indices.size):
        words[indices[j] >> 5] |= np.int32(1) << (indices[j] & 31)


@kernel
def unpack_bits(words: Any, out: Any) -> Any:
    """Write the indices of ones to `out` until it is full; returns how many."""
    count = 0
    for word in range(words.size):
        bits = words[word]
        if bits == 0:
            continue
        if count + 32 <= out.size:
            # No branch, which would be mispredicted at every other bit: write always, advance at a one.
            for bit in range(32):
                out[count] = word * 32 + bit
                count += (bits >> bit) & 1
            continue
        for bit in range(32):
            if (bits >> bit) & 1 and count < out.size:
                out[count] = word * 32 + bit
                count += 1
    return count

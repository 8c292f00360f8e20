"""Gather and scatter at given indices, and bitmaps of indices."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.cpu.jit import kernel
from gradwire.kernels.cpu.prepared import prepared
from gradwire.kernels.payload import Sound
from gradwire.kernels.places import index_type


def take(x: Tensor, indices: Tensor, weight: float = 1.0) -> Tensor:
    """Take as the contract says, element by element."""
    values = torch.empty(indices.numel(), dtype=x.dtype, device=x.device)
    _take(x.numpy(), indices.numpy(), np.float32(weight), values.numpy())
    return values


def scatter(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """Write as the contract says, element by element."""
    _scatter(out.numpy(), indices.numpy(), values.numpy())


def put(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """Twin of `gradwire.kernels.places.put`. Clear `out` by torch, at the speed of memory, and then write the
    values.
    """
    out.zero_()
    _scatter(out.numpy(), indices.numpy(), values.numpy())


def add_at(out: Tensor, indices: Tensor, values: Tensor, weight: float = 1.0) -> None:
    """Add as the contract says, element by element, so that an index that occurs twice counts twice."""
    _add_at(out.numpy(), indices.numpy(), values.numpy(), np.float32(weight))


def pack_bits(indices: Tensor, words: int) -> Tensor:
    """Twin of `gradwire.kernels.places.pack_bits`. Set one bit per index, in the order of the indices."""
    packed = torch.zeros(words, dtype=torch.int32, device=indices.device)
    set_bits(indices.numpy(), packed.numpy())
    return packed


def unpack_bits(packed: Tensor, count: int) -> tuple[Tensor, Sound]:
    """Twin of `gradwire.kernels.places.unpack_bits`. Find the set bits, a whole word at a time while `out`
    has room for 32 more.
    """
    indices = torch.empty(count + 1, dtype=index_type(32 * packed.numel()), device=packed.device)
    found = find_bits(packed.numpy(), indices.numpy())
    indices[found:] = max(32 * packed.numel() - 1, 0)
    return indices[:count], found == count


@prepared(
    "float32[::1], int32[::1], float32, float32[::1]",
    "float32[::1], int64[::1], float32, float32[::1]",
)
@kernel
def _take(x: Any, indices: Any, weight: Any, values: Any) -> None:
    """float32: values = weight · x[indices], then x[indices] = 0."""
    for j in range(indices.size):
        values[j] = weight * x[indices[j]]
    # A second pass, so that an index that occurs twice counts twice, as in the reference.
    for j in range(indices.size):
        x[indices[j]] = 0.0


@prepared(
    "float32[::1], int32[::1], float32[::1]",
    "float32[::1], int64[::1], float32[::1]",
)
@kernel
def _scatter(out: Any, indices: Any, values: Any) -> None:
    """float32: out[indices] = values."""
    for j in range(indices.size):
        out[indices[j]] = values[j]


@prepared(
    "float32[::1], int32[::1], float32[::1], float32",
    "float32[::1], int64[::1], float32[::1], float32",
)
@kernel
def _add_at(out: Any, indices: Any, values: Any, weight: Any) -> None:
    """float32: out[indices] += weight · values."""
    for j in range(indices.size):
        out[indices[j]] += weight * values[j]


@prepared(
    "int32[::1], int32[::1]",
    "int64[::1], int32[::1]",
)
@kernel
def set_bits(indices: Any, words: Any) -> None:
    """Set a bit of int32 `words` for each index."""
    for j in range(indices.size):
        words[indices[j] >> 5] |= np.int32(1) << (indices[j] & 31)


@prepared(
    "int32[::1], int32[::1]",
    "int32[::1], int64[::1]",
)
@kernel
def find_bits(words: Any, out: Any) -> Any:
    """Write the numbers of the set bits of `words` to `out` until it is full; returns how many were
    written.
    """
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

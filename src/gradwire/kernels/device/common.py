"""Functions that several kernels share."""

import triton
import triton.language as tl


@triton.jit
def magnitude(x):
    """Bits of float32 `x` without the sign, int32. As integers they order NaN and Inf above all numbers."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def load(pointers, mask):
    """Load the values at `pointers` as float32, exactly; 0 where `mask` is False.

    Without a mask (None), the compiler can use vector loads.
    """
    if mask is None:
        found = tl.load(pointers)
    else:
        found = tl.load(pointers, mask, other=0.0)
    return found.to(tl.float32)


@triton.jit
def places_in(numel, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Offsets and masks of a tile of ROWS blocks of BLOCK elements, which lie one after the other.

    Args:
        numel: elements from the start of the tile to the end of the tensor.
        WIDTH: BLOCK rounded up to a power of two.

    Returns (offsets, mask of elements, mask of blocks): the first two are (ROWS, WIDTH), the last is (ROWS,).
    """
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)[None, :]
    place = row[:, None] * BLOCK + column
    return place, (column < BLOCK) & (place < numel), row * BLOCK < numel


@triton.jit
def bytes_at(numel, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, PER: tl.constexpr):
    """Offsets of the packed codes of a tile of ROWS blocks; each block begins with a new byte.

    Args:
        numel: elements from the start of the tile to the end of the tensor.
        BLOCK: elements of a block.
        WIDTH: BLOCK rounded up to a power of two.
        PER: codes in a byte.

    Returns (offsets in bytes, mask of the bytes that exist), both (ROWS, WIDTH / PER).
    """
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH // PER)[None, :]
    first = column * PER
    place = row * ((BLOCK + PER - 1) // PER) + column
    return place, (first < BLOCK) & (row * BLOCK + first < numel)


@triton.jit
def bytes_from(codes, byte, ALIGNED: tl.constexpr):
    """Pointer to the codes of a tile: `codes` plus `byte`.

    With ALIGNED, the compiler is told that `byte` is a multiple of 4. Triton takes this hint only on the
    result of an operation, and not on an argument.
    """
    if ALIGNED:
        return tl.multiple_of(codes + byte, 4)
    else:
        return codes + byte


@triton.jit
def paired(code, BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Join codes of BITS bits in pairs: (ROWS, WIDTH) to (ROWS, WIDTH / 2), the first in the lowest bits."""
    low, high = tl.split(tl.reshape(code, (ROWS, WIDTH // 2, 2)))
    return low | (high << BITS)


@triton.jit
def parted(code, BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Inverse of `paired`: (ROWS, WIDTH / 2) to (ROWS, WIDTH) codes of BITS bits."""
    return tl.reshape(tl.join(code & ((1 << BITS) - 1), code >> BITS), (ROWS, WIDTH))


@triton.jit
def first_from(indices, count, bound):
    """Number of ascending `indices` (count,) that are below `bound`."""
    low, high = tl.zeros((), tl.int64), tl.zeros((), tl.int64) + count
    while low < high:
        middle = (low + high) // 2
        if tl.load(indices + middle) < bound:
            low = middle + 1
        else:
            high = middle
    return low

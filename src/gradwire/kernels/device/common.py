"""Parts that several kernels share."""

import triton
import triton.language as tl


@triton.jit
def magnitude(x):
    """The bits of float32 without the sign: as integers they order NaN and Inf above everything."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def load(pointers, mask):
    """As float32, exactly; zeros where a mask hides them. Without a mask loads can be vectors."""
    if mask is None:
        found = tl.load(pointers)
    else:
        found = tl.load(pointers, mask, other=0.0)
    return found.to(tl.float32)


@triton.jit
def places_in(numel, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Elements of a tile (ROWS, WIDTH) in its memory, which of them there are, and which blocks."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)[None, :]
    place = row[:, None] * BLOCK + column
    return place, (column < BLOCK) & (place < numel), row * BLOCK < numel


@triton.jit
def bytes_at(numel, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, PER: tl.constexpr):
    """Where the bytes of a tile are, PER codes in each, and which there are; blocks begin a byte."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH // PER)[None, :]
    first = column * PER
    place = row * ((BLOCK + PER - 1) // PER) + column
    return place, (first < BLOCK) & (row * BLOCK + first < numel)


@triton.jit
def bytes_from(codes, byte, ALIGNED: tl.constexpr):
    """Where a tile's codes are. Only what an operation returns can be said to be a multiple."""
    if ALIGNED:
        return tl.multiple_of(codes + byte, 4)
    else:
        return codes + byte


@triton.jit
def paired(code, BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Neighbours of (ROWS, WIDTH), numbers of BITS bits, as one: the first in the lowest bits."""
    low, high = tl.split(tl.reshape(code, (ROWS, WIDTH // 2, 2)))
    return low | (high << BITS)


@triton.jit
def parted(code, BITS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The inverse: (ROWS, WIDTH) of numbers of BITS bits."""
    return tl.reshape(tl.join(code & ((1 << BITS) - 1), code >> BITS), (ROWS, WIDTH))


@triton.jit
def first_from(indices, count, bound):
    """How many of ascending indices are below `bound`."""
    low, high = tl.zeros((), tl.int64), tl.zeros((), tl.int64) + count
    while low < high:
        middle = (low + high) // 2
        if tl.load(indices + middle) < bound:
            low = middle + 1
        else:
            high = middle
    return low

"""Functions that several kernels share."""

import triton
import triton.language as tl
from triton.language.target_info import current_target
from triton.runtime.jit import constexpr_function

_INTERPRETED = triton.knobs.runtime.interpret
_LANES = tl.constexpr(2048)
"""As many elements as a program has threads, or more: each wave has some."""


@constexpr_function
def is_amd():
    """True if a kernel is compiled for AMD's GPUs. The interpreter has no target, and would look for one in
    each call.
    """
    return not _INTERPRETED and current_target().backend == "hip"


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
def bfloat16_bits(x):
    """Bits of float32 `x` rounded to bfloat16, in the lower half of int32: half to even, and one NaN for
    all.
    """
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(magnitude(x) > 0x7F800000, 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


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


@triton.jit
def arrive(counter):
    """Count this program; returns how many were counted before. None waits for another.

    What all threads of earlier programs wrote before they arrived is visible to all threads of this one:

    - The barrier orders the writes of a program's threads before the addition, which one thread makes.
    - The addition releases them to all programs of the device, and acquires what earlier additions have
      released. `scope="gpu"` is enough, as no other device takes part.
    - The thread that adds hands the number to the others through shared memory, and a barrier follows. So
      their reads come after the addition, too.

    AMD's barrier does not wait for writes to global memory, and an addition releases those of its own wave
    alone. So there each wave first releases its own.
    """
    if is_amd():
        tl.atomic_add(counter + tl.zeros((_LANES,), tl.int32), 0, sem="release", scope="gpu")
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")


@triton.jit
def is_last(counter):
    """True in the program of a launch that arrives last, to which the work of all others is visible.

    `counter` is 0 before the launch, and after it. It belongs to launches of one stream, which run one after
    the other.
    """
    last = arrive(counter) == tl.num_programs(0) - 1
    if last:
        tl.store(counter, 0)
    return last

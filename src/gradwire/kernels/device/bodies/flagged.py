"""Programs that return at once unless a number on the device says otherwise."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"])
def poison(rows, count, bad, TILE: tl.constexpr):
    """NaN into memory at addresses (address, 16-bit words), unless `bad` is 0.

    The word 0x7FF8, repeated, is a NaN of float16, bfloat16, float32 and float64.
    """
    if tl.load(bad) != 0:
        place = tl.arange(0, TILE)
        number = tl.program_id(0)
        while number < count:
            row = rows + number.to(tl.int64) * 2
            words = tl.load(row).to(tl.pointer_type(tl.int16))
            tl.store(words + place, tl.full((TILE,), 0x7FF8, tl.int16), place < tl.load(row + 1))
            number += tl.num_programs(0)


@triton.jit
def zero_idle(plane, rows, idle, TILE: tl.constexpr):
    """Zeros into the tiles of pieces whose flag is set."""
    row = rows + tl.program_id(0).to(tl.int64) * 4
    if tl.load(idle + tl.load(row + 3)) != 0:
        place = tl.arange(0, TILE)
        tl.store(plane + tl.load(row) + place, tl.zeros((TILE,), tl.float32), place < tl.load(row + 2))

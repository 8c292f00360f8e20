"""The largest magnitude of each chunk."""

import triton
import triton.language as tl

from gradwire.kernels.device.bodies.common import load, magnitude


@triton.jit
def better(x, mask, is_there, begin, largest, place):
    """(largest magnitude, its place) of rows, after the columns from `begin` on."""
    bits = tl.where(is_there, tl.minimum(magnitude(load(x, mask)), 0x7F800000), -1)
    top, at = tl.max(bits, 1, return_indices=True, return_indices_tie_break_left=True)
    # Only what is larger: an equal one further left stays.
    return tl.maximum(largest, top), tl.where(top > largest, begin + at, place)


@triton.jit(do_not_specialize=["numel"])
def chunk_maxima(x, numel, found, CHUNK: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Indices of the largest of CHUNK elements each; ties go to the lowest, NaN and Inf are equals.

    A chunk is a constant, as a recipe has one: then it is known which loads can be vectors.
    """
    first = tl.program_id(0).to(tl.int64) * ROWS
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)[None, :]
    starts = (first + row) * CHUNK
    x += first * CHUNK + (row * CHUNK)[:, None] + column
    largest, place = tl.full((ROWS,), -1, tl.int32), tl.zeros((ROWS,), tl.int32)
    if (first + ROWS) * CHUNK <= numel:
        for begin in tl.static_range(0, (CHUNK + WIDTH - 1) // WIDTH * WIDTH, WIDTH):
            inside = begin + column + tl.zeros((ROWS, WIDTH), tl.int32) < CHUNK
            mask = None if CHUNK == WIDTH else inside
            largest, place = better(x + begin, mask, inside, begin, largest, place)
    else:
        begin = 0
        while begin < tl.minimum(numel, CHUNK):
            inside = (begin + column < CHUNK) & (starts[:, None] + begin + column < numel)
            largest, place = better(x + begin, inside, inside, begin, largest, place)
            begin += WIDTH
    tl.store(found + first + row, starts + place, starts < numel)

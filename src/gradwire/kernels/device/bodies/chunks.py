"""The largest magnitude of each chunk."""

import triton
import triton.language as tl

from gradwire.kernels.device.bodies.common import load, magnitude


@triton.jit(do_not_specialize=["numel", "chunks"])
def chunk_maxima(x, numel, chunks, found, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Of each chunk x[j::chunks] the index of the largest; ties go to the lowest, NaN and Inf are equals."""
    chunk = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    row = tl.arange(0, ROWS)[:, None]
    largest, place = tl.full((WIDTH,), -1, tl.int32), tl.zeros((WIDTH,), tl.int64)
    begin = tl.zeros((), tl.int64)
    while begin * chunks < numel:
        index = (begin + row) * chunks + chunk[None, :]
        is_there = (chunk[None, :] < chunks) & (index < numel)
        bits = tl.where(is_there, tl.minimum(magnitude(load(x + index, is_there)), 0x7F800000), -1)
        top, at = tl.max(bits, 0, return_indices=True, return_indices_tie_break_left=True)
        # Only what is larger: an equal one in an earlier row stays.
        place = tl.where(top > largest, begin + at, place)
        largest = tl.maximum(largest, top)
        begin += ROWS
    tl.store(found + chunk, place * chunks + chunk, (chunk < chunks) & (chunk < numel))

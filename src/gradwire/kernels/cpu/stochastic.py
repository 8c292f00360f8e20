"""Stochastic rounding to evenly spaced levels, bucket by bucket, with the same bits as in plain torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from torch import Tensor

from gradwire.kernels.cpu.bits import INFINITY, MAGNITUDE
from gradwire.kernels.cpu.jit import inlined, kernel
from gradwire.kernels.cpu.noise import random_word
from gradwire.kernels.cpu.prepared import prepared
from gradwire.kernels.layouts import Grid
from gradwire.kernels.noise import halves
from gradwire.kernels.stochastic import largest_step

_BLOCK = 4096  # elements; they and their codes stay in the first-level cache between the inner loops
_LANES = 64  # partial sums, as a sum in order would not vectorise
_POWERS = np.ldexp(np.float32(1.0), np.arange(255) - 127)  # by biased exponent
_ONE = np.float32(2**24)  # a level in fixed point, as noise has 24 bits


def quantize(
    x: Tensor, grid: Grid, key: int, steps: Tensor, codes: Tensor, *, subtract: bool = False
) -> None:
    """Twin of `gradwire.kernels.stochastic.quantize`. Quantize bucket by bucket."""
    most = largest_step(x.dtype, grid.levels)
    rule = grid.bits, grid.norm == "l2", float(grid.clip), np.float32(most)
    low, high = (np.uint32(half) for half in halves(key))
    _quantize(x.numpy(), grid.ends, grid.width, rule, (low, high), steps.numpy(), codes.numpy(), subtract)


def add_quantized(steps: Tensor, codes: Tensor, grid: Grid, out: Tensor, weight: float) -> None:
    """Twin of `gradwire.kernels.stochastic.add_quantized`. Decode and add bucket by bucket."""
    arrays = steps.numpy(), codes.numpy(), grid.ends
    _add_quantized(*arrays, grid.width, grid.bits, np.float32(weight), out.numpy())


@kernel
def _largest(bits: Any) -> Any:
    """Largest magnitude of float32 `bits`, as int32."""
    largest = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, np.int32(bits[i] & MAGNITUDE))
    return largest


@kernel
def _block_squares(x: Any, scale: Any, lanes: Any) -> Any:
    """Sum Σ(scale · x)² over at most one block, in float32. `lanes` is scratch memory."""
    lanes[:] = np.float32(0.0)
    rows = x.size // _LANES
    for r in range(rows):
        row = x[r * _LANES : r * _LANES + _LANES]
        for lane in range(_LANES):  # a constant number, so that it becomes a few vectors
            y = row[lane] * scale
            lanes[lane] += y * y
    for lane in range(x.size - rows * _LANES):
        y = x[rows * _LANES + lane] * scale
        lanes[lane] += y * y
    for lane in range(32):  # constant numbers again
        lanes[lane] += lanes[lane + 32]
    for lane in range(16):
        lanes[lane] += lanes[lane + 16]
    for lane in range(8):
        lanes[lane] += lanes[lane + 8]
    for lane in range(4):
        lanes[lane] += lanes[lane + 4]
    return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3])


@kernel
def _sum_squares(x: Any, scale: Any, lanes: Any) -> Any:
    """Sum Σ(scale · x)², block by block, in float64. `lanes` is scratch memory."""
    total = 0.0
    for block in range(0, x.size, _BLOCK):
        total += np.float64(_block_squares(x[block : min(block + _BLOCK, x.size)], scale, lanes))
    return total


# Inlined, as are the buckets below: to hand over arrays costs as much as the work on a bucket of 512.
@inlined
def _scale(x: Any, largest: Any, levels: Any, euclidean: Any, clip: Any, most: Any, lanes: Any) -> Any:
    """Compute the step of a bucket.

    Args:
        x, largest: the bucket, and its largest magnitude as bits.
        levels, euclidean, clip, most: number of positive levels, whether the norm is Euclidean, clip, largest
            step.
        lanes: scratch memory.

    Returns (2^e that brings x near 1, step of 2^e · x, step of x).
    """
    exponent = min(max(np.int32(254) - (largest >> np.int32(23)), np.int32(1)), np.int32(253))
    down, up = _POWERS[exponent], _POWERS[254 - exponent]
    norm = np.int32(largest).view(np.float32) * down
    if euclidean or clip < np.inf:
        total = _sum_squares(x, down, lanes)
        if euclidean:
            norm = np.float32(math.sqrt(total))
        else:
            norm = min(norm, np.float32(clip * math.sqrt(total / x.size)))
    near = norm / levels
    step = min(near * up, most)
    if step * down < near and step < most:
        step = np.nextafter(step, most)  # rounded below the normal range, where levels must not be too close
    return down, step * down, step


@kernel
def _round(x: Any, scale: Any, per_step: Any, end: Any, index: Any, low: Any, high: Any, codes: Any) -> None:
    """Write int8 `codes`: levels of x in fixed point, plus noise below one level, rounded down.

    `index` is the number of the first element; `low` and `high` are the halves of the key.
    """
    for i in range(x.size):
        level = min(max((x[i] * scale) * per_step, -end), end)
        noise = np.int32(random_word(index + i, low, high) >> np.uint32(8))
        codes[i] = np.int8((np.int32(level) + noise) >> np.int32(24))


@kernel
def _add(codes: Any, step: Any, weight: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] += weight * (step * np.float32(codes[i]))


@kernel
def _narrow_to_4(codes: Any, packed: Any) -> None:
    """Pack codes, given as two per uint16, into two per byte."""
    for i in range(packed.size):
        w = codes[i]
        packed[i] = np.uint8((w & np.uint16(0xF)) | ((w >> np.uint16(4)) & np.uint16(0xF0)))


@kernel
def _narrow_to_2(codes: Any, packed: Any) -> None:
    """Pack codes, given as four per uint32, into four per byte."""
    for i in range(packed.size):
        w = np.uint32(codes[i] & np.uint32(0x03030303))
        packed[i] = np.uint8(w | (w >> np.uint32(6)) | (w >> np.uint32(12)) | (w >> np.uint32(18)))


@kernel
def _widen_from_4(packed: Any, codes: Any) -> None:
    """Inverse of `_narrow_to_4`; the product spreads each sign over the upper bits of its byte."""
    for i in range(packed.size):
        b = np.uint16(packed[i])
        w = np.uint16((b & np.uint16(0xF)) | ((b & np.uint16(0xF0)) << np.uint16(4)))
        codes[i] = np.uint16(w | np.uint16((w & np.uint16(0x0808)) * np.uint16(0x1E)))


@kernel
def _widen_from_2(packed: Any, codes: Any) -> None:
    """Inverse of `_narrow_to_2`; signs are spread as in `_widen_from_4`."""
    for i in range(packed.size):
        b = np.uint32(packed[i])
        w = np.uint32(b | (b << np.uint32(6)) | (b << np.uint32(12)) | (b << np.uint32(18)))
        w = np.uint32(w & np.uint32(0x03030303))
        codes[i] = np.uint32(w | np.uint32((w & np.uint32(0x02020202)) * np.uint32(0x7E)))


@kernel
def _bytes(count: Any, bits: Any) -> Any:
    return (count * bits + 7) // 8


@inlined
def _quantize_bucket(
    x: Any, rule: Any, key: Any, index: Any, largest: Any, lanes: Any, codes: Any, packed: Any, subtract: Any
) -> Any:
    """Quantize one bucket, whose largest magnitude is finite and not 0.

    Args:
        x: float32 (n,), the bucket; with `subtract`, the decoded values are subtracted from it.
        rule: (bits per code, whether the norm is Euclidean, clip, largest step).
        key: two uint32 that seed the noise.
        index: number of the first element, by which its noise is drawn.
        largest: largest magnitude, as bits of float32.
        lanes, codes: scratch memory: float32 (_LANES,) and int8 (_BLOCK + 4,).
        packed: uint8, written: the codes, packed.

    Returns the step: a code c decodes to c times the step.
    """
    bits, euclidean, clip, most = rule
    levels = np.float32((1 << (bits - 1)) - 1)
    down, near, step = _scale(x, largest, levels, euclidean, clip, most, lanes)
    for block in range(0, x.size, _BLOCK):
        here = x[block : min(block + _BLOCK, x.size)]
        place = block * bits // 8
        row = packed[place : place + _bytes(here.size, bits)]
        buffer = row.view(np.int8) if bits == 8 else codes
        _round(here, down, _ONE / near, levels * _ONE, index + block, key[0], key[1], buffer)
        for i in range(here.size, here.size + 3):  # what else is in the last byte
            codes[i] = 0
        if bits == 4:
            _narrow_to_4(codes.view(np.uint16), row)
        elif bits == 2:
            _narrow_to_2(codes.view(np.uint32), row)
        if subtract:
            _add(buffer, step, np.float32(-1.0), here)
    return step


@prepared(
    "float32[::1], int64[::1], int64, Tuple((int64, boolean, float64, float32)), UniTuple(uint32, 2), "
    "float32[::1], uint8[::1], boolean"
)
@kernel
def _quantize(
    x: Any, ends: Any, bucket: Any, rule: Any, key: Any, steps: Any, packed: Any, subtract: Any
) -> None:
    """Quantize float32 x: write `steps` (buckets,) and `packed` codes; with `subtract`, x keeps the rounding
    errors.

    Parts end at `ends`, and have buckets of `bucket` elements. `rule` is (bits per code, whether norms are
    Euclidean, clip, largest step), and `key` the key of the noise.
    """
    bits_of_x, bits = x.view(np.int32), rule[0]
    lanes, codes = np.empty(_LANES, np.float32), np.empty(_BLOCK + 4, np.int8)
    number, place, begin = 0, 0, 0
    for end in ends:
        for start in range(begin, end, bucket):
            stop = min(start + bucket, end)
            here, row = x[start:stop], packed[place : place + _bytes(stop - start, bits)]
            largest = _largest(bits_of_x[start:stop])
            if largest == 0 or largest >= INFINITY:
                steps[number] = np.float32(0.0) if largest == 0 else np.float32(np.nan)
                row[:] = 0
                if subtract and largest != 0:
                    here[:] = np.float32(np.nan)
            else:
                steps[number] = _quantize_bucket(here, rule, key, start, largest, lanes, codes, row, subtract)
            number, place = number + 1, place + row.size
        begin = end


@prepared("float32[::1], uint8[::1], int64[::1], int64, int64, float32, float32[::1]")
@kernel
def _add_quantized(steps: Any, packed: Any, ends: Any, bucket: Any, bits: Any, weight: Any, out: Any) -> None:
    """float32: out += weight · step · code, in the order of parts and buckets in which `_quantize` wrote
    them. The arguments are as there; `bits` are those of a code.
    """
    codes = np.empty(_BLOCK + 4, np.int8)
    number, place, begin = 0, 0, 0
    for end in ends:
        for start in range(begin, end, bucket):
            stop = min(start + bucket, end)
            for block in range(start, stop, _BLOCK):
                here = out[block : min(block + _BLOCK, stop)]
                row = packed[place : place + _bytes(here.size, bits)]
                if bits == 4:
                    _widen_from_4(row, codes.view(np.uint16))
                elif bits == 2:
                    _widen_from_2(row, codes.view(np.uint32))
                _add(row.view(np.int8) if bits == 8 else codes, steps[number], weight, here)
                place += row.size
            number += 1
        begin = end

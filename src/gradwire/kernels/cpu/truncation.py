"""Upper bits of float32, packed lane by lane: every step is the same shift for a whole row."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.cpu.jit import kernel
from gradwire.kernels.cpu.prepared import prepared
from gradwire.kernels.truncation import LANES, upper_words

_ROWS = 32
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_QUIET = np.uint32(0x00400000)


def pack_upper(x: Tensor, drop: int, left: bool) -> Tensor:
    """Twin of `gradwire.kernels.truncation.pack_upper`. Pack chunk by chunk; a chunk stays in the first-level
    cache between the loops.
    """
    words = torch.empty(upper_words(x.numel(), drop), dtype=torch.int32, device=x.device)
    _pack_upper(x.numpy(), drop, LANES, words.numpy().view(np.uint32), left)
    return words


def add_upper(words: Tensor, drop: int, out: Tensor, weight: float) -> None:
    """Twin of `gradwire.kernels.truncation.add_upper`. Unpack and add chunk by chunk."""
    _add_upper(words.numpy().view(np.uint32), drop, LANES, np.float32(weight), out.numpy())


@kernel
def _cut(bits: Any, drop: Any, codes: Any) -> None:
    """Write the upper 32 - drop bits to `codes`. A NaN gets a mantissa bit that survives, so that it
    stays NaN.
    """
    for i in range(bits.size):
        quiet = _QUIET if np.uint32(bits[i] & _MAGNITUDE) > _INFINITY else np.uint32(0)
        codes[i] = np.uint32(np.uint32(bits[i] | quiet) >> drop)


@kernel
def _subtract(x: Any, codes: Any, drop: Any, bits: Any, floats: Any) -> None:
    for i in range(x.size):
        bits[i] = np.uint32(codes[i] << drop)
    for i in range(x.size):
        x[i] -= floats[i]


@kernel
def _pack_rows(codes: Any, width: Any, out: Any) -> None:
    """Pack 32 rows of codes of `width` bits, column by column, into words: (32, lanes) to (width, lanes)."""
    for row in range(_ROWS):
        word, shift = np.int64(row * width // 32), np.uint32(row * width % 32)
        if shift == 0:
            for lane in range(codes.shape[1]):
                out[word, lane] = codes[row, lane]
        else:
            for lane in range(codes.shape[1]):
                out[word, lane] |= np.uint32(codes[row, lane] << shift)
        if shift + width > 32:
            back = np.uint32(32 - shift)
            for lane in range(codes.shape[1]):
                out[word + 1, lane] = np.uint32(codes[row, lane] >> back)


@kernel
def _unpack_rows(words: Any, width: Any, drop: Any, bits: Any) -> None:
    """Unpack words (width, lanes) into float32 bits (32, lanes): codes shifted up by `drop`."""
    mask = np.uint32(np.uint32((1 << width) - 1) << drop)
    for row in range(_ROWS):
        word, shift = np.int64(row * width // 32), np.int64(row * width % 32)
        # The code's lowest bit is `shift`, and goes to `drop`.
        if shift <= drop:
            up = np.uint32(drop - shift)
            for lane in range(bits.shape[1]):
                bits[row, lane] = np.uint32(words[word, lane] << up) & mask
        else:
            down = np.uint32(shift - drop)
            for lane in range(bits.shape[1]):
                bits[row, lane] = np.uint32(words[word, lane] >> down) & mask
            up = np.uint32(32 - down)
            for lane in range(bits.shape[1] if shift + width > 32 else 0):
                bits[row, lane] |= np.uint32(words[word + 1, lane] << up) & mask


@kernel
def _add(out: Any, weight: Any, floats: Any) -> None:
    for i in range(out.size):
        out[i] += weight * floats[i]


@prepared("float32[::1], int64, int64, uint32[::1], boolean")
@kernel
def _pack_upper(x: Any, drop: Any, lanes: Any, out: Any, left: Any) -> None:
    """Pack the upper 32 - drop bits of float32 x into uint32 words `out`, in chunks of 32 rows of `lanes`
    elements; with `left`, x keeps the lower bits.
    """
    x_bits, width, chunk = x.view(np.uint32), 32 - drop, _ROWS * lanes
    codes, bits = np.empty(chunk, np.uint32), np.empty(chunk, np.uint32)
    floats, low, place = bits.view(np.float32), np.uint32(drop), 0
    for start in range(0, x.size, chunk):
        here = slice(start, min(start + chunk, x.size))
        count = here.stop - start
        columns = min(lanes, (count + _ROWS - 1) // _ROWS)
        _cut(x_bits[here], low, codes[:count])
        codes[count:] = 0
        if left:
            _subtract(x[here], codes, low, bits, floats)
        words = out[place : place + width * columns].reshape((width, columns))
        _pack_rows(codes[: _ROWS * columns].reshape((_ROWS, columns)), width, words)
        place += words.size


@prepared("uint32[::1], int64, int64, float32, float32[::1]")
@kernel
def _add_upper(words: Any, drop: Any, lanes: Any, weight: Any, out: Any) -> None:
    """float32: out += weight · the numbers that `_pack_upper` packed into `words`; `drop` and `lanes` are as
    there.
    """
    width, chunk, place = 32 - drop, _ROWS * lanes, 0
    bits = np.empty(chunk, np.uint32)
    floats = bits.view(np.float32)
    for start in range(0, out.size, chunk):
        here = slice(start, min(start + chunk, out.size))
        columns = min(lanes, (here.stop - start + _ROWS - 1) // _ROWS)
        packed = words[place : place + width * columns].reshape((width, columns))
        _unpack_rows(packed, width, drop, bits[: _ROWS * columns].reshape((_ROWS, columns)))
        _add(out[here], weight, floats)
        place += packed.size

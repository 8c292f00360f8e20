"""One bit per element, and one or two levels per block: a pass that sums, and one that packs and subtracts.

A block that fits the caches is read from memory once. A whole part as one block, of any size, is read twice.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from gradwire.kernels.cpu.jit import kernel
from gradwire.kernels.cpu.prepared import prepared
from gradwire.kernels.cpu.sums import LANES, add_magnitudes, add_sides, total
from gradwire.kernels.layouts import Blocks

_BLOCK = 4096  # elements; they and their flags stay in the first-level cache between the inner loops
# Times eight flags in eight bytes, the lowest first: the highest byte of the product has them as bits.
_GATHER = np.uint64(0x0102040810204080)
# Times a byte: eight copies of it. Of each, one bit is kept by the mask.
_SPREAD, _PICK = np.uint64(0x0101010101010101), np.uint64(0x8040201008040201)


def pack_signs(x: Tensor, blocks: Blocks, levels: Tensor, packed: Tensor, *, leave: bool = False) -> None:
    """Twin of `gradwire.kernels.signs.pack_signs`. Sum in a first pass, pack and subtract in a second one."""
    _pack_signs(x.numpy(), blocks.bounds, blocks.step, levels.numpy(), packed.numpy(), leave)


def add_signs(levels: Tensor, packed: Tensor, blocks: Blocks, out: Tensor, weight: float = 1.0) -> None:
    """Twin of `gradwire.kernels.signs.add_signs`. Decode and add: eight bits at a time become eight bytes."""
    arrays = levels.numpy(), packed.numpy(), blocks.bounds
    _add_signs(*arrays, blocks.step, out.numpy(), np.float32(weight))


@kernel
def _flag(x: Any, flags: Any) -> None:
    for i in range(x.size):
        flags[i] = x[i] >= 0


@kernel
def _join(words: Any, out: Any) -> None:
    for j in range(out.size):
        out[j] = np.uint8((words[j] * _GATHER) >> np.uint64(56))


@kernel
def pack_flags(x: Any, flags: Any, out: Any) -> None:
    """Pack the bits of x >= 0 into `out` (⌈size/8⌉,) uint8; the last byte is padded with 0. x has at most a
    block.
    """
    _flag(x, flags)
    flags[x.size : 8 * out.size] = 0
    _join(flags.view(np.uint64), out)


@kernel
def _subtract(x: Any, high: Any, low: Any) -> None:
    for i in range(x.size):
        x[i] -= high if x[i] >= 0 else low


@kernel
def _measure(x: Any, sums: Any, counts: Any, levels: Any) -> None:
    """Write the `levels` of a block x: its mean magnitude, or the means of elements >= 0 and of the others.
    `sums` and `counts` are scratch memory.
    """
    sums[:], counts[:] = 0, 0
    for start in range(0, x.size, _BLOCK):
        here = x[start : start + _BLOCK]
        if levels.size == 1:
            add_magnitudes(here, sums[0])
        else:
            add_sides(here, sums[0], sums[1], counts)
    if levels.size == 1:
        levels[0] = np.float32(total(sums[0]) / x.size)
    else:
        above = counts.sum()
        levels[0] = np.float32(total(sums[0]) / max(above, 1))
        levels[1] = np.float32(total(sums[1]) / max(x.size - above, 1))


@kernel
def _pack(x: Any, high: Any, low: Any, flags: Any, out: Any, leave: Any) -> None:
    for start in range(0, x.size, _BLOCK):
        here = x[start : start + _BLOCK]
        pack_flags(here, flags, out[start // 8 : (start + here.size + 7) // 8])
        if leave:
            _subtract(here, high, low)


@prepared("float32[::1], int64[::1], int64, float32[:, ::1], uint8[::1], boolean")
@kernel
def _pack_signs(x: Any, bounds: Any, step: Any, levels: Any, packed: Any, leave: Any) -> None:
    """Write `levels` (blocks, 1 or 2) and uint8 `packed` of float32 x; with `leave`, x keeps the rounding
    errors. Parts end at `bounds`, and have blocks of `step` elements.
    """
    flags = np.zeros(_BLOCK, np.uint8)
    sums, counts = np.zeros((2, LANES)), np.zeros(LANES, np.int64)
    row, byte = 0, 0
    for part in range(bounds.size - 1):
        for start in range(bounds[part], bounds[part + 1], step):
            here = slice(start, min(start + step, bounds[part + 1]))
            end = byte + (here.stop - here.start + 7) // 8
            _measure(x[here], sums, counts, levels[row])
            high = levels[row, 0]
            low = -high if levels.shape[1] == 1 else levels[row, 1]
            _pack(x[here], high, low, flags, packed[byte:end], leave)
            row, byte = row + 1, end


@kernel
def _part(packed: Any, words: Any) -> None:
    for j in range(packed.size):
        words[j] = (np.uint64(packed[j]) * _SPREAD) & _PICK


@kernel
def _add_either(out: Any, flags: Any, high: Any, low: Any) -> None:
    for i in range(out.size):
        out[i] += high if flags[i] != 0 else low


@prepared("float32[:, ::1], uint8[::1], int64[::1], int64, float32[::1], float32")
@kernel
def _add_signs(levels: Any, packed: Any, bounds: Any, step: Any, out: Any, weight: Any) -> None:
    """float32: out += weight · the level of each bit of `packed`, with `levels` (blocks, 1 or 2). Parts end
    at `bounds`, and have blocks of `step` elements.
    """
    flags = np.zeros(_BLOCK, np.uint8)
    row, byte = 0, 0
    for part in range(bounds.size - 1):
        for first in range(bounds[part], bounds[part + 1], step):
            last = min(first + step, bounds[part + 1])
            high = weight * levels[row, 0]
            low = -high if levels.shape[1] == 1 else weight * levels[row, 1]
            row += 1
            for start in range(first, last, _BLOCK):
                here = slice(start, min(start + _BLOCK, last))
                end = byte + (here.stop - start + 7) // 8
                _part(packed[byte:end], flags.view(np.uint64))
                _add_either(out[here], flags, high, low)
                byte = end

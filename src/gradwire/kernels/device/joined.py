"""Copies between a flat tensor and many small ones, in one launch: a table has the address of every tile."""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.device.common import bfloat16_bits, load, magnitude
from gradwire.kernels.device.compensation import FLOATS, INFINITY
from gradwire.kernels.device.launch import TILE, bound, is_taken, launch
from gradwire.kernels.device.tables import cut
from gradwire.kernels.uploads import kept_by_stream, sent_to

_FLOAT32, _BFLOAT16, _FLOAT16 = map(tl.constexpr, range(len(FLOATS)))


@bound
def join(regions: list[Tensor], flat: Tensor, weight: float, mark: Tensor | None = None) -> None:
    """Twin of `gradwire.kernels.joined.join`. Copy in one launch; its last program reads the mark."""
    if not _are_taken(flat, regions, mark):
        return NotImplemented
    rows = _tiles(_places(regions), flat.device)
    launch(
        _join, len(rows) + (mark is not None), rows, len(rows), flat, flat.numel(), weight,
        flat if mark is None else mark, TILE=TILE,
    )  # fmt: skip
    return None


@bound
def split(flat: Tensor, regions: list[Tensor], mark: Tensor | None = None) -> None:
    """Twin of `gradwire.kernels.joined.split`. Copy in one launch; its last program reads what belongs to no
    region.
    """
    left = flat.numel() - sum(each.numel() for each in regions)
    if not _are_taken(flat, regions, mark) or left > TILE:
        return NotImplemented
    rows = _tiles(_places(regions), flat.device)
    launch(
        _split, len(rows) + (left > 0), rows, len(rows), flat, flat.numel() - left, left,
        flat if mark is None else mark, INFINITY, MARKS=mark is not None, TILE=TILE,
    )  # fmt: skip
    return None


def _are_taken(flat: Tensor, regions: list[Tensor], mark: Tensor | None) -> bool:
    return (
        is_taken(flat)
        and is_taken(flat, *regions, dtypes=FLOATS)
        and (mark is None or mark.device == flat.device)
    )


def _places(regions: list[Tensor]) -> tuple[tuple[int, int, int, int], ...]:
    """(address, elements, bytes of an element, number of the type) of each region."""
    return tuple(
        [(each.data_ptr(), each.numel(), each.itemsize, FLOATS.index(each.dtype)) for each in regions]
    )


@kept_by_stream(maxsize=64)
def _tiles(places: tuple[tuple[int, int, int, int], ...], device: torch.device) -> Tensor:
    """Rows (address, first element of the flat tensor, elements, number of the type)."""
    addresses, sizes, widths, types = np.array(places, np.int64).reshape(-1, 4).T
    numbers, begins = cut(sizes, TILE)
    firsts = np.cumsum(sizes) - sizes
    table = (
        addresses[numbers] + widths[numbers] * begins, firsts[numbers] + begins,
        np.minimum(sizes[numbers] - begins, TILE), types[numbers],
    )  # fmt: skip
    return sent_to(torch.from_numpy(np.stack(table, axis=1)), device)


@triton.jit(do_not_specialize=["count", "numel"])
def _join(rows, count, flat, numel, weight, mark, TILE: tl.constexpr):
    """Write a tile of a region, times `weight`. The program after the last tile writes whether the mark is
    set, to the last element.
    """
    number = tl.program_id(0)
    if number == count:
        tl.store(flat + numel - 1, tl.where(tl.load(mark) != 0, float("inf"), 0.0))
    else:
        row, place = rows + number.to(tl.int64) * 4, tl.arange(0, TILE)
        address, first, size, kind = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
        if kind == _FLOAT32:
            value = load(address.to(tl.pointer_type(tl.float32)) + place, place < size)
        elif kind == _BFLOAT16:
            value = load(address.to(tl.pointer_type(tl.bfloat16)) + place, place < size)
        else:
            value = load(address.to(tl.pointer_type(tl.float16)) + place, place < size)
        tl.store(flat + first + place, value * weight, place < size)


@triton.jit(do_not_specialize=["count", "numel", "left", "infinity"])
def _split(rows, count, flat, numel, left, mark, infinity, MARKS: tl.constexpr, TILE: tl.constexpr):
    """Write a tile of a region. The program after the last tile looks at the `left` elements from number
    `numel` on. Each sets the mark if the magnitude of a value, as bits of float32, is `infinity` or above.
    """
    number, place = tl.program_id(0), tl.arange(0, TILE)
    if number == count:
        value = load(flat + numel + place, place < left)
    else:
        row = rows + number.to(tl.int64) * 4
        address, first, size, kind = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
        value = load(flat + first + place, place < size)
        if kind == _FLOAT32:
            tl.store(address.to(tl.pointer_type(tl.float32)) + place, value, place < size)
        elif kind == _BFLOAT16:
            bits = bfloat16_bits(value).to(tl.int16)
            tl.store(address.to(tl.pointer_type(tl.int16)) + place, bits, place < size)
        else:
            tl.store(address.to(tl.pointer_type(tl.float16)) + place, value.to(tl.float16), place < size)
    if MARKS & (tl.max(magnitude(value)) >= infinity):
        tl.store(mark, 1)

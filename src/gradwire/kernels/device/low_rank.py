"""Products with thin factors, and orthonormal factors. All matrices of a unit take the same few launches.

The number of launches depends neither on how many matrices there are, nor on their shapes, nor on the rank. A
table says which part of which matrix a program works on. Of the matrix, each product reads a part once from
memory, and again from the cache for each further column of the factors.

Outer products, what is subtracted, and orthonormal columns have the CPU's bits. Products of a matrix and a
factor are a rank's own, and are summed in another order than the CPU's.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels.device.common import load
from gradwire.kernels.device.launch import TILE, bound, is_taken, launch
from gradwire.kernels.device.tables import QUAD, Tiles, cut
from gradwire.kernels.uploads import kept_by_stream, sent_to

_ROWS, _WIDTH = 4, 512
"""Rows of a program that multiplies them with the right factor, and columns that it takes at a time."""
_STRIP, _BAND = 128, 64
"""Rows and columns of a program that multiplies columns with the left factor."""
_MOST_ELEMENTS = 1 << 31
"""Fewer than this many elements of a unit: columns are counted in 32 bits."""
_MOST_COLUMNS = 63
"""Columns of a factor, at most: a bit of an integer marks each that was accepted."""


class _Strips(NamedTuple):
    """Tables of a product that is summed by strips of `_STRIP` rows: `tiles` of the strips, and `sums` of the
    results.
    """

    tiles: Tiles
    sums: Tensor


@bound
def left_products(
    x: Tensor, places: Tensor, rank: int, left: Tensor, right: Tensor, subtract: bool = False
) -> None:
    """Multiply in one launch, 4 bytes of memory traffic per element; `subtract` takes one more, 8 bytes."""
    if not _are_taken(x, left, right):
        return NotImplemented
    tiles = _row_tiles(places.numpy().tobytes(), x.device)
    launch(
        _multiply_rows, len(tiles.rows), x, tiles.rows, rank, left, right,
        ALIGNED=tiles.aligned, ROWS=_ROWS, WIDTH=_WIDTH,
    )  # fmt: skip
    if subtract:
        _expand_all(x, places, rank, left, right, True)
    return None


def right_products(x: Tensor, places: Tensor, rank: int, left: Tensor, right: Tensor) -> None:
    """Multiply in three launches, 12 bytes of memory traffic per element: sum strips of rows, add the strips
    in order, and subtract.
    """
    sums = torch.empty(_strip_sums(places, rank), dtype=torch.float32, device=x.device)
    return _multiply_right(x, places, rank, left, right, sums)


@lru_cache(maxsize=1024)
def _strip_sums(places: Tensor, rank: int) -> int:
    """Elements of the sums of all strips. Tables are told apart by identity, and never change."""
    _start, rows, columns, _at_left, _at_right = places.numpy().T
    return int((-(-rows // _STRIP) * rank * columns).sum())


@bound
def _multiply_right(x: Tensor, places: Tensor, rank: int, left: Tensor, right: Tensor, sums: Tensor) -> None:
    """As `right_products`; `sums` is scratch."""
    if not _are_taken(x, left, right):
        return NotImplemented
    strips = _strips(places.numpy().tobytes(), rank, x.device)
    launch(
        _multiply_strips, len(strips.tiles.rows), x, strips.tiles.rows, rank, left, sums,
        ALIGNED=strips.tiles.aligned, ROWS=TILE // _BAND, BAND=_BAND,
    )  # fmt: skip
    launch(_add_strips, len(strips.sums), sums, strips.sums, right, STRIPS=TILE // _BAND, BAND=_BAND)
    _expand_all(x, places, rank, left, right, True)
    return None


@bound
def outer_products(out: Tensor, places: Tensor, rank: int, left: Tensor, right: Tensor) -> None:
    """Multiply in one launch, 4 bytes of memory traffic per element."""
    if not _are_taken(out, left, right):
        return NotImplemented
    _expand_all(out, places, rank, left, right, False)
    return None


def orthonormalise(factors: Tensor, spans: Tensor, rank: int, spare: Tensor | None = None) -> None:
    """Make columns orthonormal in one launch, of one program per matrix.

    Sums are in the CPU's order, so they take as long as their additions take one after the other. Matrices
    and ranks would otherwise take dozens of launches each.
    """
    work = torch.empty(factors.numel(), dtype=torch.float64, device=factors.device)
    return _make_orthonormal(factors, spans, rank, spare, work)


@bound
def _make_orthonormal(factors: Tensor, spans: Tensor, rank: int, spare: Tensor | None, work: Tensor) -> None:
    """As `orthonormalise`; `work` is scratch."""
    other = factors if spare is None else spare
    if not is_taken(factors, other) or rank > _MOST_COLUMNS:
        return NotImplemented
    table = _uploaded(spans.numpy().tobytes(), factors.device)
    launch(
        _orthonormalise, len(spans), factors, table, rank, other, work,
        SPARE=spare is not None, TILE=256, num_warps=1,
    )  # fmt: skip
    return None


def _are_taken(x: Tensor, left: Tensor, right: Tensor) -> bool:
    return is_taken(x, left, right) and x.numel() < _MOST_ELEMENTS


def _expand_all(out: Tensor, places: Tensor, rank: int, left: Tensor, right: Tensor, subtract: bool) -> None:
    """Write left·rightᵀ to the matrices in `out`, or subtract it from them."""
    tiles = _element_tiles(places.numpy().tobytes(), out.device)
    launch(
        _expand, len(tiles.rows), out, tiles.rows, rank, left, right,
        SUBTRACT=subtract, ALIGNED=tiles.aligned, TILE=TILE,
    )  # fmt: skip


def _columns_of(places: bytes) -> tuple[NDArray[np.int64], ...]:
    """Columns of the table of matrices: start, rows, columns, at_left, at_right."""
    return tuple(np.frombuffer(places, np.int64).reshape(-1, 5).T)


@kept_by_stream(maxsize=1024)
def _uploaded(spans: bytes, device: torch.device) -> Tensor:
    return sent_to(torch.from_numpy(np.frombuffer(spans, np.int64).copy()), device)


@kept_by_stream(maxsize=1024)
def _row_tiles(places: bytes, device: torch.device) -> Tiles:
    """Rows (first element, rows, columns, first element in `left`, rows of the matrix, right factor)."""
    start, rows, columns, at_left, at_right = _columns_of(places)
    of, first = cut(rows, _ROWS)
    table = (
        start[of] + first * columns[of], np.minimum(rows[of] - first, _ROWS), columns[of],
        at_left[of] + first, rows[of], at_right[of],
    )  # fmt: skip
    return _tiles(table, start, columns, device=device)


@kept_by_stream(maxsize=1024)
def _strips(places: bytes, rank: int, device: torch.device) -> _Strips:
    """Tables of all strips of rows, cut into bands of columns, and of their sums.

    Rows of the first are (first element, rows, columns, columns of the matrix, first element in `left`, rows
    of the matrix, first element in the strips' sums). Those of the second are (first element in the strips'
    sums, elements, elements of a strip's sums, strips, first element in `right`).
    """
    start, rows, columns, at_left, at_right = _columns_of(places)
    counts, each = -(-rows // _STRIP), rank * columns
    firsts = np.cumsum(counts * each) - counts * each
    strip_of, row = cut(rows, _STRIP)
    strip, column = cut(columns[strip_of], _BAND)
    of, row = strip_of[strip], row[strip]
    tiles = (
        start[of] + row * columns[of] + column, np.minimum(rows[of] - row, _STRIP),
        np.minimum(columns[of] - column, _BAND), columns[of], at_left[of] + row, rows[of],
        firsts[of] + row // _STRIP * each[of] + column,
    )  # fmt: skip
    of, first = cut(each, _BAND)
    sums = (
        firsts[of] + first, np.minimum(each[of] - first, _BAND), each[of], counts[of], at_right[of] + first,
    )  # fmt: skip
    return _Strips(_tiles(tiles, start, columns, device=device), _sent(sums, device))


@kept_by_stream(maxsize=1024)
def _element_tiles(places: bytes, device: torch.device) -> Tiles:
    """Rows (first element, elements, row and column of the first one, columns of the matrix, its rows, left
    factor, right factor).
    """
    start, rows, columns, at_left, at_right = _columns_of(places)
    of, first = cut(rows * columns, TILE)
    table = (
        start[of] + first, np.minimum((rows * columns)[of] - first, TILE), first // columns[of],
        first % columns[of], columns[of], rows[of], at_left[of], at_right[of],
    )  # fmt: skip
    return _tiles(table, start, device=device)


def _tiles(table: tuple[NDArray[np.int64], ...], *aligned: NDArray[np.int64], device: torch.device) -> Tiles:
    """Upload a table by its columns; `aligned` if all these numbers are multiples of `QUAD`."""
    return Tiles(_sent(table, device), not any((each % QUAD).any() for each in aligned))


def _sent(table: tuple[NDArray[np.int64], ...], device: torch.device) -> Tensor:
    return sent_to(torch.from_numpy(np.stack(table, axis=1)), device)


@triton.jit(do_not_specialize=["rank"])
def _multiply_rows(
    x, tiles, rank, left, right, ALIGNED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """Write M·right of at most ROWS rows of a matrix M to `left`."""
    tile = tiles + tl.program_id(0).to(tl.int64) * 6
    start, count, columns = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    to, rows, at_right = tl.load(tile + 3), tl.load(tile + 4), tl.load(tile + 5)
    if ALIGNED:
        start, columns = tl.multiple_of(start, 4), tl.multiple_of(columns, 4)
    row, lane = tl.arange(0, ROWS), tl.arange(0, WIDTH)[None, :]
    k = tl.zeros((), tl.int64)
    while k < rank:
        total, first = tl.zeros((ROWS, WIDTH), tl.float32), tl.zeros((), tl.int64)
        while first < columns:
            here = first + lane
            value = load(x + start + row[:, None] * columns + here, (row[:, None] < count) & (here < columns))
            total += value * load(right + at_right + k * columns + here, here < columns)
            first += WIDTH
        tl.store(left + to + k * rows + row, tl.sum(total, 1), row < count)
        k += 1


@triton.jit(do_not_specialize=["rank"])
def _multiply_strips(
    x, tiles, rank, left, sums, ALIGNED: tl.constexpr, ROWS: tl.constexpr, BAND: tl.constexpr
):
    """Write Mᵀ·left of a strip of rows, and of at most BAND columns, of a matrix M to `sums`."""
    tile = tiles + tl.program_id(0).to(tl.int64) * 7
    start, count, width, columns = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    at_left, rows, to = tl.load(tile + 4), tl.load(tile + 5), tl.load(tile + 6)
    if ALIGNED:
        start, width, columns = tl.multiple_of(start, 4), tl.multiple_of(width, 4), tl.multiple_of(columns, 4)
    row, lane = tl.arange(0, ROWS)[:, None], tl.arange(0, BAND)
    k = tl.zeros((), tl.int64)
    while k < rank:
        total, first = tl.zeros((ROWS, BAND), tl.float32), tl.zeros((), tl.int64)
        while first < count:
            here = first + row
            value = load(x + start + here * columns + lane[None, :], (here < count) & (lane[None, :] < width))
            total += value * load(left + at_left + k * rows + here, here < count)
            first += ROWS
        tl.store(sums + to + k * columns + lane, tl.sum(total, 0), lane < width)
        k += 1


@triton.jit
def _add_strips(sums, tiles, right, STRIPS: tl.constexpr, BAND: tl.constexpr):
    """Write the sums over all strips of a matrix to at most BAND elements of `right`."""
    tile = tiles + tl.program_id(0).to(tl.int64) * 5
    start, width, each, strips = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    strip, lane = tl.arange(0, STRIPS)[:, None], tl.arange(0, BAND)
    total, first = tl.zeros((STRIPS, BAND), tl.float32), tl.zeros((), tl.int64)
    while first < strips:
        here = first + strip
        total += load(sums + start + here * each + lane[None, :], (here < strips) & (lane[None, :] < width))
        first += STRIPS
    tl.store(right + tl.load(tile + 4) + lane, tl.sum(total, 0), lane < width)


@triton.jit
def _expand_tile(
    out, rank, left, right, row, column, rows, columns, mask, SUBTRACT: tl.constexpr, TILE: tl.constexpr
):
    """Write a tile of left·rightᵀ to `out` (a pointer), or subtract it, in the order of the factors' columns.

    `left` and `right` are pointers to the factors of a matrix with `rows` and `columns`. The tile begins at
    `row` and `column`.
    """
    lane = tl.arange(0, TILE)
    # In 32 bits: divisions of 64 take several times as long.
    along, width = column.to(tl.int32) + lane, columns.to(tl.int32)
    left, right = left + row + along // width, right + along % width
    k = tl.zeros((), tl.int64)
    if SUBTRACT:
        value = load(out + lane, mask)
    else:
        value = load(left, mask) * load(right, mask)
        k += 1
    while k < rank:
        term = load(left + k * rows, mask) * load(right + k * columns, mask)
        value = value - term if SUBTRACT else value + term
        k += 1
    tl.store(out + lane, value, mask)


@triton.jit(do_not_specialize=["rank"])
def _expand(out, tiles, rank, left, right, SUBTRACT: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr):
    """Write TILE elements of left·rightᵀ, or fewer, to their matrix in `out`, or subtract them."""
    tile = tiles + tl.program_id(0).to(tl.int64) * 8
    start, count, row, column = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    columns, rows, at_left, at_right = (
        tl.load(tile + 4), tl.load(tile + 5), tl.load(tile + 6), tl.load(tile + 7),
    )  # fmt: skip
    if ALIGNED:
        start = tl.multiple_of(start, 4)
    out, left, right = out + start, left + at_left, right + at_right
    if count == TILE:
        _expand_tile(out, rank, left, right, row, column, rows, columns, None, SUBTRACT, TILE)
    else:
        mask = tl.arange(0, TILE) < count
        _expand_tile(out, rank, left, right, row, column, rows, columns, mask, SUBTRACT, TILE)


_AT_ONCE = tl.constexpr(8)
"""Terms of a sum that are loaded before the first of them is added."""
_LOST = tl.constexpr(1e-6)  # as the contract's


@triton.jit
def _product(a, b, size):
    """Sum of a·b over float64 at two pointers, in order."""
    total, place = tl.zeros((), tl.float64), tl.zeros((), tl.int64)
    while place + _AT_ONCE <= size:
        for i in tl.static_range(_AT_ONCE):
            total += tl.load(a + place + i) * tl.load(b + place + i)
        place += _AT_ONCE
    while place < size:
        total += tl.load(a + place) * tl.load(b + place)
        place += 1
    return total


@triton.jit
def _magnitudes(a, size):
    """Sum of the magnitudes of float32 at a pointer, in float64 and in order."""
    total, place = tl.zeros((), tl.float64), tl.zeros((), tl.int64)
    while place + _AT_ONCE <= size:
        for i in tl.static_range(_AT_ONCE):
            total += tl.abs(tl.load(a + place + i).to(tl.float64))
        place += _AT_ONCE
    while place < size:
        total += tl.abs(tl.load(a + place).to(tl.float64))
        place += 1
    return total


@triton.jit
def _divide(out, a, divisor, size, TILE: tl.constexpr):
    """Write a / divisor to `out`, in float64."""
    tl.debug_barrier()  # some threads may still read what is written
    place = tl.zeros((), tl.int64)
    while place < size:
        here = place + tl.arange(0, TILE)
        value = tl.load(a + here, here < size, other=0.0).to(tl.float64)
        tl.store(out + here, value / divisor, here < size)
        place += TILE
    tl.debug_barrier()


@triton.jit
def _subtract(out, along, a, size, TILE: tl.constexpr):
    """Subtract along · a from `out`, in float64."""
    tl.debug_barrier()
    place = tl.zeros((), tl.int64)
    while place < size:
        here = place + tl.arange(0, TILE)
        term = along * tl.load(a + here, here < size, other=0.0)
        tl.store(out + here, tl.load(out + here, here < size, other=0.0) - term, here < size)
        place += TILE
    tl.debug_barrier()


@triton.jit
def _accept(work, taken, k, column, rank, size, TILE: tl.constexpr):
    """Orthogonalise the column at a pointer against the columns of `work` that `taken` marks, and normalise
    it into column k.

    Returns `taken` with the bit of column k, unless the column is zero or only rounding is left of it.
    """
    new, total = work + k * size, _magnitudes(column, size)
    if total != 0.0:
        _divide(new, column, total, size, TILE)
        before = tl.sqrt(_product(new, new, size))
        after = before
        if taken != 0:
            turn = tl.zeros((), tl.int32)
            while turn < 2 * rank:
                j = turn % rank
                if (taken >> j) & 1 != 0:
                    other = work + j * size
                    _subtract(new, _product(other, new, size), other, size, TILE)
                turn += 1
            after = tl.sqrt(_product(new, new, size))
        is_lost = after <= _LOST * before  # not if either is NaN
        if is_lost == 0:
            _divide(new, new, after, size, TILE)
            taken |= tl.full((), 1, tl.int64) << k
    return taken


@triton.jit(do_not_specialize=["rank"])
def _orthonormalise(factors, spans, rank, spare, work, SPARE: tl.constexpr, TILE: tl.constexpr):
    """Make the columns of the factors of one matrix orthonormal, in place and in the CPU's order.

    A program is one warp, so that a barrier lets each thread see what the others have written. All of them
    compute each sum.
    """
    span = spans + tl.program_id(0).to(tl.int64) * 2
    start, size = tl.load(span), tl.load(span + 1)
    factors, spare, work = factors + start, spare + start, work + start
    taken, k = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    while k < rank:
        taken = _accept(work, taken, k, factors + k * size, rank, size, TILE)
        k += 1
    if SPARE:
        # Each spare column for each that was lost. In 32 bits, as divisions of 64 are calls.
        turn = tl.zeros((), tl.int32)
        while turn < rank * rank:
            if (taken >> turn // rank) & 1 == 0:
                other = spare + turn % rank * size
                taken = _accept(work, taken, turn // rank, other, rank, size, TILE)
            turn += 1
    tl.debug_barrier()
    k = tl.zeros((), tl.int64)
    while k < rank:
        is_there, place = (taken >> k) & 1 != 0, tl.zeros((), tl.int64)
        while place < size:
            here = k * size + place + tl.arange(0, TILE)
            mask = place + tl.arange(0, TILE) < size
            value = tl.load(work + here, mask & is_there, other=0.0)
            tl.store(factors + here, value.to(tl.float32), mask)
            place += TILE
        k += 1

"""Tables of tiles: the elements on which each program works, uploaded once per layout, without a wait.

Parameters have any size, so a program looks up where its elements lie. A row of 32 bytes for `TILE` elements
is 0.1 % of the memory traffic of a compensation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels.device.launch import TILE
from gradwire.kernels.layouts import CodedPieces, ScaledBlocks, ShardedBlocks, packed_bytes
from gradwire.kernels.pieces import Pieces
from gradwire.kernels.uploads import kept_by_stream, sent_to, stream_of

QUAD = 4
"""Elements of float32 that one vector of 16 bytes holds."""
SCALE_BYTES = 4
"""Bytes of a scale: kernels take float32."""


def bits_of(blocks: ScaledBlocks) -> int:
    """Bits of a code of these blocks."""
    return 4 if blocks.kind == "int4" else 8


class Tiles(NamedTuple):
    """Table of tiles: `rows` (programs, columns) int64 on the device.

    `aligned` is True if all elements begin at multiples of `QUAD`, `bytes_aligned` if all codes begin at
    multiples of `QUAD` bytes.
    """

    rows: Tensor
    aligned: bool
    bytes_aligned: bool = True


def cut(sizes: NDArray[np.int64], tile: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut parts of `sizes` elements into tiles of at most `tile` elements.

    Returns (number of the part, first element within the part) of each tile, both (tiles,). An empty part has
    no tile.
    """
    counts = -(-sizes // tile)
    parts = np.repeat(np.arange(len(sizes)), counts)
    firsts = np.cumsum(counts) - counts
    return parts, (np.arange(len(parts)) - firsts[parts]) * tile


_TILES: WeakKeyDictionary[Pieces, dict[tuple[torch.device, int], Tiles]] = WeakKeyDictionary()
"""Results of `piece_tiles` by device and stream: see `kept_by_stream`."""


def piece_tiles(pieces: Pieces, device: torch.device) -> Tiles:
    """Tiles of all pieces: rows (start in the plane, start in the bucket, elements, number of the piece)."""
    known, place = _TILES.setdefault(pieces, {}), (device, stream_of(device))
    if place not in known:
        numbers, begins = cut(pieces.table[:, 2], TILE)
        rows = np.empty((len(numbers), 4), np.int64)
        rows[:, :2] = pieces.table[numbers, :2] + begins[:, None]
        rows[:, 2] = np.minimum(pieces.table[numbers, 2] - begins, TILE)
        rows[:, 3] = numbers
        known[place] = Tiles(sent_to(torch.from_numpy(rows), device), not (rows[:, :2] % QUAD).any())
    return known[place]


_MARKED: WeakKeyDictionary[Pieces, dict[tuple[torch.device, int], Tiles]] = WeakKeyDictionary()


def marked_tiles(pieces: Pieces, slots: Sequence[int], device: torch.device) -> Tiles:
    """Tiles of all pieces, with the number of the parameter to which each belongs.

    Rows are (start in the plane, start in the bucket, elements, number of the parameter, first tile of the
    piece, tiles of the piece). `slots` are the numbers of the pieces' parameters, always the same for these
    pieces.
    """
    known, place = _MARKED.setdefault(pieces, {}), (device, stream_of(device))
    if place not in known:
        numbers, begins = cut(pieces.table[:, 2], TILE)
        each = np.bincount(numbers, minlength=len(pieces))
        rows = np.empty((len(numbers), 6), np.int64)
        rows[:, :2] = pieces.table[numbers, :2] + begins[:, None]
        rows[:, 2] = np.minimum(pieces.table[numbers, 2] - begins, TILE)
        rows[:, 3] = np.array(slots, np.int64)[numbers]
        rows[:, 4] = (np.cumsum(each) - each)[numbers]
        rows[:, 5] = each[numbers]
        known[place] = Tiles(sent_to(torch.from_numpy(rows), device), not (rows[:, :2] % QUAD).any())
    return known[place]


@kept_by_stream(maxsize=64)
def pointer_tiles(buffers: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """Tiles of memory that is given as (address, bytes): rows (address, 16-bit words)."""
    words = np.array([size // 2 for _address, size in buffers], np.int64)
    numbers, begins = cut(words, TILE)
    addresses = np.array([address for address, _size in buffers], np.int64)
    rows = np.stack([addresses[numbers] + 2 * begins, np.minimum(words[numbers] - begins, TILE)], axis=1)
    return sent_to(torch.from_numpy(np.ascontiguousarray(rows)), device)


@kept_by_stream(maxsize=1024)
def coded_tiles(
    sizes: tuple[int, ...], block: int, bits: int, count: int, tile: int | None, device: torch.device
) -> Tiles:
    """Tiles of coded blocks: rows (first element, first block, first byte, elements). None lies in two parts.

    Args:
        sizes: elements of each part.
        block: elements of a block or less; the codes of each block begin a new byte.
        bits: bits of a code.
        count: blocks of a tile.
        tile: `None`, or the most elements of a tile, if blocks (`count` 1) are cut further.
        device: device of the table.
    """
    return _coded(_coded_rows(sizes, block, bits, count, tile), device)


def _coded(rows: NDArray[np.int64], device: torch.device) -> Tiles:
    elements, places = (not (rows[:, column] % QUAD).any() for column in (0, 2))
    return Tiles(sent_to(torch.from_numpy(rows), device), elements, places)


def _coded_rows(
    sizes: tuple[int, ...], block: int, bits: int, count: int, tile: int | None
) -> NDArray[np.int64]:
    parts = np.array(sizes, np.int64)
    group = count * block
    numbers, begins = cut(parts, group)
    # Of one part: elements, blocks, bytes.
    per_block = packed_bytes(block, bits)
    tails = -(-(parts % block) * bits // 8)
    each = np.stack([parts, -(-parts // block), parts // block * per_block + tails])
    firsts = (np.cumsum(each, axis=1) - each)[:, numbers]
    left = np.minimum(parts[numbers] - begins, group)
    groups, offsets = cut(left, group if tile is None else tile)
    rows = np.empty((len(groups), 4), np.int64)
    rows[:, 0] = (firsts[0] + begins)[groups] + offsets
    rows[:, 1] = (firsts[1] + begins // block)[groups]
    rows[:, 2] = (firsts[2] + begins // block * per_block)[groups] + offsets * bits // 8
    rows[:, 3] = left[groups] - offsets if tile is None else np.minimum(left[groups] - offsets, tile)
    return rows


def shard_tiles(table: ShardedBlocks, shard: int, count: int, device: torch.device) -> Tiles:
    """Tiles of `count` blocks of one shard: rows (first element, first scale, first byte, elements, padding).

    Elements count from the start of the shard, scales and bytes from the start of its row. Padding is the
    number of zero bytes after the codes, in the last tile of the row.
    """
    return _kept(table, device, lambda: _shard_rows(table, shard, count), shard, count)


def sharded_tiles(table: ShardedBlocks, count: int, device: torch.device) -> Tiles:
    """Tiles of all shards, as of `shard_tiles`. Elements, scales and bytes count from the start of the first
    shard and row.
    """
    return _kept(table, device, lambda: _sharded_rows(table, count), None, count)


def _sharded_rows(table: ShardedBlocks, count: int) -> NDArray[np.int64]:
    found, words = [], table.row_bytes // SCALE_BYTES
    for number, (start, _shard) in enumerate(table.starts()):
        rows = _shard_rows(table, number, count)
        rows[:, :3] += start, number * words, number * table.row_bytes
        found.append(rows)
    return np.concatenate(found)


def _kept(
    table: ShardedBlocks, device: torch.device, make: Callable[[], NDArray[np.int64]], *key: int | None
) -> Tiles:
    """Make a table once per layout, device, stream and `key`: see `kept_by_stream`."""
    place = (device, stream_of(device), *key)
    if place not in table.kept:
        table.kept[place] = _coded(make(), device)
    found: Tiles = table.kept[place]
    return found


def landing_tiles(
    table: ShardedBlocks, count: int, places: tuple[tuple[int, int, int], ...], device: torch.device
) -> tuple[Tiles, Tensor, bool]:
    """Tiles of all shards, and the place in memory that each one is decoded to.

    Args:
        table: the shards.
        count: blocks of a tile.
        places: stretches of memory, one after the other: (address, elements, bytes per element) of each. Each
            holds whole parts of shards.
        device: device of the tables.

    Returns (the result of `sharded_tiles`, targets (tiles,) int64, aligned). A target is the number of
    elements from the first stretch to the place. `aligned` means that all targets are multiples of four. The
    last result per device and stream is kept.
    """
    key = device, stream_of(device), count, "landing"
    known = table.kept.get(key)
    if known is None or known[0] != places:
        tiles = sharded_tiles(table, count, device)
        starts = _sharded_rows(table, count)[:, 0]
        addresses, numels, sizes = np.array(places, np.int64).T
        firsts = np.cumsum(numels) - numels
        number = np.maximum(np.searchsorted(firsts, starts, side="right") - 1, 0)
        targets = (addresses[number] - addresses[0]) // sizes[0] + starts - firsts[number]
        aligned = not (targets % QUAD).any()
        landing = tiles, sent_to(torch.from_numpy(targets), device), aligned
        known = table.kept[key] = places, landing
    found: tuple[Tiles, Tensor, bool] = known[1]
    return found


def run_tiles(coded: CodedPieces, count: int, device: torch.device) -> Tiles:
    """Tiles of `count` blocks of the runs of `coded`, piece by piece. None lies in two runs.

    The columns of a row are: first element in the plane, first scale, first byte, elements, bytes of padding,
    first element in the bucket, number of the parameter, first tile of its piece, tiles of its piece. Padding
    has rows of its own, without elements.
    """
    place = (device, stream_of(device), count)
    if place not in coded.kept:
        rows = _run_rows(coded, count)
        aligned = not (rows[:, [0, 5]] % QUAD).any()
        tiles = Tiles(sent_to(torch.from_numpy(rows), device), aligned, not (rows[:, 2] % QUAD).any())
        coded.kept[place] = tiles
    found: Tiles = coded.kept[place]
    return found


def _run_rows(coded: CodedPieces, count: int) -> NDArray[np.int64]:
    runs, bits = coded.runs, 4 if coded.kind == "int4" else 8
    numbers, begins = cut(runs[:, 2], count * coded.block)
    rows = np.zeros((len(numbers) + len(coded.zeros), 9), np.int64)
    tiles = rows[: len(numbers)]
    tiles[:, 0] = runs[numbers, 0] + begins
    tiles[:, 1] = runs[numbers, 4] + begins // coded.block
    tiles[:, 2] = runs[numbers, 5] + begins // coded.block * packed_bytes(coded.block, bits)
    tiles[:, 3] = np.minimum(runs[numbers, 2] - begins, count * coded.block)
    tiles[:, 5] = runs[numbers, 1] + begins
    pieces = runs[numbers, 3]
    each = np.bincount(pieces, minlength=len(coded.slots))
    tiles[:, 6] = coded.slots[pieces]
    tiles[:, 7] = (np.cumsum(each) - each)[pieces]
    tiles[:, 8] = each[pieces]
    rows[len(numbers) :, 2] = coded.zeros[:, 0]
    rows[len(numbers) :, 4] = coded.zeros[:, 1]
    return rows


def _shard_rows(table: ShardedBlocks, shard: int, count: int) -> NDArray[np.int64]:
    blocks = table.shards[shard]
    scales = SCALE_BYTES * blocks.count
    tiles = _coded_rows(blocks.sizes, blocks.block, bits_of(blocks), count, None)
    if not len(tiles):  # what is empty has zeros alone
        tiles = np.zeros((1, 4), np.int64)
    rows = np.zeros((len(tiles), 5), np.int64)
    rows[:, :4] = tiles
    rows[:, 2] += scales
    rows[-1, 4] = table.row_bytes - scales - blocks.code_bytes
    return rows


@kept_by_stream(maxsize=1024)
def block_spans(sizes: tuple[int, ...], block: int, tile: int, device: torch.device) -> Tensor:
    """Spans of blocks that `coded_tiles` cuts into tiles: rows (first tile, tile after the last,
    elements).
    """
    parts = np.array(sizes, np.int64)
    numbers, begins = cut(parts, block)
    elements = np.minimum(parts[numbers] - begins, block)
    tiles = -(-elements // tile)
    stops = np.cumsum(tiles)
    rows = np.stack([stops - tiles, stops, elements], axis=1)
    return sent_to(torch.from_numpy(rows).contiguous(), device)

"""Which elements a program works on: tables on the device, uploaded once for each layout, without a wait.

Parameters have any size, so that where a program's elements lie is looked up, not computed. A row of 32
bytes for `TILE` elements is 0.1 % of what a fold moves.
"""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels.device.launch import TILE
from gradwire.kernels.layouts import packed_bytes
from gradwire.kernels.pieces import Pieces
from gradwire.kernels.uploads import kept_by_stream, sent_to, stream_of

QUAD = 4
"""Elements of float32 that one vector of 16 bytes holds."""


class Tiles(NamedTuple):
    """Rows (programs, 4) int64, and whether all begin at multiples of `QUAD` elements, or bytes of codes."""

    rows: Tensor
    aligned: bool
    bytes_aligned: bool = True


def cut(sizes: NDArray[np.int64], tile: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each tile: the number of its part, and where in the part it begins. An empty part has none."""
    counts = -(-sizes // tile)
    parts = np.repeat(np.arange(len(sizes)), counts)
    firsts = np.cumsum(counts) - counts
    return parts, (np.arange(len(parts)) - firsts[parts]) * tile


_TILES: WeakKeyDictionary[Pieces, dict[tuple[torch.device, int], Tiles]] = WeakKeyDictionary()
"""By device and stream: see `kept_by_stream`."""


def piece_tiles(pieces: Pieces, device: torch.device) -> Tiles:
    """Rows (start in the plane, start in the bucket, elements, number of the piece)."""
    known, place = _TILES.setdefault(pieces, {}), (device, stream_of(device))
    if place not in known:
        numbers, begins = cut(pieces.table[:, 2], TILE)
        rows = np.empty((len(numbers), 4), np.int64)
        rows[:, :2] = pieces.table[numbers, :2] + begins[:, None]
        rows[:, 2] = np.minimum(pieces.table[numbers, 2] - begins, TILE)
        rows[:, 3] = numbers
        known[place] = Tiles(sent_to(torch.from_numpy(rows), device), not (rows[:, :2] % QUAD).any())
    return known[place]


@kept_by_stream(maxsize=64)
def pointer_tiles(buffers: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """Rows (address, 16-bit words) of memory given as (address, bytes)."""
    words = np.array([size // 2 for _address, size in buffers], np.int64)
    numbers, begins = cut(words, TILE)
    addresses = np.array([address for address, _size in buffers], np.int64)
    rows = np.stack([addresses[numbers] + 2 * begins, np.minimum(words[numbers] - begins, TILE)], axis=1)
    return sent_to(torch.from_numpy(np.ascontiguousarray(rows)), device)


@kept_by_stream(maxsize=1024)
def coded_tiles(
    sizes: tuple[int, ...], block: int, bits: int, count: int, tile: int | None, device: torch.device
) -> Tiles:
    """Rows (first element, first block, first byte, elements) of tiles, none of which lies in two parts.

    Parts of `sizes` elements are cut into blocks of `block` elements or less. Codes of `bits` bits begin a
    byte with every block. A tile has `count` blocks, or without them `tile` elements of one block.
    """
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
    elements, places = (not (rows[:, column] % QUAD).any() for column in (0, 2))
    return Tiles(sent_to(torch.from_numpy(rows), device), elements, places)


@kept_by_stream(maxsize=1024)
def block_spans(sizes: tuple[int, ...], block: int, tile: int, device: torch.device) -> Tensor:
    """Rows (first tile, the tile after its last, elements) of blocks that `coded_tiles` cuts into tiles."""
    parts = np.array(sizes, np.int64)
    numbers, begins = cut(parts, block)
    elements = np.minimum(parts[numbers] - begins, block)
    tiles = -(-elements // tile)
    stops = np.cumsum(tiles)
    rows = np.stack([stops - tiles, stops, elements], axis=1)
    return sent_to(torch.from_numpy(rows).contiguous(), device)

"""Which elements a program works on: tables on the device, uploaded once for each layout.

Parameters have any size, so that where a program's elements lie is looked up, not computed. A row of 32
bytes for `TILE` elements is 0.1 % of what a fold moves.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels.device.launch import TILE
from gradwire.kernels.layouts import Blocks, ScaledBlocks
from gradwire.kernels.pieces import Pieces

QUAD = 4
"""Elements of float32 that one vector of 16 bytes holds."""


class Tiles(NamedTuple):
    """Rows (programs, 4) int64, and whether all of them begin at multiples of `QUAD` elements."""

    rows: Tensor
    aligned: bool


def cut(sizes: NDArray[np.int64], tile: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each tile: the number of its part, and where in the part it begins. An empty part has none."""
    counts = -(-sizes // tile)
    parts = np.repeat(np.arange(len(sizes)), counts)
    firsts = np.cumsum(counts) - counts
    return parts, (np.arange(len(parts)) - firsts[parts]) * tile


_TILES: WeakKeyDictionary[Pieces, dict[torch.device, Tiles]] = WeakKeyDictionary()


def piece_tiles(pieces: Pieces, device: torch.device) -> Tiles:
    """Rows (start in the plane, start in the bucket, elements, number of the piece)."""
    known = _TILES.setdefault(pieces, {})
    if device not in known:
        numbers, begins = cut(pieces.table[:, 2], TILE)
        rows = np.empty((len(numbers), 4), np.int64)
        rows[:, :2] = pieces.table[numbers, :2] + begins[:, None]
        rows[:, 2] = np.minimum(pieces.table[numbers, 2] - begins, TILE)
        rows[:, 3] = numbers
        known[device] = Tiles(torch.from_numpy(rows).to(device), not (rows[:, :2] % QUAD).any())
    return known[device]


@lru_cache(maxsize=64)
def pointer_tiles(buffers: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """Rows (address, 16-bit words) of memory given as (address, bytes)."""
    words = np.array([size // 2 for _address, size in buffers], np.int64)
    numbers, begins = cut(words, TILE)
    addresses = np.array([address for address, _size in buffers], np.int64)
    rows = np.stack([addresses[numbers] + 2 * begins, np.minimum(words[numbers] - begins, TILE)], axis=1)
    return torch.from_numpy(np.ascontiguousarray(rows)).to(device)


@lru_cache(maxsize=1024)
def scaled_tiles(blocks: ScaledBlocks, count: int, device: torch.device) -> Tiles:
    """Rows (first element, first block, first byte, elements) of tiles of `count` blocks or fewer."""
    sizes, block = blocks.array, blocks.block
    numbers, begins = cut(sizes, count * block)
    per_block = -(-block // 2) if blocks.kind == "int4" else block
    tails = -(-(sizes % block) // 2) if blocks.kind == "int4" else sizes % block
    before = np.stack([sizes, -(-sizes // block), sizes // block * per_block + tails])
    firsts = np.cumsum(before, axis=1) - before
    rows = np.empty((len(numbers), 4), np.int64)
    rows[:, 0] = firsts[0, numbers] + begins
    rows[:, 1] = firsts[1, numbers] + begins // block
    rows[:, 2] = firsts[2, numbers] + begins // block * per_block
    rows[:, 3] = np.minimum(sizes[numbers] - begins, count * block)
    return Tiles(torch.from_numpy(rows).to(device), not (rows[:, [0, 2]] % QUAD).any())


def _bit_blocks(blocks: Blocks) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Of each block: its first element, its first byte, and its elements."""
    sizes = np.diff(blocks.bounds)
    numbers, begins = cut(sizes, blocks.step)
    part_bytes = -(-sizes // 8)
    byte = (np.cumsum(part_bytes) - part_bytes)[numbers] + begins // 8
    return blocks.bounds[numbers] + begins, byte, np.minimum(sizes[numbers] - begins, blocks.step)


@lru_cache(maxsize=1024)
def bit_tiles(blocks: Blocks, device: torch.device) -> Tiles:
    """Rows (first element, block, first byte, elements) of tiles, none of which lies in two blocks."""
    first, byte, sizes = _bit_blocks(blocks)
    numbers, begins = cut(sizes, TILE)
    left = np.minimum(sizes[numbers] - begins, TILE)
    rows = np.stack([first[numbers] + begins, numbers, byte[numbers] + begins // 8, left], axis=1)
    aligned = not (rows[:, 0] % QUAD).any()
    return Tiles(torch.from_numpy(np.ascontiguousarray(rows)).to(device), aligned)


@lru_cache(maxsize=1024)
def bit_spans(blocks: Blocks, device: torch.device) -> Tensor:
    """Rows (first tile, the tile after its last, elements) of blocks."""
    _first, _byte, sizes = _bit_blocks(blocks)
    stops = np.cumsum(-(-sizes // TILE))
    rows = np.stack([stops - -(-sizes // TILE), stops, sizes], axis=1)
    return torch.from_numpy(np.ascontiguousarray(rows)).to(device)

"""One bit per element and one or two levels per block: a pass that sums, and one that packs and subtracts.

Sums are float64, in the order of tiles, which is not the CPU's: of positive numbers, so that a level can
differ from its own by one unit in the last place of float32, if it lies that close to the middle of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.device.bodies import signs as bodies
from gradwire.kernels.device.launch import TILE, is_taken, launch
from gradwire.kernels.device.tables import Tiles, block_spans, coded_tiles
from gradwire.kernels.dispatch import DECLINED, Declined
from gradwire.kernels.layouts import Blocks

_STEP = 512
"""Sums of tiles that are added side by side."""


def _tiles(blocks: Blocks, device: torch.device) -> Tiles:
    return coded_tiles(blocks.sizes, blocks.step, 1, 1, TILE, device)


def pack_signs(
    x: Tensor, blocks: Blocks, levels: Tensor, packed: Tensor, *, leave: bool = False
) -> Declined | None:
    """12 bytes an element, 8 without `leave`; the second read is from the cache if the unit is small."""
    if not is_taken(x, levels):
        return DECLINED
    tiles, two = _tiles(blocks, x.device), levels.shape[1] == 2
    programs = len(tiles.rows)
    sums = torch.empty(3 * programs, dtype=torch.float64, device=x.device)
    launch(bodies.sum_sides, programs, x, tiles.rows, sums, ALIGNED=tiles.aligned, TILE=TILE)
    spans = block_spans(blocks.sizes, blocks.step, TILE, x.device)
    constants = {"LEVELS": levels.shape[1], "STEP": _STEP, "num_warps": 4}
    launch(bodies.set_levels, levels.numel(), sums, spans, levels, **constants)
    launch(
        bodies.pack_signs, programs, x, tiles.rows, levels, packed,
        TWO=two, LEAVE=leave, ALIGNED=tiles.aligned, TILE=TILE,
    )  # fmt: skip
    return None


def feedback_signs(
    memory: Tensor, grad: Tensor, blocks: Blocks, levels: Tensor, packed: Tensor
) -> Declined | None:
    """The sum first, in a pass of its own: under DDP it is a fold, long before."""
    if not is_taken(memory, grad, levels):
        return DECLINED
    memory.add_(grad)
    return pack_signs(memory, blocks, levels, packed, leave=True)


def add_signs(
    levels: Tensor, packed: Tensor, blocks: Blocks, out: Tensor, weight: float = 1.0
) -> Declined | None:
    """8 bytes an element, and its bit."""
    if not is_taken(out, levels):
        return DECLINED
    tiles = _tiles(blocks, out.device)
    launch(
        bodies.add_signs, len(tiles.rows), levels, packed, tiles.rows, out, weight,
        TWO=levels.shape[1] == 2, ALIGNED=tiles.aligned, TILE=TILE,
    )  # fmt: skip
    return None

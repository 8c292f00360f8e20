"""Changes of 16-bit floats as fields of fixed widths, decoded in one launch: a program per tile."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.device.launch import is_taken, launch
from gradwire.kernels.payload import Sound
from gradwire.kernels.ulps import TILE, Halves


def add_widths(words: Tensor, old: Tensor, halves: Halves, table: Tensor) -> Sound:
    """Twin of `gradwire.kernels.ulps.add_widths`. Memory traffic: 4 bytes per element, and the code."""
    is_aligned = is_taken(words, old, table, dtypes=(torch.int32, torch.int16, torch.uint8))
    tiles = -(-old.numel() // TILE)
    if not is_aligned or not tiles or words.numel() < 2 * tiles:
        return NotImplemented
    wrong = torch.zeros(1, dtype=torch.int32, device=old.device)
    launch(
        _add_widths, tiles, words, words.numel(), old, old.numel(), halves.base, table, wrong,
        MANTISSA=halves.mantissa, TILE=TILE, ITEMS=256,
    )  # fmt: skip
    return wrong[0] == 0


@triton.jit
def _changed(bits, change):
    """New bits int32 of the 16 `bits`, which come with their sign."""
    ascending = bits ^ ((bits >> 31) & 0x7FFF)
    new = ((ascending + ((change >> 1) ^ -(change & 1))) << 16) >> 16
    return new ^ ((new >> 31) & 0x7FFF)


@triton.jit
def _unsigned(words, mask):
    """Words as int64 without a sign; 0 where `mask` is False."""
    return tl.load(words, mask, other=0).to(tl.int64) & 0xFFFFFFFF


@triton.jit(do_not_specialize=["size", "numel", "base"])
def _add_widths(
    words,
    size,
    old,
    numel,
    base,
    table,
    wrong,
    MANTISSA: tl.constexpr,
    TILE: tl.constexpr,
    ITEMS: tl.constexpr,
):
    """Add the changes of a tile: those in its fields, and then those in its list. Sets `wrong` if they do not
    fit.
    """
    tile, tiles, place = tl.program_id(0), tl.num_programs(0), tl.arange(0, TILE)
    here = tile.to(tl.int64) * TILE
    mask = place < numel - here
    bits = tl.load(old + here + place, mask, other=0).to(tl.int32)
    exponent = (bits >> MANTISSA) & ((1 << (15 - MANTISSA)) - 1)
    kind = tl.minimum(tl.maximum(base - exponent, 0), 15)
    width = tl.load(table + kind, mask, other=0).to(tl.int32)
    start = tl.cumsum(width) - width
    # The directory may be damaged: nothing outside of the words is read.
    fields = tl.load(words + 2 * tile - 2, tile > 0, other=0).to(tl.int64)
    item = tl.load(words + 2 * tile - 1, tile > 0, other=0).to(tl.int64)
    end, last = tl.load(words + 2 * tile).to(tl.int64), tl.load(words + 2 * tile + 1).to(tl.int64)
    lists = 2 * tiles + tl.load(words + 2 * tiles - 2).to(tl.int64)
    whole = lists + tl.load(words + 2 * tiles - 1).to(tl.int64)
    is_wrong = (
        (end - fields != (tl.sum(width) + 31) // 32) | (item > last) | (item < 0) | (lists + last > size)
    )
    is_wrong = is_wrong | (fields < 0) | (whole + whole % 2 != size) | (lists < 2 * tiles)
    at = 2 * tiles + fields + (start >> 5)
    is_there = mask & (width > 0) & (is_wrong == 0)
    low = _unsigned(words + at, is_there & (at < size))
    high = _unsigned(words + at + 1, is_there & (at + 1 < size))
    change = ((low | (high << 32)) >> (start & 31)).to(tl.int32) & ((1 << width) - 1)
    tl.store(old + here + place, _changed(bits, change).to(tl.int16), mask)
    tl.debug_barrier()  # the list's numbers are read again
    last = tl.where(is_wrong, item, last)
    beyond, items = tl.zeros((), tl.int32), tl.arange(0, ITEMS)
    while item < last:
        is_listed = items < last - item
        listed = _unsigned(words + lists + item + items, is_listed)
        slot = listed & 0xFFFF
        is_inside = is_listed & (slot < TILE) & (slot < numel - here)
        value = tl.load(old + here + slot, is_inside, other=0).to(tl.int32)
        new = _changed(value, (listed >> 16).to(tl.int32)).to(tl.int16)
        tl.store(old + here + slot, new, is_inside)
        beyond += tl.sum((is_listed & (is_inside == 0)).to(tl.int32))
        item += ITEMS
    if is_wrong | (beyond > 0):
        tl.store(wrong, 1)

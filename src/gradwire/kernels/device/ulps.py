"""Changes of 16-bit floats: counted, and as fields of fixed widths coded and decoded. A program per tile."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.device.launch import is_taken, launch
from gradwire.kernels.payload import Sound
from gradwire.kernels.ulps import SYMBOLS, TILE, Halves

_NUMBERS = (torch.int32, torch.int16, torch.uint8)


def tally_changes(new: Tensor, old: Tensor, mantissa: int) -> Tensor:
    """Twin of `gradwire.kernels.ulps.tally_changes`. Memory traffic: 4 bytes per element."""
    if not is_taken(new, old, dtypes=_NUMBERS):
        return NotImplemented
    table = torch.zeros(256, SYMBOLS, dtype=torch.int64, device=old.device)
    launch(
        _tally, -(-old.numel() // TILE), new, old, old.numel(), table,
        MANTISSA=mantissa, SYMBOLS=SYMBOLS, TILE=TILE,
    )  # fmt: skip
    return table


def pack_widths(new: Tensor, old: Tensor, halves: Halves, table: Tensor) -> Tensor:
    """Twin of `gradwire.kernels.ulps.pack_widths`, in two launches. Between them the host reads how long the
    code is. Memory traffic: 8 bytes per element, and the code.
    """
    tiles = -(-old.numel() // TILE)
    if not is_taken(new, old, table, dtypes=_NUMBERS) or not tiles:
        return NotImplemented
    sizes = torch.zeros(2, tiles, dtype=torch.int32, device=old.device)
    given = new, old, old.numel(), halves.base, table
    launch(_measure_widths, tiles, *given, sizes, MANTISSA=halves.mantissa, TILE=TILE)
    ends = sizes.cumsum(1, dtype=torch.int32)
    fields, listed = ends[:, -1].tolist()
    count = 2 * tiles + fields + listed
    words = torch.zeros(count + count % 2, dtype=torch.int32, device=old.device)
    words[: 2 * tiles].view(tiles, 2).copy_(ends.T)
    launch(
        _pack_widths, tiles, *given, words, 2 * tiles, 2 * tiles + fields,
        MANTISSA=halves.mantissa, TILE=TILE,
    )  # fmt: skip
    return words


def add_widths(words: Tensor, old: Tensor, halves: Halves, table: Tensor) -> Sound:
    """Twin of `gradwire.kernels.ulps.add_widths`. Memory traffic: 4 bytes per element, and the code."""
    is_aligned = is_taken(words, old, table, dtypes=_NUMBERS)
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
def _change(new, old):
    """Changes int32, 0 to 65535, from the 16 bits `old` to `new`, which come with their sign."""
    step = (new ^ ((new >> 31) & 0x7FFF)) - (old ^ ((old >> 31) & 0x7FFF))
    step = (step << 16) >> 16
    return ((step << 1) ^ (step >> 31)) & 0xFFFF


@triton.jit
def _exponent(bits, MANTISSA: tl.constexpr):
    return (bits >> MANTISSA) & ((1 << (15 - MANTISSA)) - 1)


@triton.jit(do_not_specialize=["numel"])
def _tally(
    new, old, numel, table, MANTISSA: tl.constexpr, SYMBOLS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Add the symbols of a tile's changes to `table` (256, SYMBOLS)."""
    here, place = tl.program_id(0).to(tl.int64) * TILE, tl.arange(0, TILE)
    mask = place < numel - here
    bits = tl.load(old + here + place, mask, other=0).to(tl.int32)
    change = _change(tl.load(new + here + place, mask, other=0).to(tl.int32), bits)
    exponent = _exponent(bits, MANTISSA)
    # Most numbers stay as they are, and many have one exponent: all programs would wait for a few counts.
    still = tl.histogram(exponent, 256, mask & (change == 0))
    tl.atomic_add(table + tl.arange(0, 256) * SYMBOLS, still.to(tl.int64), still > 0)
    count = tl.zeros((TILE,), tl.int32)
    for bit in tl.static_range(16):
        count += (change >> bit > 0).to(tl.int32)
    symbol = tl.where(change < 4, change, 4 * (count - 2) + ((change >> tl.maximum(count - 3, 0)) & 3))
    one = tl.full((TILE,), 1, tl.int64)
    tl.atomic_add(table + exponent * SYMBOLS + symbol, one, mask & (change > 0))


@triton.jit
def _fields(new, old, here, numel, base, table, MANTISSA: tl.constexpr, TILE: tl.constexpr):
    """Changes of a tile, the widths of their fields, and which do not fit into them."""
    place = tl.arange(0, TILE)
    mask = place < numel - here
    bits = tl.load(old + here + place, mask, other=0).to(tl.int32)
    change = _change(tl.load(new + here + place, mask, other=0).to(tl.int32), bits)
    width = _width(bits, mask, base, table, MANTISSA)
    return change, width, mask & (change >> width > 0)


@triton.jit
def _width(bits, mask, base, table, MANTISSA: tl.constexpr):
    kind = tl.minimum(tl.maximum(base - _exponent(bits, MANTISSA), 0), 15)
    return tl.load(table + kind, mask, other=0).to(tl.int32)


@triton.jit(do_not_specialize=["numel", "base"])
def _measure_widths(
    new, old, numel, base, table, sizes, MANTISSA: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Write a tile's words of fields, and its listed changes, to `sizes` (2, tiles)."""
    tile = tl.program_id(0)
    here = tile.to(tl.int64) * TILE
    _changes, width, is_listed = _fields(new, old, here, numel, base, table, MANTISSA, TILE)
    tl.store(sizes + tile, (tl.sum(width) + 31) // 32)
    tl.store(sizes + tl.num_programs(0) + tile, tl.sum(is_listed.to(tl.int32)))


@triton.jit(do_not_specialize=["numel", "base", "first", "lists"])
def _pack_widths(
    new, old, numel, base, table, words, first, lists, MANTISSA: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Write a tile's fields, which begin behind word `first`, and its listed changes, behind `lists`."""
    tile, place = tl.program_id(0), tl.arange(0, TILE)
    here = tile.to(tl.int64) * TILE
    change, width, is_listed = _fields(new, old, here, numel, base, table, MANTISSA, TILE)
    fields = tl.load(words + 2 * tile - 2, tile > 0, other=0)
    item = tl.load(words + 2 * tile - 1, tile > 0, other=0)
    start = tl.cumsum(width) - width
    at = words + first + fields + (start >> 5)
    value = change.to(tl.int64) << (start & 31)
    is_sent = (change > 0) & (is_listed == 0) & (place < numel - here)
    tl.atomic_or(at, value.to(tl.int32), is_sent)
    tl.atomic_or(at + 1, (value >> 32).to(tl.int32), is_sent & (value >> 32 > 0))
    number = tl.cumsum(is_listed.to(tl.int32)) - is_listed.to(tl.int32)
    tl.store(words + lists + item + number, place | (change << 16), is_listed)


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
    width = _width(bits, mask, base, table, MANTISSA)
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

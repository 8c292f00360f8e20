"""Payloads of chosen elements, encoded in one launch and decoded in two: places are packed as planes of bits.

The planes are Elias and Fano's, block-coded, as `gradwire.kernels.payload` describes them. The bit at which a
block's place in its group begins depends on all earlier blocks. So when all other programs have packed, the
last one of them packs the blocks. The rank of an index depends on all earlier ones: each program that unpacks
computes it by itself from the words before its own tile, which are a few kilobytes.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.device.common import bfloat16_bits, first_from, is_last, magnitude
from gradwire.kernels.device.launch import bound, counter_of, is_taken, launch
from gradwire.kernels.payload import COUNTS, DECODING, ENCODING, ORDER, PATTERNS, Form, Planes, Shape, Sound
from gradwire.kernels.places import index_type
from gradwire.kernels.uploads import kept_by_stream, sent_to

_FORMS: dict[Form, int] = {"list": 0, "bitmap": 1, "coded": 2}
_LIST, _BITMAP, _CODED = map(tl.constexpr, _FORMS.values())
_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_FLOAT32, _FLOAT16, _BFLOAT16 = map(tl.constexpr, _TYPES.values())
_LIMITS = {dtype: float(torch.finfo(dtype).max) for dtype in _TYPES}
_TILE = 1024
"""Indices per program that packs."""
_BLOCKS = 2048
"""Blocks of ten bits that are packed at a time, by one program: 1 % of 700,000 elements."""
_UNPACKED, _CHUNK = 128, 1024
"""Blocks, or words of a bitmap, per program that unpacks; and how many earlier ones it reads at a time."""
_STRETCH = 4096
"""Elements per program that adds."""


def take_chosen(x: Tensor, indices: Tensor, shape: Shape) -> Tensor:
    """Twin of `gradwire.kernels.chosen.take_chosen`. Take values and pack their indices in one launch."""
    payload = torch.empty(shape.bytes, dtype=torch.uint8, device=x.device)
    patterns = _patterns(x.device, shape.planes) if shape.form == "coded" else None
    return payload if _take(x, indices, shape, payload, patterns) is None else NotImplemented


@bound
def _take(x: Tensor, indices: Tensor, shape: Shape, payload: Tensor, patterns: Tensor | None) -> None:
    """As `take_chosen`, into `payload`."""
    if not is_taken(x) or not _packs(indices, shape.planes) or not shape.is_narrow:
        return NotImplemented
    values = payload[shape.start :].view(torch.float32 if shape.dtype is torch.float32 else torch.int16)
    words = payload[: shape.start].view(torch.int32)
    taken = x, values, _LIMITS[shape.dtype], _TYPES[shape.dtype]
    _pack(words, indices, shape.form, shape.planes, words if patterns is None else patterns, taken)
    return None


def add_chosen(payload: Tensor, shape: Shape, out: Tensor, weight: float = 1.0) -> Sound:
    """Twin of `gradwire.kernels.chosen.add_chosen`. Unpack the indices in one launch, and add the values in
    another.
    """
    room = _room(payload.device, 1, shape.form, shape.planes)
    added = _add_rows(payload.view(1, -1), shape, out, weight, None, *room, False)
    return room.sound[0] if added is None else NotImplemented


def average_chosen(
    payloads: Tensor, shape: Shape, out: Tensor, weight: float, mark: Tensor | None = None
) -> Tensor | Literal[True]:
    """Twin of `gradwire.kernels.chosen.average_chosen`. Unpack the indices of all payloads in one launch; a
    second one clears `out` and adds the values, in order.
    """
    room = _room(payloads.device, payloads.shape[0], shape.form, shape.planes)
    if _add_rows(payloads, shape, out, weight, mark, *room, True) is NotImplemented:
        return NotImplemented
    return room.sound[-1] if mark is None else True


def pack_elias_fano(indices: Tensor, planes: Planes) -> Tensor:
    """Twin of `gradwire.kernels.chosen.pack_elias_fano`. Pack in one launch."""
    words = torch.empty(planes.words, dtype=torch.int32, device=indices.device)
    packed = _pack_planes(indices, planes, words, _patterns(indices.device, planes))
    return words if packed is None else NotImplemented


@bound
def _pack_planes(indices: Tensor, planes: Planes, words: Tensor, patterns: Tensor) -> None:
    """As `pack_elias_fano`, into `words`."""
    if not _packs(indices, planes):
        return NotImplemented
    _pack(words, indices, "coded", planes, patterns, None)
    return None


def unpack_elias_fano(packed: Tensor, planes: Planes, mark: Tensor | None = None) -> tuple[Tensor, Sound]:
    """Twin of `gradwire.kernels.chosen.unpack_elias_fano`. Unpack in one launch."""
    room = _room(packed.device, 1, "coded", planes)
    if _unpack_planes(packed, planes, mark, *room) is NotImplemented:
        return NotImplemented
    return room.indices[0], room.sound[-1] if mark is None else True


@bound
def _unpack_planes(
    packed: Tensor, planes: Planes, mark: Tensor | None, indices: Tensor, faults: Tensor, sound: Tensor
) -> None:
    """As `unpack_elias_fano`, into `indices` and `sound`."""
    if not packed.is_contiguous() or planes.numel > 2**31:
        return NotImplemented
    _unpack(packed, 0, "coded", planes, mark, _Room(indices, faults, sound), replaces=True)
    return None


def _packs(indices: Tensor, planes: Planes) -> bool:
    return indices.is_contiguous() and indices.dtype in (torch.int32, torch.int64) and planes.numel <= 2**31


def _patterns(device: torch.device, planes: Planes) -> Tensor:
    """Scratch memory of a launch that packs the coded form."""
    return torch.empty(planes.blocks, dtype=torch.int32, device=device)


def _pack(
    words: Tensor,
    indices: Tensor,
    form: Form,
    planes: Planes,
    patterns: Tensor,
    taken: tuple[Tensor, Tensor, float, int] | None,
) -> None:
    """Pack `indices` in the given `form` into all of `words`, padding included, in one launch.

    Args:
        words: int32, written.
        indices: int32 or int64 (count,), ascending.
        form: "list", "bitmap" or "coded".
        planes: sizes of the planes of the list and the code.
        patterns: scratch memory of the coded form.
        taken: `None`, or (x, values, limit, kind): values of x at the indices are written to `values` with
            their padding, and x keeps the rounding errors.
    """
    x, values, limit, kind = (words, words, 0.0, 0) if taken is None else taken
    cells = {"list": 0, "bitmap": -(-planes.numel // 32), "coded": planes.blocks}[form]
    filled = {"list": planes.count, "bitmap": cells, "coded": planes.words}[form]
    _low, groups, places = planes.starts
    encoding, _decoding, _order = _tables(words.device)
    launch(
        _pack_places, max(-(-planes.count // _TILE), min(cells, 1)), indices, planes.count, planes.numel,
        planes.low_bits, words, groups, places, filled, words.numel(), patterns, cells, encoding, x, values,
        values.numel(), limit, counter_of(words.device),
        FORM=_FORMS[form], TAKES=taken is not None, KIND=kind, TILE=_TILE, BLOCKS=_BLOCKS,
    )  # fmt: skip


class _Room(NamedTuple):
    """Memory for what is unpacked from payloads.

    - `indices` (payloads, count): places of each.
    - `faults` (payloads, tiles): scratch memory.
    - `sound` (payloads + 1,) bool: whether each payload is a valid choice, and whether the words of all
      others are zeros.
    """

    indices: Tensor
    faults: Tensor
    sound: Tensor


def _room(device: torch.device, rows: int, form: Form, planes: Planes) -> _Room:
    """Memory for `rows` payloads."""
    tiles = max(1, -(-_blocks(form, planes) // _UNPACKED))
    return _Room(
        torch.empty(rows, planes.count, dtype=index_type(planes.numel), device=device),
        torch.empty(rows, tiles, dtype=torch.int32, device=device),
        torch.empty(rows + 1, dtype=torch.bool, device=device),
    )


def _blocks(form: Form, planes: Planes) -> int:
    """Blocks of the coded form, words of a bitmap, or 32 numbers of a list each."""
    return {"list": -(-planes.count // 32), "bitmap": -(-planes.numel // 32), "coded": planes.blocks}[form]


def _unpack(
    packed: Tensor,
    stride: int,
    form: Form,
    planes: Planes,
    mark: Tensor | None,
    room: _Room,
    *,
    replaces: bool,
) -> None:
    """Unpack the places of payloads, whose words begin every `stride` words, into `room`.

    `mark` becomes 1 if the words of one that is no valid choice are not all zeros. With `replaces`, such
    payloads get the places 0 … count - 1.
    """
    (rows, tiles), blocks = room.faults.shape, _blocks(form, planes)
    _encoding, decoding, order = _tables(packed.device)
    _low, groups, places = planes.starts
    words = {"list": planes.count, "bitmap": -(-planes.numel // 32), "coded": planes.words}[form]
    launch(
        _unpack_places, rows * tiles, packed, stride, tiles, blocks, planes.count, planes.numel,
        planes.low_bits, groups, places, words, decoding, order, room.indices, room.faults,
        room.sound.view(torch.uint8), counter_of(packed.device), room.faults if mark is None else mark,
        FORM=_FORMS[form], REPLACES=replaces, MARKS=mark is not None, TILE=_UNPACKED, CHUNK=_CHUNK,
        WIDTH=16 if form == "coded" else 32,
    )  # fmt: skip


@bound
def _add_rows(
    payloads: Tensor, shape: Shape, out: Tensor, weight: float, mark: Tensor | None, indices: Tensor,
    faults: Tensor, sound: Tensor, clears: bool,
) -> None:  # fmt: skip
    """Add weight · values of all valid payloads (rows, bytes) to `out`; with `clears`, overwrite `out`. The
    other arguments are those of `_unpack`.
    """
    rows, planes, numel = len(payloads), shape.planes, out.numel()
    if not (is_taken(out) and payloads.is_contiguous() and shape.is_narrow and 0 < numel < 2**31):
        return NotImplemented
    flat = payloads.view(-1)
    words, stride, room = flat.view(torch.int32), shape.bytes // 4, _Room(indices, faults, sound)
    _unpack(words, stride, shape.form, planes, mark, room, replaces=False)
    kind = _TYPES[shape.dtype]
    size = shape.dtype.itemsize
    values = flat.view(torch.float32 if kind == 0 else torch.int16)
    launch(
        _add_places, -(-numel // _STRETCH), indices, planes.count, sound.view(torch.uint8), values,
        shape.start // size, shape.bytes // size, rows, out, numel, weight,
        KIND=kind, CLEARS=clears, TILE=_STRETCH, SLOTS=512,
    )  # fmt: skip
    return None


@kept_by_stream(maxsize=8)
def _tables(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Tables of the block code, int32: `ENCODING`, `DECODING`, and `ORDER` with each pattern's number of ones
    from bit 10 on.
    """
    order = np.array(ORDER) | COUNTS[:PATTERNS].astype(np.int64) << 10
    encoding, decoding, ordered = (
        sent_to(torch.from_numpy(table.astype(np.int32)), device) for table in (ENCODING, DECODING, order)
    )
    return encoding, decoding, ordered


_LAST = tl.constexpr(PATTERNS - 1)


@triton.jit
def _narrowed(value, limit, KIND: tl.constexpr):
    """Round `value` to the shorter type, saturated at `limit`; Inf and NaN stay.

    Returns (bits in that type, rounded value as float32).
    """
    size = magnitude(value)
    held = tl.where(size < 0x7F800000, tl.maximum(tl.minimum(value, limit), -limit), value)
    if KIND == _FLOAT16:
        half = held.to(tl.float16)
        return half.to(tl.int16, bitcast=True), half.to(tl.float32)
    else:
        rounded = bfloat16_bits(held)
        return rounded.to(tl.int16), (rounded << 16).to(tl.float32, bitcast=True)


@triton.jit
def _widened(bits, KIND: tl.constexpr):
    """Convert bits of the shorter type to float32."""
    if KIND == _FLOAT16:
        return bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _shifted(number, by):
    """Part of `number` (int64, up to 32 bits) that falls into a 32-bit word in which it begins at bit `by`;
    else 0.

    A negative `by` means that it begins in an earlier word.
    """
    left = tl.where((by >= 0) & (by < 32), number << tl.maximum(tl.minimum(by, 31), 0), 0)
    right = tl.where((by < 0) & (by > -32), number >> tl.maximum(tl.minimum(-by, 31), 0), 0)
    return (left | right) & 0xFFFFFFFF


@triton.jit
def _bit_of(indices, rank, count, numel, low_bits, FORM: tl.constexpr):
    """Bit of the bitmap or of the upper row that stands for the index of each rank; and whether there is an
    index, within range.
    """
    index = tl.load(indices + rank, rank < count, other=0).to(tl.int64)
    if FORM == _BITMAP:
        bit = index
    else:
        bit = ((index - rank) >> low_bits) + rank
    return bit, (rank < count) & (index >= 0) & (index < numel)


@triton.jit
def _set_bits(
    row, indices, rank, count, numel, low_bits, first, stop, FORM: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Set the bits of the ranks that lie in cells first … stop - 1 of WIDTH bits."""
    bit, is_there = _bit_of(indices, rank, count, numel, low_bits, FORM)
    cell = bit // WIDTH
    one = tl.full(rank.shape, 1, tl.int32) << (bit - WIDTH * cell).to(tl.int32)
    tl.atomic_or(row + cell, one, is_there & (cell >= first) & (cell < stop), sem="relaxed")


@triton.jit
def _set_cells(
    row, cells, indices, begin, count, numel, low_bits,
    FORM: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the cells of WIDTH bits that begin from the bit of rank `begin` to before that of rank `begin` +
    TILE.

    The first program writes from the first cell on, and the last one up to the last cell. So each cell has
    one program, which clears it first. Its ones may be those of up to WIDTH - 1 ranks of the next program.
    """
    first, stop = tl.zeros((), tl.int64), tl.zeros((), tl.int64) + cells
    if begin > 0:
        bit, _is_there = _bit_of(indices, begin, count, numel, low_bits, FORM)
        first = tl.maximum(tl.minimum((bit + WIDTH - 1) // WIDTH, cells), 0)
    if begin + TILE < count:
        bit, _is_there = _bit_of(indices, begin + TILE, count, numel, low_bits, FORM)
        stop = tl.maximum(tl.minimum((bit + WIDTH - 1) // WIDTH, cells), 0)
    lane, cell = tl.arange(0, TILE), first
    while cell < stop:
        tl.store(row + cell + lane, tl.zeros((TILE,), tl.int32), cell + lane < stop)
        cell += TILE
    # What other threads of this program have cleared is zero.
    tl.debug_barrier()
    _set_bits(row, indices, begin + lane, count, numel, low_bits, first, stop, FORM, WIDTH)
    more = begin + TILE + tl.arange(0, 32)
    _set_bits(row, indices, more, count, numel, low_bits, first, stop, FORM, WIDTH)


@triton.jit
def _pack_blocks(patterns, blocks, encoding, words, groups, places, last, TILE: tl.constexpr):
    """Pack all blocks: groups' numbers of 6 bits, and places in the group, one after the other. For one
    program, after all others have written `patterns`.
    """
    lane, word = tl.arange(0, TILE), tl.zeros((), tl.int32)
    while places + word < last:
        to = places + word + lane
        tl.store(words + to, tl.zeros((TILE,), tl.int32), to < last)
        word += TILE
    # What other threads of this program have cleared is zero.
    tl.debug_barrier()
    start, begin = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    while begin < blocks:
        number = begin + lane
        # Indices that do not ascend may leave a cell that no program has written.
        pattern = tl.load(patterns + number, number < blocks, other=0) & 1023
        code = tl.where(number < blocks, tl.load(encoding + pattern), 0)
        # 16 numbers of 6 bits are 3 words.
        group = tl.reshape((code & 63).to(tl.int64), (TILE // 16, 16))
        place = tl.arange(0, 16)[None, :] * 6
        for part in tl.static_range(3):
            to = groups + (begin // 16 + tl.arange(0, TILE // 16)) * 3 + part
            found = tl.sum(_shifted(group, place - 32 * part), 1)
            tl.store(words + to, found.to(tl.int32), to < places)
        width = (code >> 6) & 7
        at = start + tl.cumsum(width) - width
        bits = ((code >> 9) & 127).to(tl.int64) << (at & 31)
        to = places + (at >> 5)
        low = (bits & 0xFFFFFFFF).to(tl.int32)
        tl.atomic_or(words + to, low, (width > 0) & (to < last), sem="relaxed")
        # Up to 7 bits may reach into the next word.
        more = (bits >> 32).to(tl.int32)
        tl.atomic_or(words + to + 1, more, (more != 0) & (to + 1 < last), sem="relaxed")
        start += tl.sum(width)
        begin += TILE


@triton.jit(
    do_not_specialize=[
        "count", "numel", "low_bits", "groups", "places", "filled", "end", "cells", "values_end"
    ]
)  # fmt: skip
def _pack_places(
    indices, count, numel, low_bits, words, groups, places, filled, end, patterns, cells, encoding, x, values,
    values_end, limit, counter,
    FORM: tl.constexpr, TAKES: tl.constexpr, KIND: tl.constexpr, TILE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Pack a tile of indices: as a list, as bits of a bitmap, or as low bits and ones of the upper row. The
    last program packs the upper row.

    With TAKES, also write the values of x, and leave their rounding errors in x. Indices out of range are
    left out; receivers find the payload invalid. `filled` words of `end` are packed; the rest is padding, as
    are values from number `count` on.
    """
    begin = tl.program_id(0).to(tl.int64) * TILE
    rank = begin + tl.arange(0, TILE)
    index = tl.load(indices + rank, rank < count, other=0).to(tl.int64)
    there = (rank < count) & (index >= 0) & (index < numel)
    if FORM == _LIST:
        tl.store(words + rank, index.to(tl.int32), there)
    elif FORM == _BITMAP:
        _set_cells(words, cells, indices, begin, count, numel, low_bits, FORM, 32, TILE)
    else:
        above = tl.where(there, index - rank, 0)
        low = tl.reshape(above & ((tl.full((TILE,), 1, tl.int64) << low_bits) - 1), (TILE // 32, 32))
        # 32 numbers of b bits are b words.
        place, row = tl.arange(0, 32)[None, :] * low_bits, begin // 32 + tl.arange(0, TILE // 32)
        word = tl.zeros((), tl.int32)
        while word < low_bits:
            found, to = tl.sum(_shifted(low, place - 32 * word), 1), row * low_bits + word
            tl.store(words + to, found.to(tl.int32), to < groups)
            word += 1
        _set_cells(patterns, cells, indices, begin, count, numel, low_bits, FORM, 10, TILE)
    if TAKES:
        value = tl.load(x + index, there, other=0.0)
        if KIND == _FLOAT32:
            sent = value
            tl.store(values + rank, value, there)
        else:
            bits, sent = _narrowed(value, limit, KIND)
            tl.store(values + rank, bits, there)
        tl.store(x + index, value - sent, there)
        if begin == 0:
            # A word and a narrow value at most.
            if filled < end:
                tl.store(words + filled, 0)
            if count < values_end:
                tl.store(values + count, tl.zeros((), values.dtype.element_ty))
    if FORM == _CODED:
        last = is_last(counter)
        if last:
            _pack_blocks(patterns, cells, encoding, words, groups, places, filled, BLOCKS)


@triton.jit
def _window(words, bit, last, mask):
    """Read 32 bits from `bit` on, as int64. Words from number `last` on are not read and count as 0."""
    word = bit >> 5
    low = tl.load(words + word, mask & (word < last), other=0).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(words + word + 1, mask & (word + 1 < last), other=0).to(tl.int64) & 0xFFFFFFFF
    return ((low | (high << 32)) >> (bit & 31)) & 0xFFFFFFFF


@triton.jit
def _entry(words, number, groups, decoding, last, mask):
    """Look up the group of each block.

    Returns the group's first position in the order of patterns in the lowest 11 bits, and above them the bits
    that a place in the group takes.
    """
    group = _window(words, groups * 32 + number.to(tl.int64) * 6, last, mask) & 63
    return tl.where(mask, tl.load(decoding + group), 0)


@triton.jit
def _pattern(words, entry, at, places, order, last, mask):
    """Decode the pattern of each block from its group and its place within the group.

    Args:
        words: the payload, int32.
        entry: the blocks' groups, as `_entry` returns them.
        at: first bit of each block's place, counted from the word `places`.
        order: table of all patterns in the order of places.
        last: number of the first word after the payload.
        mask: which blocks exist.

    Returns (pattern in the lowest 10 bits and its number of ones above, whether the place is out of range).
    """
    width = entry >> 11
    place = _window(words, places * 32 + at.to(tl.int64), last, mask) & ((1 << width) - 1)
    position = (entry & 2047) + place.to(tl.int32)
    return tl.where(mask, tl.load(order + tl.minimum(position, _LAST)), 0), mask & (position > _LAST)


@triton.jit
def _count_ones(word):
    """Number of set bits of each int32."""
    word = word.to(tl.uint32, bitcast=True)
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    word = word + (word >> 8)
    return ((word + (word >> 16)) & 63).to(tl.int32)


@triton.jit
def _ones(pattern, WIDTH: tl.constexpr):
    """Bits of each pattern, (TILE, WIDTH), the lowest first."""
    return (pattern[:, None] >> tl.arange(0, WIDTH)[None, :]) & 1


@triton.jit(
    do_not_specialize=["stride", "tiles", "blocks", "count", "numel", "low_bits", "groups", "places", "last"]
)
def _unpack_places(
    packed, stride, tiles, blocks, count, numel, low_bits, groups, places, last, decoding, order, indices,
    faults, sound, counter, mark, FORM: tl.constexpr, REPLACES: tl.constexpr, MARKS: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Unpack a tile of a payload's blocks, bitmap words or list into indices, and write its fault: bit 0 is
    set if the tile is no valid choice, and bit 1 if any word of its share is not 0.

    The last program combines the faults, and writes `sound` (`_Room`). With MARKS, it sets the mark.
    """
    row, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    words, out = packed + row.to(tl.int64) * stride, indices + row.to(tl.int64) * count
    lane, begin = tl.arange(0, TILE), tile * TILE
    number = begin + lane
    mask = number < blocks
    if FORM == _LIST:
        rank = number[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        index = tl.load(words + rank, rank < count, other=0)
        before = tl.load(words + rank - 1, (rank > 0) & (rank < count), other=-1)
        wrong = (rank < count) & ((index <= before) | (index >= numel) | (index < 0))
        tl.store(out + rank, index, rank < count)
    else:
        # Ones, and bits of places, of all blocks before.
        ones, at, done = tl.zeros((), tl.int32), tl.zeros((), tl.int32), tl.zeros((), tl.int32)
        while done < begin:
            earlier = done + tl.arange(0, CHUNK)
            if FORM == _BITMAP:
                ones += tl.sum(_count_ones(tl.load(words + earlier, earlier < begin, other=0)))
            else:
                entry = _entry(words, earlier, groups, decoding, last, earlier < begin)
                width = entry >> 11
                here = at + tl.cumsum(width) - width
                pattern, none = _pattern(words, entry, here, places, order, last, earlier < begin)
                ones += tl.sum(pattern >> 10)
                at += tl.sum(width)
            done += CHUNK
        if FORM == _BITMAP:
            pattern = tl.load(words + number, mask, other=0)
            bit = _ones(pattern, WIDTH)
            none = number < 0
        else:
            entry = _entry(words, number, groups, decoding, last, mask)
            width = entry >> 11
            here = at + tl.cumsum(width) - width
            pattern, none = _pattern(words, entry, here, places, order, last, mask)
            pattern = pattern & 1023
            bit = _ones(pattern, WIDTH)
            at += tl.sum(width)
            none = none | (at > count)
        inside = tl.cumsum(bit, 1)
        total = tl.sum(bit, 1)
        rank = (ones + tl.cumsum(total) - total)[:, None] + inside - bit
        there = (bit > 0) & (rank < count)
        place = tl.arange(0, WIDTH)[None, :]
        if FORM == _BITMAP:
            index = number.to(tl.int64)[:, None] * 32 + place
            wrong = there & (index >= numel)
        else:
            rank64 = rank.to(tl.int64)
            upper = number.to(tl.int64)[:, None] * 10 + place - rank64
            ones64 = tl.full((TILE, WIDTH), 1, tl.int64)
            low = _window(words, rank64 * low_bits, last, there) & ((ones64 << low_bits) - 1)
            index = (upper << low_bits) + low + rank64
            # The one before has the same upper part if it lies beside this one: then its low bits decide.
            earlier = number - 1
            is_there = mask & (earlier >= 0)
            entry_before = _entry(words, earlier, groups, decoding, last, is_there)
            pattern_before, _none = _pattern(
                words, entry_before, here - (entry_before >> 11), places, order, last, is_there
            )
            joined = (pattern << 1) | ((pattern_before >> 9) & 1)
            beside = there & (((joined[:, None] >> place) & 1) > 0) & (rank > 0)
            low_before = _window(words, (rank64 - 1) * low_bits, last, beside) & ((ones64 << low_bits) - 1)
            wrong = there & ((index >= numel) | (beside & (low_before > low)))
        wrong = wrong | none[:, None]
        tl.store(out + rank, index.to(tl.int32), there)
        wrong = wrong | ((begin + TILE >= blocks) & (ones + tl.sum(total) != count))
    # All tiles together look at all words.
    share = (last + tiles - 1) // tiles
    filled, done = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    while done < share:
        at_word = tile * share + done + tl.arange(0, CHUNK)
        word = tl.load(words + at_word, (done + tl.arange(0, CHUNK) < share) & (at_word < last), other=0)
        filled = tl.maximum(filled, tl.max((word != 0).to(tl.int32)))
        done += CHUNK
    tl.store(faults + tl.program_id(0), tl.max(wrong.to(tl.int32)) + 2 * filled)
    if is_last(counter):
        _conclude(faults, tiles, indices, count, sound, mark, REPLACES, MARKS)


@triton.jit
def _conclude(
    faults, tiles, indices, count, sound, mark, REPLACES: tl.constexpr, MARKS: tl.constexpr
):  # fmt: skip
    """Combine the faults of each payload's tiles into `sound` (`_Room`). For one program, after all others
    have unpacked.
    """
    rows, row, heard = tl.num_programs(0) // tiles, tl.zeros((), tl.int32), tl.full((), 1, tl.int32)
    lane = tl.arange(0, 1024)
    while row < rows:
        wrong, filled, done = tl.zeros((), tl.int32), tl.zeros((), tl.int32), tl.zeros((), tl.int32)
        while done < tiles:
            fault = tl.load(faults + row * tiles + done + lane, done + lane < tiles, other=0)
            wrong, filled = tl.maximum(wrong, tl.max(fault & 1)), tl.maximum(filled, tl.max(fault & 2))
            done += 1024
        tl.store(sound + row, (wrong == 0).to(tl.uint8))
        heard = tl.where((wrong | filled) == 3, 0, heard)
        if REPLACES:
            out, done, stop = indices + row.to(tl.int64) * count, tl.zeros((), tl.int32), wrong * count
            while done < stop:
                tl.store(out + done + lane, done + lane, done + lane < count)
                done += 1024
        row += 1
    tl.store(sound + rows, heard.to(tl.uint8))
    if MARKS & (heard == 0):
        tl.store(mark, 1)


@triton.jit(do_not_specialize=["count", "start", "stride", "rows", "numel"])
def _add_places(
    indices, count, sound, values, start, stride, rows, out, numel, weight,
    KIND: tl.constexpr, CLEARS: tl.constexpr, TILE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Add weight · values of all payloads that are `sound`, one after the other, to a tile of `out`."""
    begin = tl.program_id(0).to(tl.int64) * TILE
    stop = tl.minimum(begin + TILE, numel)
    if CLEARS:
        place = begin + tl.arange(0, TILE)
        tl.store(out + place, tl.zeros((TILE,), tl.float32), place < numel)
    row = tl.zeros((), tl.int64)
    while row < rows:
        if tl.load(sound + row) != 0:
            here = indices + row * count
            rank, last = first_from(here, count, begin), first_from(here, count, stop)
            # What other threads of this program have written before is there.
            tl.debug_barrier()
            while rank < last:
                slot = rank + tl.arange(0, SLOTS)
                index = tl.load(here + slot, slot < last, other=0)
                value = tl.load(values + row * stride + start + slot, slot < last, other=0)
                if KIND != _FLOAT32:
                    value = _widened(value, KIND)
                found = tl.load(out + index, slot < last, other=0.0)
                tl.store(out + index, found + weight * value, slot < last)
                rank += SLOTS
        row += 1

"""Payloads of chosen elements, encoded and decoded in a few launches: places are packed as planes of bits.

The planes are Elias and Fano's, block-coded, as `gradwire.kernels.payload` describes them. The bit at which a
block's place in its group begins depends on all earlier blocks, and the rank of an index on all earlier ones.
Each program computes both by itself from the words before its own tile, which are a few kilobytes.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.device.common import first_from, magnitude
from gradwire.kernels.device.launch import is_taken, launch
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
_BLOCKS = 512
"""Blocks of ten bits per program that packs blocks."""
_UNPACKED, _CHUNK = 128, 1024
"""Blocks, or words of a bitmap, per program that unpacks; and how many earlier ones it reads at a time."""
_STRETCH = 4096
"""Elements per program that adds."""


def take_chosen(x: Tensor, indices: Tensor, shape: Shape) -> Tensor:
    """Take values and pack their indices in one launch; a second one packs the blocks of coded indices."""
    if not is_taken(x) or not _packs(indices, shape.planes) or not shape.is_narrow:
        return NotImplemented
    payload, patterns = _room(shape.bytes, shape.form, shape.planes, x.device)
    words, values = shape.parts(payload)
    taken = x, values, _LIMITS[shape.dtype], _TYPES[shape.dtype]
    _pack(words, patterns, indices, shape.form, shape.planes, taken)
    return payload


def add_chosen(payload: Tensor, shape: Shape, out: Tensor, weight: float = 1.0) -> Sound:
    """Unpack the indices in one launch, and add the values in another."""
    if not _adds(payload, shape, out):
        return NotImplemented
    return _add_rows(payload.view(1, -1), shape, out, weight, clears=False)[0]


def average_chosen(payloads: Tensor, shape: Shape, out: Tensor, weight: float) -> Tensor | Literal[True]:
    """Unpack the indices of all payloads in one launch; a second one clears `out` and adds the values,
    in order.
    """
    if not _adds(payloads, shape, out):
        return NotImplemented
    return _add_rows(payloads, shape, out, weight, clears=True)[-1]


def pack_elias_fano(indices: Tensor, planes: Planes) -> Tensor:
    """Pack in two launches: the second one packs the blocks."""
    if not _packs(indices, planes):
        return NotImplemented
    payload, patterns = _room(4 * planes.words, "coded", planes, indices.device)
    words = payload.view(torch.int32)
    _pack(words, patterns, indices, "coded", planes, None)
    return words


def unpack_elias_fano(packed: Tensor, planes: Planes) -> tuple[Tensor, Sound]:
    """Unpack in one launch. A second one replaces invalid indices by 0 … count - 1."""
    if not packed.is_contiguous() or planes.numel > 2**31:
        return NotImplemented
    indices, faults = _unpack(packed, 1, 0, "coded", planes)
    sound = torch.empty((), dtype=torch.bool, device=packed.device)
    programs = max(1, -(-planes.count // _TILE))
    arguments = faults, faults.numel(), indices, planes.count, sound.view(torch.uint8)
    launch(_replace_places, programs, *arguments, TILE=_TILE)
    return indices[0], sound


def _adds(payloads: Tensor, shape: Shape, out: Tensor) -> bool:
    return is_taken(out) and payloads.is_contiguous() and shape.is_narrow and 0 < out.numel() < 2**31


def _packs(indices: Tensor, planes: Planes) -> bool:
    return indices.is_contiguous() and indices.dtype in (torch.int32, torch.int64) and planes.numel <= 2**31


def _room(size: int, form: Form, planes: Planes, device: torch.device) -> tuple[Tensor, Tensor]:
    """Allocate zeros: a payload of `size` bytes, and for coded places the upper row as blocks
    (blocks,) int32.
    """
    blocks = planes.blocks if form == "coded" else 0
    room = torch.zeros(size + 4 * blocks, dtype=torch.uint8, device=device)
    return room[:size], room[size:].view(torch.int32)


def _pack(
    words: Tensor,
    patterns: Tensor,
    indices: Tensor,
    form: Form,
    planes: Planes,
    taken: tuple[Tensor, Tensor, float, int] | None,
) -> None:
    x, values, limit, kind = (words, words, 0.0, 0) if taken is None else taken
    if kind:
        values = values.view(torch.int16)
    _low, groups, places = planes.starts
    launch(
        _pack_places, -(-planes.count // _TILE), indices, planes.count, planes.numel, planes.low_bits, words,
        groups, patterns, planes.blocks, x, values, limit,
        FORM=_FORMS[form], TAKES=taken is not None, KIND=kind, TILE=_TILE,
    )  # fmt: skip
    if form == "coded":
        encoding, _decoding, _order = _tables(words.device)
        launch(
            _pack_blocks, -(-planes.blocks // _BLOCKS), patterns, planes.blocks, encoding, words, groups,
            places, planes.words, TILE=_BLOCKS,
        )  # fmt: skip


def _unpack(packed: Tensor, rows: int, stride: int, form: Form, planes: Planes) -> tuple[Tensor, Tensor]:
    """Unpack the places of `rows` payloads, whose words begin every `stride` words.

    Returns (places (rows, count), faults (rows, tiles) int32). A fault has bit 0 set if the tile is no valid
    choice, and bit 1 if any word of its share is not 0.
    """
    indices = torch.empty(rows, planes.count, dtype=index_type(planes.numel), device=packed.device)
    blocks = {"list": -(-planes.count // 32), "bitmap": -(-planes.numel // 32), "coded": planes.blocks}[form]
    _encoding, decoding, order = _tables(packed.device)
    _low, groups, places = planes.starts
    tiles = -(-blocks // _UNPACKED)
    faults = torch.empty(rows, tiles, dtype=torch.int32, device=packed.device)
    words = {"list": planes.count, "bitmap": -(-planes.numel // 32), "coded": planes.words}[form]
    launch(
        _unpack_places, rows * tiles, packed, stride, tiles, blocks, planes.count, planes.numel,
        planes.low_bits, groups, places, words, decoding, order, indices, faults,
        FORM=_FORMS[form], TILE=_UNPACKED, CHUNK=_CHUNK, WIDTH=16 if form == "coded" else 32,
    )  # fmt: skip
    return indices, faults


def _add_rows(payloads: Tensor, shape: Shape, out: Tensor, weight: float, *, clears: bool) -> Tensor:
    """Add weight · values of all valid payloads (rows, bytes) to `out`; with `clears`, overwrite `out`.

    Returns (rows + 1,) bool: whether each payload is a valid choice, and whether the words of all invalid
    ones are zeros.
    """
    rows, planes, numel = len(payloads), shape.planes, out.numel()
    flat = payloads.view(-1)
    indices, faults = _unpack(flat.view(torch.int32), rows, shape.bytes // 4, shape.form, planes)
    sound = torch.empty(rows + 1, dtype=torch.bool, device=out.device)
    kind = _TYPES[shape.dtype]
    size = shape.dtype.itemsize
    values = flat.view(torch.float32 if kind == 0 else torch.int16)
    launch(
        _add_places, -(-numel // _STRETCH), indices, planes.count, faults, faults.shape[1],
        sound.view(torch.uint8), values, shape.start // size, shape.bytes // size, rows, out, numel, weight,
        KIND=kind, CLEARS=clears, TILE=_STRETCH, SLOTS=512,
    )  # fmt: skip
    return sound


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
        bits = held.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(size > 0x7F800000, 0x7FC0, rounded)
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


@triton.jit(do_not_specialize=["count", "numel", "low_bits", "low_words", "blocks"])
def _pack_places(
    indices, count, numel, low_bits, words, low_words, patterns, blocks, x, values, limit,
    FORM: tl.constexpr, TAKES: tl.constexpr, KIND: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Pack a tile of indices: as a list, as bits of a bitmap, or as low bits and ones of the upper row.

    With TAKES, also write the values of x, and leave their rounding errors in x. Indices out of range are
    left out; receivers find the payload invalid.
    """
    begin = tl.program_id(0).to(tl.int64) * TILE
    rank = begin + tl.arange(0, TILE)
    index = tl.load(indices + rank, rank < count, other=0).to(tl.int64)
    there = (rank < count) & (index >= 0) & (index < numel)
    if FORM == _LIST:
        tl.store(words + rank, index.to(tl.int32), there)
    elif FORM == _BITMAP:
        bit = (tl.full((TILE,), 1, tl.int64) << (index & 31)).to(tl.int32)
        tl.atomic_or(words + (index >> 5), bit, there, sem="relaxed")
    else:
        above = tl.where(there, index - rank, 0)
        low = tl.reshape(above & ((tl.full((TILE,), 1, tl.int64) << low_bits) - 1), (TILE // 32, 32))
        # 32 numbers of b bits are b words.
        place, row = tl.arange(0, 32)[None, :] * low_bits, begin // 32 + tl.arange(0, TILE // 32)
        word = tl.zeros((), tl.int32)
        while word < low_bits:
            found, to = tl.sum(_shifted(low, place - 32 * word), 1), row * low_bits + word
            tl.store(words + to, found.to(tl.int32), to < low_words)
            word += 1
        at = (above >> low_bits) + rank
        block = at // 10
        one = tl.full((TILE,), 1, tl.int32) << (at - 10 * block).to(tl.int32)
        tl.atomic_or(patterns + block, one, there & (at >= 0) & (block < blocks), sem="relaxed")
    if TAKES:
        value = tl.load(x + index, there, other=0.0)
        if KIND == _FLOAT32:
            sent = value
            tl.store(values + rank, value, there)
        else:
            bits, sent = _narrowed(value, limit, KIND)
            tl.store(values + rank, bits, there)
        tl.store(x + index, value - sent, there)


@triton.jit(do_not_specialize=["blocks", "groups", "places", "last"])
def _pack_blocks(patterns, blocks, encoding, words, groups, places, last, TILE: tl.constexpr):
    """Pack a tile of blocks: groups' numbers of 6 bits, and places in the group, after those of all earlier
    blocks.
    """
    lane, begin = tl.arange(0, TILE), tl.program_id(0) * TILE
    start, done = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    while done < begin:
        code = tl.load(encoding + tl.load(patterns + done + lane))
        start += tl.sum((code >> 6) & 7)
        done += TILE
    number = begin + lane
    code = tl.load(encoding + tl.load(patterns + number, number < blocks, other=0))
    code = tl.where(number < blocks, code, 0)
    # 16 numbers of 6 bits are 3 words.
    group = tl.reshape((code & 63).to(tl.int64), (TILE // 16, 16))
    place = tl.arange(0, 16)[None, :] * 6
    word = tl.zeros((), tl.int32)
    while word < 3:
        to = (begin // 16 + tl.arange(0, TILE // 16)) * 3 + word
        tl.store(
            words + groups + to,
            tl.sum(_shifted(group, place - 32 * word), 1).to(tl.int32),
            groups + to < places,
        )
        word += 1
    width = (code >> 6) & 7
    at = start + tl.cumsum(width) - width
    bits = ((code >> 9) & 127).to(tl.int64) << (at & 31)
    to = words + places + (at >> 5)
    tl.atomic_or(
        to, (bits & 0xFFFFFFFF).to(tl.int32), (width > 0) & (places + (at >> 5) < last), sem="relaxed"
    )
    # Up to 7 bits may reach into the next word.
    more = (bits >> 32).to(tl.int32)
    tl.atomic_or(to + 1, more, (more != 0) & (places + (at >> 5) + 1 < last), sem="relaxed")


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
    faults, FORM: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Unpack a tile of a payload's blocks, bitmap words or list into indices, and write its fault, as in
    `_unpack`.
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


@triton.jit
def _all_of(faults, tiles):
    """Combine the faults of all tiles of a payload: bit 0 and bit 1 as in `_unpack`."""
    wrong, filled, done = tl.zeros((), tl.int32), tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    while done < tiles:
        place = done + tl.arange(0, 256)
        fault = tl.load(faults + place, place < tiles, other=0)
        wrong, filled = tl.maximum(wrong, tl.max(fault & 1)), tl.maximum(filled, tl.max(fault & 2))
        done += 256
    return wrong | filled


@triton.jit(do_not_specialize=["tiles", "count"])
def _replace_places(faults, tiles, indices, count, sound, TILE: tl.constexpr):
    """Replace the indices by 0 … count - 1 if they are invalid. The first program writes to `sound` whether
    they are valid.
    """
    wrong = _all_of(faults, tiles) & 1
    if tl.program_id(0) == 0:
        tl.store(sound, (wrong == 0).to(tl.uint8))
    if wrong != 0:
        place = tl.program_id(0) * TILE + tl.arange(0, TILE)
        tl.store(indices + place, place, place < count)


@triton.jit(do_not_specialize=["count", "tiles", "start", "stride", "rows", "numel"])
def _add_places(
    indices, count, faults, tiles, sound, values, start, stride, rows, out, numel, weight,
    KIND: tl.constexpr, CLEARS: tl.constexpr, TILE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Add weight · values of all valid payloads, one after the other, to a tile of `out`.

    The first program writes to `sound` which payloads are valid.
    """
    begin = tl.program_id(0).to(tl.int64) * TILE
    stop = tl.minimum(begin + TILE, numel)
    if CLEARS:
        place = begin + tl.arange(0, TILE)
        tl.store(out + place, tl.zeros((TILE,), tl.float32), place < numel)
    row, heard = tl.zeros((), tl.int64), tl.full((), 1, tl.int32)
    while row < rows:
        fault = _all_of(faults + row * tiles, tiles)
        if begin == 0:
            tl.store(sound + row, ((fault & 1) == 0).to(tl.uint8))
        if fault == 3:
            heard = tl.zeros((), tl.int32)
        if (fault & 1) == 0:
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
    if begin == 0:
        tl.store(sound + rows, heard.to(tl.uint8))

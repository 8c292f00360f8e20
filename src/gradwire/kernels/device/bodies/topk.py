"""Exact top-k by magnitude without a number on the host: sift, radix select of 11 + 10 + 10 bits, take.

A tile's candidates lie together, in the order of their places, wherever an atomic addition found room for
them; `spans` says where, tile by tile. If the room is too small, or fewer than k reached the guess, then
`passed` is not k … room, and the same passes read x itself instead of candidates.
"""

import triton
import triton.language as tl

from gradwire.kernels.device.bodies.common import magnitude

DIGITS = tl.constexpr(2048)
"""Bins of a histogram: the first digit has 11 bits, the others 10."""


@triton.jit
def key_of(x):
    """What orders: the magnitude's bits, in which NaN and Inf are equals."""
    return tl.minimum(magnitude(x), 0x7F800000)


@triton.jit
def is_sifted(passed, k, room):
    """Whether candidates are all that the k largest can be."""
    count = tl.load(passed)
    return (count >= k) & (count <= room)


@triton.jit(do_not_specialize=["numel", "room"])
def sift(x, numel, threshold, passed, room, spans, places, values, TILE: tl.constexpr):
    """Collect what reaches the threshold: places within the tile, and values."""
    tile = tl.program_id(0)
    place = tl.arange(0, TILE)
    x += tile.to(tl.int64) * TILE
    left = numel - tile.to(tl.int64) * TILE
    if left >= TILE:
        value = tl.load(x + place)
    else:
        value = tl.load(x + place, place < left, other=0.0)
    reaches = (key_of(value) >= tl.load(threshold)) & (place < left)
    count = tl.sum(reaches.to(tl.int32))
    start = tl.zeros((), tl.int32)
    if count > 0:
        start = tl.atomic_add(passed, count, sem="relaxed")
        to = start + tl.cumsum(reaches.to(tl.int32)) - 1
        fits = reaches & (start + count <= room)
        tl.store(places + to, place.to(tl.int16), fits)
        tl.store(values + to, value, fits)
    tl.store(spans + tile * 2, start)
    tl.store(spans + tile * 2 + 1, count)


@triton.jit
def digit_at(bins, rank):
    """(digit of the rank-th largest, its rank among those of the same digit), from a histogram."""
    digit = tl.arange(0, DIGITS)
    counts = tl.load(bins + digit)
    # How many are larger: the total less those up to here.
    above = tl.sum(counts) - tl.cumsum(counts)
    is_it = (above < rank) & (rank <= above + counts)
    return tl.sum(tl.where(is_it, digit, 0)), rank - tl.sum(tl.where(is_it, above, 0))


@triton.jit
def prefix_before(bins, states, k, ROUND: tl.constexpr):
    """(digits found so far, rank among what has them) before rounds 0 … 2, and after them.

    `states` keeps both by round. Every program finds the last digit by itself, from a complete histogram.
    """
    if ROUND == 0:
        return tl.zeros((), tl.int32), tl.zeros((), tl.int32) + k
    else:
        prefix, rank = tl.load(states + 2 * (ROUND - 1)), tl.load(states + 2 * (ROUND - 1) + 1)
        digit, rank = digit_at(bins + (ROUND - 1) * DIGITS, rank)
        return (prefix << 10) | digit, rank


@triton.jit(do_not_specialize=["numel", "k", "room"])
def count_digits(x, numel, k, passed, room, values, bins, states, ROUND: tl.constexpr, TILE: tl.constexpr):
    """Add this round's digits of what begins with the digits found before to its histogram."""
    prefix, rank = prefix_before(bins, states, k, ROUND)
    if tl.program_id(0) == 0:
        tl.store(states + 2 * ROUND, prefix)
        tl.store(states + 2 * ROUND + 1, rank)
    SHIFT: tl.constexpr = 20 - 10 * ROUND
    sifted = is_sifted(passed, k, room)
    source = tl.where(sifted, values.to(tl.int64), x.to(tl.int64)).to(tl.pointer_type(tl.float32))
    count = tl.where(sifted, tl.load(passed).to(tl.int64), numel)
    begin = tl.program_id(0).to(tl.int64) * TILE
    place, digit_of_bin = tl.arange(0, TILE), tl.arange(0, DIGITS)
    totals = tl.zeros((DIGITS,), tl.int32)
    while begin < count:
        mask = place < count - begin
        key = key_of(tl.load(source + begin + place, mask, other=0.0))
        if ROUND > 0:
            mask = mask & ((key >> (SHIFT + 10)) == prefix)
        digit = (key >> SHIFT) & (DIGITS - 1 if ROUND == 0 else 1023)
        totals += tl.histogram(digit, DIGITS, mask=mask)
        begin += tl.num_programs(0).to(tl.int64) * TILE
    # Only bins that are not empty: one addition for each element would queue at a few of them.
    tl.atomic_add(bins + ROUND * DIGITS + digit_of_bin, totals, totals > 0, sem="relaxed")


@triton.jit
def settle(bins, states, ROUND: tl.constexpr):
    """The k-th largest magnitude, and how many equal to it are among the k: one program."""
    prefix, rank = prefix_before(bins, states, 0, ROUND)
    tl.store(states + 2 * ROUND, prefix)
    tl.store(states + 2 * ROUND + 1, rank)


@triton.jit
def source_of(x, numel, k, passed, room, spans, values, tile, TILE: tl.constexpr):
    """Where a tile's values are, how many, and where its places: of no meaning if all of x is read."""
    start = tile.to(tl.int64) * TILE
    begin, count = tl.load(spans + tile * 2), tl.load(spans + tile * 2 + 1)
    sifted = is_sifted(passed, k, room)
    source = tl.where(sifted, (values + begin).to(tl.int64), (x + start).to(tl.int64))
    count = tl.where(sifted, count, tl.minimum(numel - start, TILE).to(tl.int32))
    return source.to(tl.pointer_type(tl.float32)), count, begin, sifted


@triton.jit
def kept_of(source, slot, count, found):
    """Of values at slots: which are above the k-th largest magnitude, which equal it, and the values."""
    value = tl.load(source + slot, slot < count, other=0.0)
    key, threshold = key_of(value), tl.load(found)
    return (
        ((slot < count) & (key > threshold)).to(tl.int32),
        ((slot < count) & (key == threshold)).to(tl.int32),
        value,
    )


@triton.jit(do_not_specialize=["numel", "k", "room"])
def count_kept(
    x, numel, k, passed, room, spans, places, values, found, counts, TILE: tl.constexpr, SLOTS: tl.constexpr
):
    """Of each tile, how many are above the k-th largest magnitude, and how many equal it."""
    tile = tl.program_id(0)
    source, count, _begin, _sifted = source_of(x, numel, k, passed, room, spans, values, tile, TILE)
    slot, larger, same = tl.arange(0, SLOTS), tl.zeros((SLOTS,), tl.int32), tl.zeros((SLOTS,), tl.int32)
    done = 0
    while done < count:
        above, equal, _value = kept_of(source, done + slot, count, found)
        larger, same, done = larger + above, same + equal, done + SLOTS
    tl.store(counts + tile, tl.sum(larger))
    tl.store(counts + tl.num_programs(0) + tile, tl.sum(same))


@triton.jit(do_not_specialize=["numel", "k", "room"])
def take_kept(
    x, numel, k, passed, room, spans, places, values, found, before, indices, out, weight,
    TAKE: tl.constexpr, TILE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Write indices, in order, and with TAKE weight · values, leaving zeros in x.

    `before` counts what `count_kept` counted, up to and with each tile. Ties go to the lowest index.
    """
    tile = tl.program_id(0)
    source, count, begin, sifted = source_of(x, numel, k, passed, room, spans, values, tile, TILE)
    start, ties = tile.to(tl.int64) * TILE, tl.load(found + 1)
    larger_before = tl.load(before + tile - 1, tile > 0, other=0)
    same_before = tl.load(before + tl.num_programs(0) + tile - 1, tile > 0, other=0)
    done = 0
    while done < count:
        slot = done + tl.arange(0, SLOTS)
        above, equal, value = kept_of(source, slot, count, found)
        tie = same_before + tl.cumsum(equal) - equal
        kept = (above > 0) | ((equal > 0) & (tie < ties))
        to = larger_before + tl.cumsum(above) - above + tl.minimum(tie, ties)
        place = tl.load(places + begin + slot, kept & sifted, other=0).to(tl.int32)
        place = tl.where(sifted, place, slot)
        tl.store(indices + to, start + place, kept)
        if TAKE:
            tl.store(out + to, weight * value, kept)
            tl.store(x + start + place, tl.zeros((SLOTS,), tl.float32), kept)
        larger_before += tl.sum(above)
        same_before += tl.sum(equal)
        done += SLOTS

"""Exact top-k by magnitude: one pass over memory sifts by a guess, the others read what passed.

No number is read on the host: sift, radix select of 11 + 10 + 10 bits, write. A tile's candidates lie
together, in the order of their places, wherever an atomic addition found room for them; `spans` says where,
tile by tile. If the room is too small, or fewer than k reached the guess, then `passed` is not k … room, and
the same passes read x itself, three times more: nothing on the host knows of it.

Difference from the CPU's kernel: the threshold does not rise while it sifts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.device.common import magnitude
from gradwire.kernels.device.launch import TILE, is_taken, launch
from gradwire.kernels.uploads import kept_by_stream, sent_to

SAMPLE = 16384
_TILE = 4096
_WARPS = 16
"""For 8 elements a thread. Larger tiles than elsewhere: three launches have a program for each."""
_SPARE = 1 << 16
"""Room for candidates beyond 2k."""
_DIGITS = 2048
"""Bins of a histogram: the first digit has 11 bits, the others 10."""
_BINS = tl.constexpr(_DIGITS)
_SLOTS = 512
"""Candidates of a tile that are looked at together: at 1 % there are 41 of them."""
_PROGRAMS = 264
"""That count digits, two for each multiprocessor of an H200: each adds its bins to the others'."""
_FIRST = 16
"""Where histograms begin: after the count of candidates (0), and what is known by round (2 … 9)."""


def topk_indices(x: Tensor, k: int) -> Tensor:
    """4 bytes an element, and some 40 a candidate."""
    if not is_taken(x) or x.ndim != 1 or x.numel() >= 2**31:
        return NotImplemented
    numel, tiles = x.numel(), -(-x.numel() // _TILE)
    indices = torch.empty(k, dtype=torch.int64, device=x.device)
    if k == 0:
        return indices
    state = torch.zeros(_FIRST + 3 * _DIGITS, dtype=torch.int32, device=x.device)
    passed, states, bins = state, state[2:], state[_FIRST:]
    guess = _guess(x, k)
    room = 0 if guess is None else min(numel, 2 * k + _SPARE)
    spans = torch.empty(2 * tiles, dtype=torch.int32, device=x.device)
    places = torch.empty(room, dtype=torch.int16, device=x.device)
    values = torch.empty(room, device=x.device)
    if guess is not None:
        launch(
            _sift, tiles, x, numel, guess, passed, room, spans, places, values, TILE=_TILE, num_warps=_WARPS
        )
    for number in range(3):
        launch(
            _count_digits, min(tiles, _PROGRAMS), x, numel, k, passed, room, values, bins, states,
            ROUND=number, TILE=TILE,
        )  # fmt: skip
    launch(_settle, 1, bins, states, ROUND=3)
    source = x, numel, k, passed, room, spans, places, values, states[6:]
    few = {"TILE": _TILE, "SLOTS": _SLOTS, "num_warps": _SLOTS // 32 // 4}
    counts = torch.empty(2, tiles, dtype=torch.int32, device=x.device)
    launch(_count_kept, tiles, *source, counts, **few)
    before = counts.cumsum(1, dtype=torch.int32)
    launch(_write_kept, tiles, *source, before, indices, **few)
    return indices


def _guess(x: Tensor, k: int) -> Tensor | None:
    """A threshold that the k-th largest magnitude very likely reaches, as on the CPU; none if k is large."""
    size = min(SAMPLE, x.numel() // 32)
    if size == 0:
        return None
    expected = k / x.numel() * size
    rank = int(expected + 4 * expected**0.5) + 4
    if rank > size // 2:
        return None
    sample = x[_sampled(x.numel(), size, x.device)].view(torch.int32) & 0x7FFFFFFF
    return sample.clamp_(max=0x7F800000).topk(rank).values[-1:]


@kept_by_stream(maxsize=64)  # 128 KiB each
def _sampled(numel: int, size: int, device: torch.device) -> Tensor:
    """One place of each of `size` equal stretches: a fixed stride could fall on one column of a matrix."""
    stretch = numel // size
    random = torch.Generator("cpu").manual_seed(numel)
    offsets = torch.randint(stretch, (size,), generator=random, device="cpu")
    return sent_to(torch.arange(size, device="cpu") * stretch + offsets, device)


@triton.jit
def _key_of(x):
    """The key that orders: the magnitude's bits, in which NaN and Inf are equals."""
    return tl.minimum(magnitude(x), 0x7F800000)


@triton.jit
def _is_sifted(passed, k, room):
    """Whether candidates are all that the k largest can be."""
    count = tl.load(passed)
    return (count >= k) & (count <= room)


@triton.jit(do_not_specialize=["numel", "room"])
def _sift(x, numel, threshold, passed, room, spans, places, values, TILE: tl.constexpr):
    """Collect what reaches the threshold: places within the tile, and values."""
    tile = tl.program_id(0)
    place = tl.arange(0, TILE)
    x += tile.to(tl.int64) * TILE
    left = numel - tile.to(tl.int64) * TILE
    if left >= TILE:
        value = tl.load(x + place)
    else:
        value = tl.load(x + place, place < left, other=0.0)
    reaches = (_key_of(value) >= tl.load(threshold)) & (place < left)
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
def _digit_at(bins, rank):
    """(digit of the rank-th largest, its rank among those of the same digit), from a histogram."""
    digit = tl.arange(0, _BINS)
    counts = tl.load(bins + digit)
    # How many are larger: the total less those up to here.
    above = tl.sum(counts) - tl.cumsum(counts)
    is_it = (above < rank) & (rank <= above + counts)
    return tl.sum(tl.where(is_it, digit, 0)), rank - tl.sum(tl.where(is_it, above, 0))


@triton.jit
def _prefix_before(bins, states, k, ROUND: tl.constexpr):
    """(digits found so far, rank among what has them) before rounds 0 … 2, and after them.

    `states` keeps both by round. Every program finds the last digit by itself, from a complete histogram.
    """
    if ROUND == 0:
        return tl.zeros((), tl.int32), tl.zeros((), tl.int32) + k
    else:
        prefix, rank = tl.load(states + 2 * (ROUND - 1)), tl.load(states + 2 * (ROUND - 1) + 1)
        digit, rank = _digit_at(bins + (ROUND - 1) * _BINS, rank)
        return (prefix << 10) | digit, rank


@triton.jit(do_not_specialize=["numel", "k", "room"])
def _count_digits(x, numel, k, passed, room, values, bins, states, ROUND: tl.constexpr, TILE: tl.constexpr):
    """Add this round's digits of what begins with the digits found before to its histogram."""
    prefix, rank = _prefix_before(bins, states, k, ROUND)
    if tl.program_id(0) == 0:
        tl.store(states + 2 * ROUND, prefix)
        tl.store(states + 2 * ROUND + 1, rank)
    SHIFT: tl.constexpr = 20 - 10 * ROUND
    sifted = _is_sifted(passed, k, room)
    source = tl.where(sifted, values.to(tl.int64), x.to(tl.int64)).to(tl.pointer_type(tl.float32))
    count = tl.where(sifted, tl.load(passed).to(tl.int64), numel)
    begin = tl.program_id(0).to(tl.int64) * TILE
    place, digit_of_bin = tl.arange(0, TILE), tl.arange(0, _BINS)
    totals = tl.zeros((_BINS,), tl.int32)
    while begin < count:
        mask = place < count - begin
        key = _key_of(tl.load(source + begin + place, mask, other=0.0))
        if ROUND > 0:
            mask = mask & ((key >> (SHIFT + 10)) == prefix)
        digit = (key >> SHIFT) & (_BINS - 1 if ROUND == 0 else 1023)
        totals += tl.histogram(digit, _BINS, mask=mask)
        begin += tl.num_programs(0).to(tl.int64) * TILE
    # Only bins that are not empty: one addition for each element would queue at a few of them.
    tl.atomic_add(bins + ROUND * _BINS + digit_of_bin, totals, totals > 0, sem="relaxed")


@triton.jit
def _settle(bins, states, ROUND: tl.constexpr):
    """The k-th largest magnitude, and how many equal to it are among the k: one program."""
    prefix, rank = _prefix_before(bins, states, 0, ROUND)
    tl.store(states + 2 * ROUND, prefix)
    tl.store(states + 2 * ROUND + 1, rank)


@triton.jit
def _source_of(x, numel, k, passed, room, spans, values, tile, TILE: tl.constexpr):
    """Where a tile's values are, how many, and where its places: of no meaning if all of x is read."""
    start = tile.to(tl.int64) * TILE
    begin, count = tl.load(spans + tile * 2), tl.load(spans + tile * 2 + 1)
    sifted = _is_sifted(passed, k, room)
    source = tl.where(sifted, (values + begin).to(tl.int64), (x + start).to(tl.int64))
    count = tl.where(sifted, count, tl.minimum(numel - start, TILE).to(tl.int32))
    return source.to(tl.pointer_type(tl.float32)), count, begin, sifted


@triton.jit
def _kept_of(source, slot, count, found):
    """Of values at slots: which are above the k-th largest magnitude, and which equal it."""
    key, threshold = _key_of(tl.load(source + slot, slot < count, other=0.0)), tl.load(found)
    return (
        ((slot < count) & (key > threshold)).to(tl.int32),
        ((slot < count) & (key == threshold)).to(tl.int32),
    )


@triton.jit(do_not_specialize=["numel", "k", "room"])
def _count_kept(
    x, numel, k, passed, room, spans, places, values, found, counts, TILE: tl.constexpr, SLOTS: tl.constexpr
):
    """Of each tile, how many are above the k-th largest magnitude, and how many equal it."""
    tile = tl.program_id(0)
    source, count, _begin, _sifted = _source_of(x, numel, k, passed, room, spans, values, tile, TILE)
    slot, larger, same = tl.arange(0, SLOTS), tl.zeros((SLOTS,), tl.int32), tl.zeros((SLOTS,), tl.int32)
    done = 0
    while done < count:
        above, equal = _kept_of(source, done + slot, count, found)
        larger, same, done = larger + above, same + equal, done + SLOTS
    tl.store(counts + tile, tl.sum(larger))
    tl.store(counts + tl.num_programs(0) + tile, tl.sum(same))


@triton.jit(do_not_specialize=["numel", "k", "room"])
def _write_kept(
    x, numel, k, passed, room, spans, places, values, found, before, indices,
    TILE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Write indices, in order.

    `before` counts what `count_kept` counted, up to and with each tile. Ties go to the lowest index.
    """
    tile = tl.program_id(0)
    source, count, begin, sifted = _source_of(x, numel, k, passed, room, spans, values, tile, TILE)
    start, ties = tile.to(tl.int64) * TILE, tl.load(found + 1)
    larger_before = tl.load(before + tile - 1, tile > 0, other=0)
    same_before = tl.load(before + tl.num_programs(0) + tile - 1, tile > 0, other=0)
    done = 0
    while done < count:
        slot = done + tl.arange(0, SLOTS)
        above, equal = _kept_of(source, slot, count, found)
        tie = same_before + tl.cumsum(equal) - equal
        kept = (above > 0) | ((equal > 0) & (tie < ties))
        to = larger_before + tl.cumsum(above) - above + tl.minimum(tie, ties)
        place = tl.load(places + begin + slot, kept & sifted, other=0).to(tl.int32)
        place = tl.where(sifted, place, slot)
        tl.store(indices + to, start + place, kept)
        larger_before += tl.sum(above)
        same_before += tl.sum(equal)
        done += SLOTS

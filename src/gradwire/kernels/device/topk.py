"""Exact top-k by magnitude: one pass over memory collects candidates, later passes read these only.

No number is read on the host: guess a threshold, collect candidates, radix select by 11 + 10 + 10 bits,
count, write. The candidates of a tile lie together, in order, wherever an atomic addition found room; `spans`
says where, tile by tile. If fewer than k elements reach the guess, or more than there is room for, the same
passes read x itself, three times more; the device decides that.

Difference from the CPU's kernel: the threshold does not rise during the pass.
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
"""Warps of the pass that collects: 8 elements per thread. Tiles are larger than elsewhere, as three launches
have a program per tile."""
_SPARE = 1 << 16
"""Room for candidates beyond 2k."""
_DIGITS = 2048
"""Bins of a histogram: the first digit has 11 bits, the others have 10."""
_BINS = tl.constexpr(_DIGITS)
_SLOTS = 512
"""Candidates of a tile that are read at a time: at 1 % a tile has 41."""
_PROGRAMS = 264
"""Most programs that count digits, two per multiprocessor of an H200; each adds its bins to a common
histogram."""
_FIRST = 16
"""Index of the histograms in `state`, after the number of candidates (0), the guess (1) and the results of
rounds (2 … 9)."""


def topk_indices(x: Tensor, k: int) -> Tensor:
    """Select in 6 or 7 launches. Memory traffic: 4 bytes per element, and some 40 per candidate."""
    if not is_taken(x) or x.ndim != 1 or x.numel() >= 2**31:
        return NotImplemented
    numel, tiles = x.numel(), -(-x.numel() // _TILE)
    indices = torch.empty(k, dtype=torch.int64, device=x.device)
    if k == 0:
        return indices
    state = torch.empty(_FIRST + 3 * _DIGITS, dtype=torch.int32, device=x.device)
    passed, guess, states, bins = state, state[1:], state[2:], state[_FIRST:]
    has_guess = _begin(x, k, state)
    room = min(numel, 2 * k + _SPARE) if has_guess else 0
    spans = torch.empty(2 * tiles, dtype=torch.int32, device=x.device)
    places = torch.empty(room, dtype=torch.int16, device=x.device)
    values = torch.empty(room, dtype=torch.float32, device=x.device)
    if has_guess:
        launch(
            _sift, tiles, x, numel, guess, passed, room, spans, places, values, TILE=_TILE, num_warps=_WARPS
        )
    for number in range(3):
        launch(
            _count_digits, min(tiles, _PROGRAMS), x, numel, k, passed, room, values, bins, states,
            ROUND=number, TILE=TILE,
        )  # fmt: skip
    source = x, numel, k, passed, room, spans, places, values
    few = {"TILE": _TILE, "SLOTS": _SLOTS, "num_warps": _SLOTS // 32 // 4}
    counts = torch.empty(2, tiles, dtype=torch.int32, device=x.device)
    launch(_count_kept, tiles, *source, bins, states, counts, **few)
    launch(_write_kept, tiles, *source, states[6:], counts, indices, CHUNK=1024, **few)
    return indices


def _begin(x: Tensor, k: int, state: Tensor) -> bool:
    """Clear `state`, and guess a threshold that the k-th largest magnitude very likely reaches, into
    state[1].

    Returns False, without a guess, if k is large; the guess is made as on the CPU.
    """
    size = min(SAMPLE, x.numel() // 32)
    expected = k / x.numel() * size
    rank = int(expected + 4 * expected**0.5) + 4
    has_guess = 0 < rank <= size // 2
    sampled = _sampled(x.numel(), size, x.device) if has_guess else state
    tiles = 1 - (-state.numel() // TILE)
    launch(_begin_search, tiles, x, sampled, size, rank, state, state.numel(), GUESSES=has_guess, TILE=TILE)
    return has_guess


@kept_by_stream(maxsize=64)  # 128 KiB each
def _sampled(numel: int, size: int, device: torch.device) -> Tensor:
    """Random indices, one from each of `size` equal stretches: a fixed stride could fall on one column of a
    matrix.
    """
    stretch = numel // size
    random = torch.Generator("cpu").manual_seed(numel)
    offsets = torch.randint(stretch, (size,), generator=random, device="cpu")
    return sent_to((torch.arange(size, device="cpu") * stretch + offsets).int(), device)


@triton.jit
def _key_of(x):
    """Key by which elements are ordered: bits of the magnitude, in which NaN equals Inf."""
    return tl.minimum(magnitude(x), 0x7F800000)


@triton.jit
def _digit_of(counts, rank):
    """Find the digit of the rank-th largest element in a histogram; returns (digit, rank among elements with
    this digit).
    """
    # How many are larger: the total less those up to here.
    above = tl.sum(counts) - tl.cumsum(counts)
    is_it = (above < rank) & (rank <= above + counts)
    return tl.sum(tl.where(is_it, tl.arange(0, _BINS), 0)), rank - tl.sum(tl.where(is_it, above, 0))


@triton.jit(do_not_specialize=["size", "rank", "numel"])
def _begin_search(x, sampled, size, rank, state, numel, GUESSES: tl.constexpr, TILE: tl.constexpr):
    """Clear a tile of `state`; the first program finds the rank-th largest of the sampled magnitudes
    instead.
    """
    place = tl.arange(0, TILE)
    if tl.program_id(0) > 0:
        place += (tl.program_id(0) - 1) * TILE
        tl.store(state + place, tl.zeros((TILE,), tl.int32), (place < numel) & (place != 1))
    elif GUESSES:
        # By 11, 10 and 10 bits, as below.
        prefix, left, shift = tl.zeros((), tl.int32), tl.zeros((), tl.int32) + rank, tl.full((), 20, tl.int32)
        while shift >= 0:
            counts, done = tl.zeros((_BINS,), tl.int32), tl.zeros((), tl.int32)
            while done < size:
                mask = done + place < size
                key = _key_of(tl.load(x + tl.load(sampled + done + place, mask, other=0), mask, other=0.0))
                # Nothing lies above the first 11 bits.
                mask = mask & ((key >> (shift + 10) == prefix) | (shift == 20))
                digit = tl.where(shift == 20, key >> 20, (key >> shift) & 1023)
                counts += tl.histogram(digit, _BINS, mask=mask)
                done += TILE
            found, left = _digit_of(counts, left)
            prefix = (prefix << 10) | found
            shift -= 10
        tl.store(state + 1, prefix)


@triton.jit
def _is_sifted(passed, k, room):
    """True if the candidates contain the k largest: at least k were found, and all had room."""
    count = tl.load(passed)
    return (count >= k) & (count <= room)


@triton.jit(do_not_specialize=["numel", "room"])
def _sift(x, numel, threshold, passed, room, spans, places, values, TILE: tl.constexpr):
    """Collect the elements of a tile that reach the threshold: their places in the tile, and their values."""
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
def _prefix_before(bins, states, k, ROUND: tl.constexpr):
    """State of the radix select before round ROUND (3: after the last): (digits found so far, rank among
    elements with them).

    `states` keeps this for each round. Every program finds the last digit by itself, from a complete
    histogram.
    """
    if ROUND == 0:
        return tl.zeros((), tl.int32), tl.zeros((), tl.int32) + k
    else:
        prefix, rank = tl.load(states + 2 * (ROUND - 1)), tl.load(states + 2 * (ROUND - 1) + 1)
        digit, rank = _digit_of(tl.load(bins + (ROUND - 1) * _BINS + tl.arange(0, _BINS)), rank)
        return (prefix << 10) | digit, rank


@triton.jit(do_not_specialize=["numel", "k", "room"])
def _count_digits(x, numel, k, passed, room, values, bins, states, ROUND: tl.constexpr, TILE: tl.constexpr):
    """Add the digits of one round to its histogram: those of elements that begin with the digits found
    so far.
    """
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
def _source_of(x, numel, k, passed, room, spans, values, tile, TILE: tl.constexpr):
    """Find a tile's values: (pointer to them, their number, first of their places, True if they are
    candidates).

    If x itself is read, places have no meaning.
    """
    start = tile.to(tl.int64) * TILE
    begin, count = tl.load(spans + tile * 2), tl.load(spans + tile * 2 + 1)
    sifted = _is_sifted(passed, k, room)
    source = tl.where(sifted, (values + begin).to(tl.int64), (x + start).to(tl.int64))
    count = tl.where(sifted, count, tl.minimum(numel - start, TILE).to(tl.int32))
    return source.to(tl.pointer_type(tl.float32)), count, begin, sifted


@triton.jit
def _kept_of(source, slot, count, threshold):
    """Masks of the values at `slot`: (above the k-th largest magnitude `threshold`, equal to it)."""
    key = _key_of(tl.load(source + slot, slot < count, other=0.0))
    return (
        ((slot < count) & (key > threshold)).to(tl.int32),
        ((slot < count) & (key == threshold)).to(tl.int32),
    )


@triton.jit(do_not_specialize=["numel", "k", "room"])
def _count_kept(
    x, numel, k, passed, room, spans, places, values, bins, states, counts,
    TILE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Count, for a tile, the elements above the k-th largest magnitude, and those equal to it.

    Every program finds that magnitude by itself. The first one writes it down, with the number of equal
    elements to keep.
    """
    tile = tl.program_id(0)
    threshold, rank = _prefix_before(bins, states, k, 3)
    if tile == 0:
        tl.store(states + 6, threshold)
        tl.store(states + 7, rank)
    source, count, _begin, _sifted = _source_of(x, numel, k, passed, room, spans, values, tile, TILE)
    slot, larger, same = tl.arange(0, SLOTS), tl.zeros((SLOTS,), tl.int32), tl.zeros((SLOTS,), tl.int32)
    done = 0
    while done < count:
        above, equal = _kept_of(source, done + slot, count, threshold)
        larger, same, done = larger + above, same + equal, done + SLOTS
    tl.store(counts + tile, tl.sum(larger))
    tl.store(counts + tl.num_programs(0) + tile, tl.sum(same))


@triton.jit(do_not_specialize=["numel", "k", "room"])
def _write_kept(
    x, numel, k, passed, room, spans, places, values, found, counts, indices,
    TILE: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the indices of a tile's kept elements, in order, after those of all earlier tiles. Ties go to the
    lowest index.
    """
    tile = tl.program_id(0)
    source, count, begin, sifted = _source_of(x, numel, k, passed, room, spans, values, tile, TILE)
    start, threshold, ties = tile.to(tl.int64) * TILE, tl.load(found), tl.load(found + 1)
    larger_before, same_before = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    done = 0
    while done < tile:
        earlier = done + tl.arange(0, CHUNK)
        larger_before += tl.sum(tl.load(counts + earlier, earlier < tile, other=0))
        same_before += tl.sum(tl.load(counts + tl.num_programs(0) + earlier, earlier < tile, other=0))
        done += CHUNK
    done = 0
    while done < count:
        slot = done + tl.arange(0, SLOTS)
        above, equal = _kept_of(source, slot, count, threshold)
        tie = same_before + tl.cumsum(equal) - equal
        kept = (above > 0) | ((equal > 0) & (tie < ties))
        to = larger_before + tl.cumsum(above) - above + tl.minimum(tie, ties)
        place = tl.load(places + begin + slot, kept & sifted, other=0).to(tl.int32)
        place = tl.where(sifted, place, slot)
        tl.store(indices + to, start + place, kept)
        larger_before += tl.sum(above)
        same_before += tl.sum(equal)
        done += SLOTS

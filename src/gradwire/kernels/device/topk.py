"""Exact top-k by magnitude: one pass over memory collects candidates; the last of its programs selects.

No number is read on the host. There are four launches:

1. Two bounds are taken from a sample. The k-th largest magnitude is very likely between them.
2. Elements above the lower bound become candidates, and those up to the upper one enter a histogram. The
   program that ends last finds the k-th largest magnitude.
3. Each tile counts what it keeps.
4. Each tile writes it, after what earlier tiles keep.

The candidates of a tile lie together, in order, wherever an atomic addition found room; `spans` says where,
tile by tile. If the k-th largest equals the lower bound, as in a tensor of zeros, or if candidates have no
room, the last two launches read x itself.

The choice is exact whatever the bounds are. If the k-th largest is not between them, less than once in 10^7
tensors by chance, the last program looks for it alone, by 11 + 11 + 9 bits. That takes milliseconds.

Difference from the CPU's kernel: the threshold does not rise during the pass.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.device.common import is_last, magnitude
from gradwire.kernels.device.launch import TILE, bound, counter_of, is_taken, launch
from gradwire.kernels.uploads import kept_by_stream, sent_to

SAMPLE = 16384
_DEVIATIONS = 6
"""Standard deviations of a count in the sample by which bounds are off. On the CPU they are 4; here a search
among all elements has only one program."""
_TILE = 4096
_WARPS = 16
"""Warps of the passes over samples and elements. Tiles are larger than elsewhere, as three launches have a
program per tile."""
_DIGIT = 11
"""Bits that a histogram resolves."""
_BITS, _BINS = tl.constexpr(_DIGIT), tl.constexpr(1 << _DIGIT)
_HISTOGRAMS = 4
"""One between the bounds, then up to three of a search."""
_SLOTS = 512
"""Candidates of a tile that are read at a time: at 1 % a tile has 60."""
_READ = 8192
"""Elements that a search reads at a time."""
_FIRST = 16
"""Index of the histograms in `state`. Before them are: number of candidates (0), of elements equal to the
lower bound (1), lower bound (2), upper bound (3), log2 of the keys per bin between them (4); then what is
found: the k-th largest magnitude (5), number of elements equal to it that are kept (6), and whether
candidates contain all that is kept (7)."""
_FOUND = 5
_TOP = tl.constexpr(0x7F800000)
"""The largest key."""


def topk_indices(x: Tensor, k: int) -> Tensor:
    """Twin of `gradwire.kernels.topk.topk_indices`. Select in four launches. Memory traffic: 4 bytes per
    element, and some 40 per candidate.
    """
    if not is_taken(x) or x.ndim != 1 or x.numel() >= 2**31:
        return NotImplemented
    numel, tiles = x.numel(), -(-x.numel() // _TILE)
    indices = torch.empty(k, dtype=torch.int64, device=x.device)
    if k == 0:
        return indices
    state = torch.empty(_FIRST + (_HISTOGRAMS << _DIGIT), dtype=torch.int32, device=x.device)
    room = _sample_of(numel, k).room
    spans = torch.empty(2 * tiles, dtype=torch.int32, device=x.device)
    places = torch.empty(room, dtype=torch.int16, device=x.device)
    values = torch.empty(room, dtype=torch.float32, device=x.device)
    counts = torch.empty(2, tiles, dtype=torch.int32, device=x.device)
    _choose(x, k, state, spans, places, values, counts, indices)
    return indices


@bound
def _choose(
    x: Tensor, k: int, state: Tensor, spans: Tensor, places: Tensor, values: Tensor, counts: Tensor,
    indices: Tensor,
) -> None:  # fmt: skip
    """As `topk_indices`, into `indices`; all else is scratch."""
    numel, (_programs, tiles), room = x.numel(), counts.shape, values.numel()
    _begin(x, k, state)
    launch(
        _sift, tiles, x, numel, k, state, state[_FIRST:], room, spans, places, values, counter_of(x.device),
        TILE=_TILE, READ=_READ, num_warps=_WARPS,
    )  # fmt: skip
    source = x, numel, spans, places, values, state[_FOUND:]
    few = {"TILE": _TILE, "SLOTS": _SLOTS, "num_warps": _SLOTS // 32 // 4}
    launch(_count_kept, tiles, *source, counts, **few)
    launch(_write_kept, tiles, *source, counts, indices, CHUNK=1024, **few)


class _Sample(NamedTuple):
    """A sample of `size` elements, the ranks of bounds in it, and how many candidates shall have room."""

    size: int
    lower: int
    upper: int
    room: int


@lru_cache(maxsize=1024)
def _sample_of(numel: int, k: int) -> _Sample:
    """The sample of `numel` elements, of which `k` are chosen.

    Of a sample of `size` elements, k·size/numel are expected among the k largest, and about the square root
    of that is the standard deviation. The bounds are the sample's elements so many places from its top, with
    a margin of some deviations more and less. If the sample has no such element, a bound lies below or above
    all elements.
    """
    size = min(SAMPLE, numel // 32)
    expected = k / numel * size
    margin = int(_DEVIATIONS * expected**0.5) + 4
    lower, upper = int(expected) + margin, int(expected) - margin
    room = numel
    if lower <= size:
        room = min(numel, int((lower + _DEVIATIONS * lower**0.5 + 4) * numel / size))
    return _Sample(size, lower, upper, room)


def _begin(x: Tensor, k: int, state: Tensor) -> None:
    """Clear `state`, and sample the bounds into it."""
    size, lower, upper, _room = _sample_of(x.numel(), k)
    sampled = _sampled(x.numel(), size, x.device) if size else state
    launch(
        _begin_search, 1 - (-state.numel() // TILE), x, sampled, size, lower, upper, state, state.numel(),
        SAMPLE=SAMPLE, TILE=TILE, num_warps=_WARPS,
    )  # fmt: skip


@kept_by_stream(maxsize=64)  # 64 KiB each
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
    return tl.minimum(magnitude(x), _TOP)


@triton.jit
def _digit_of(counts, rank):
    """Find the digit of the rank-th largest element in a histogram; returns (digit, rank among elements with
    this digit).
    """
    # How many are larger: the total less those up to here.
    above = tl.sum(counts) - tl.cumsum(counts)
    is_it = (above < rank) & (rank <= above + counts)
    return tl.sum(tl.where(is_it, tl.arange(0, _BINS), 0)), rank - tl.sum(tl.where(is_it, above, 0))


@triton.jit
def _with_bit(prefix, bit, key, rank):
    """`prefix`, with `bit` set if at least `rank` keys reach that number."""
    reach = tl.sum((key >= (prefix | bit)).to(tl.int32))
    return tl.where(reach >= rank, prefix | bit, prefix)


@triton.jit(do_not_specialize=["size", "lower", "upper", "numel"])
def _begin_search(
    x, sampled, size, lower, upper, state, numel, SAMPLE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Clear a tile of `state`. The first program finds the bounds instead: the keys at the ranks `lower` and
    `upper` of the sample.
    """
    if tl.program_id(0) > 0:
        place = (tl.program_id(0) - 1) * TILE + tl.arange(0, TILE)
        tl.store(state + place, tl.zeros((TILE,), tl.int32), (place < numel) & ((place < 2) | (place > 4)))
    else:
        number = tl.arange(0, SAMPLE)
        index = tl.load(sampled + number, number < size, other=0)
        key = tl.where(number < size, _key_of(tl.load(x + index, number < size, other=0.0)), -1)
        # Bit by bit: keys are in registers, so that a round takes a comparison of each and a sum.
        low, high, bit = tl.zeros((), tl.int32), tl.zeros((), tl.int32), tl.full((), 1 << 30, tl.int32)
        while bit > 0:
            low, high = _with_bit(low, bit, key, lower), _with_bit(high, bit, key, upper)
            bit = bit >> 1
        low, high = tl.where(lower <= size, low, -1), tl.minimum(high, _TOP)
        shift = tl.zeros((), tl.int32)
        while ((high - low - 1) >> shift) >= _BINS:
            shift += 1
        tl.store(state + 2, low)
        tl.store(state + 3, high)
        tl.store(state + 4, shift)


@triton.jit
def _search(x, numel, k, state, bins, room, values, TILE: tl.constexpr):
    """Find the k-th largest magnitude, and write down what is found. For one program, after all others of the
    pass.

    If it is between the bounds, its bin is known, and candidates with other keys than the bin's are left out.
    The search goes on by `_BITS` bits until one key is left: it is the rank-th largest of the elements with a
    key from `base` to `base` + 2^width - 1, and up to `top`: the last bin has a part above the upper bound.
    """
    candidates, same, lower = tl.load(state), tl.load(state + 1), tl.load(state + 2)
    upper, shift, counts = tl.load(state + 3), tl.load(state + 4), tl.load(bins + tl.arange(0, _BINS))
    above = candidates - tl.sum(counts)
    is_lower = (k > candidates) & (k <= candidates + same)
    is_between = (k > above) & (k <= candidates)
    digit, left = _digit_of(counts, k - above)
    base = tl.where(is_lower, lower, tl.where(is_between, lower + 1 + (digit << shift), 0))
    width = tl.where(is_lower, 0, tl.where(is_between, shift, 31))
    rank = tl.where(is_lower, k - candidates, tl.where(is_between, left, k))
    top = tl.where(is_between, upper, _TOP)
    have_room = candidates <= room
    from_candidates = have_room & (k <= candidates)
    source = tl.where(from_candidates, values.to(tl.int64), x.to(tl.int64)).to(tl.pointer_type(tl.float32))
    count = tl.where(from_candidates, candidates.to(tl.int64), numel)
    place = tl.arange(0, TILE)
    while width > 0:
        shift = tl.maximum(width - _BITS, 0)
        bins += _BINS
        begin = tl.zeros((), tl.int64)
        while begin < count:
            key = _key_of(tl.load(source + begin + place, place < count - begin, other=0.0))
            is_there = (place < count - begin) & (key >= base) & (((key - base) >> width) == 0) & (key <= top)
            # One addition for each element: few are left, as a bin has a part in 2048 of the keys.
            tl.atomic_add(bins + ((key - base) >> shift), 1, is_there, sem="relaxed")
            begin += TILE
        # All threads of this program have added what they found.
        tl.debug_barrier()
        digit, rank = _digit_of(tl.load(bins + tl.arange(0, _BINS)), rank)
        base, width = base + (digit << shift), shift
    tl.store(state + 5, base)
    tl.store(state + 6, rank)
    tl.store(state + 7, ((base > lower) & have_room).to(tl.int32))


@triton.jit(do_not_specialize=["numel", "k", "room"])
def _sift(
    x, numel, k, state, bins, room, spans, places, values, counter, TILE: tl.constexpr, READ: tl.constexpr
):  # fmt: skip
    """Collect the candidates of a tile: their places in it, and their values. The last program goes on to
    search.
    """
    tile = tl.program_id(0)
    place = tl.arange(0, TILE)
    lower, upper, shift = tl.load(state + 2), tl.load(state + 3), tl.load(state + 4)
    here = x + tile.to(tl.int64) * TILE
    left = numel - tile.to(tl.int64) * TILE
    if left >= TILE:
        value = tl.load(here + place)
    else:
        value = tl.load(here + place, place < left, other=0.0)
    key = _key_of(value)
    reaches = (key > lower) & (place < left)
    # Two counts in one sum, as a tile has fewer than 2^16 elements.
    both = tl.sum(reaches.to(tl.int32) + (((key == lower) & (place < left)).to(tl.int32) << 16))
    count = both & 0xFFFF
    start = tl.zeros((), tl.int32)
    if both > 0xFFFF:
        tl.atomic_add(state + 1, both >> 16, sem="relaxed")
    if count > 0:
        start = tl.atomic_add(state, count, sem="relaxed")
        to = start + tl.cumsum(reaches.to(tl.int32)) - 1
        fits = reaches & (start + count <= room)
        tl.store(places + to, place.to(tl.int16), fits)
        tl.store(values + to, value, fits)
        tl.atomic_add(bins + ((key - lower - 1) >> shift), 1, reaches & (key <= upper), sem="relaxed")
    tl.store(spans + tile * 2, start)
    tl.store(spans + tile * 2 + 1, count)
    if is_last(counter):
        _search(x, numel, k, state, bins, room, values, READ)


@triton.jit
def _source_of(x, numel, spans, values, found, tile, TILE: tl.constexpr):
    """Find a tile's values: (pointer to them, their number, first of their places, True if they are
    candidates).

    If x itself is read, places have no meaning.
    """
    start = tile.to(tl.int64) * TILE
    begin, count = tl.load(spans + tile * 2), tl.load(spans + tile * 2 + 1)
    sifted = tl.load(found + 2) != 0
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


@triton.jit(do_not_specialize=["numel"])
def _count_kept(
    x, numel, spans, places, values, found, counts, TILE: tl.constexpr, SLOTS: tl.constexpr
):  # fmt: skip
    """Count, for a tile, the elements above the k-th largest magnitude, and those equal to it."""
    tile, threshold = tl.program_id(0), tl.load(found)
    source, count, _begin, _sifted = _source_of(x, numel, spans, values, found, tile, TILE)
    slot, larger, same = tl.arange(0, SLOTS), tl.zeros((SLOTS,), tl.int32), tl.zeros((SLOTS,), tl.int32)
    done = 0
    while done < count:
        above, equal = _kept_of(source, done + slot, count, threshold)
        larger, same, done = larger + above, same + equal, done + SLOTS
    tl.store(counts + tile, tl.sum(larger))
    tl.store(counts + tl.num_programs(0) + tile, tl.sum(same))


@triton.jit(do_not_specialize=["numel"])
def _write_kept(
    x, numel, spans, places, values, found, counts, indices,
    TILE: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the indices of a tile's kept elements, in order, after those of all earlier tiles. Ties go to the
    lowest index.
    """
    tile = tl.program_id(0)
    source, count, begin, sifted = _source_of(x, numel, spans, values, found, tile, TILE)
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

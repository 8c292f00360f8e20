"""Changes of 16-bit floats in units in the last place, coded by the exponents of the old numbers.

Bits of a float, as a sign and a magnitude, become an integer that ascends with the number. The difference
of new and old, modulo 2^16, is folded to 0, 1, 2, … for 0, -1, +1, …: the *change*. Sender and receiver both
have the old numbers. So the exponent of each puts its change into one of 16 classes, for which tables are
sent. `docs/engineering/wire-format.md` describes the layouts of the coded changes.

A change has a *symbol*, which stands for changes of about one size, and low bits that tell it from others of
that symbol. 0 to 7 are symbols of their own; each further doubling has four.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels.dispatch import contract
from gradwire.kernels.payload import Sound

CLASSES = 16
TILE = 2048
"""Elements of a tile of fields."""
MOST_ONES = 20
"""Ones of Rice's code after which a number follows as it is, in 32 bits."""
NO_CHANGE, EVERY = 14, 15
"""Upper halves of a class's byte in "runs" that are no parameter: no number changes; each change is sent."""
SYMBOLS = 60
"""Symbols of changes: 0 to 7, and four for each number of bits from 4 to 16."""
STATE_BITS = 9
"""Of a state. One bit more shortens codes by a thousandth, and doubles the time to make tables."""
STREAMS = 4
"""States that take turns from element to element, so that a processor need not wait for one of them."""
SPREAD = 323
"""States from one of a symbol to its next one: odd, and about 5/8 of all."""
LEVELS = np.array([each if each < 4 else 4 + (each & 3) << (each >> 2) - 1 for each in range(64)])
"""Sizes (64,) that weights of 6 bits stand for, relative to each other: steps of a quarter to a seventh."""


class Halves(NamedTuple):
    """Meaning of a number's bits: bits of its `mantissa` (7 in bfloat16, 10 in float16), and the exponent
    `base` at which classes begin. Class c has the exponent base - c; 0 has larger ones, 15 smaller ones.
    """

    mantissa: int
    base: int


def _fit_pair(new: Tensor, old: Tensor, halves: Halves, table: Tensor) -> None:
    _fit_old(table, old, halves, table)
    if new.shape != old.shape or new.dtype != torch.int16:
        raise ValueError(f"new numbers {tuple(new.shape)} {new.dtype} do not fit old ones {tuple(old.shape)}")


def _fit_old(words: Tensor, old: Tensor, halves: Halves, table: Tensor) -> None:
    if old.dtype != torch.int16 or old.dim() != 1 or table.shape != (CLASSES,) or table.dtype != torch.uint8:
        raise ValueError(f"old numbers {old.dtype} {tuple(old.shape)} or a table {tuple(table.shape)}")
    if halves.mantissa not in (7, 10) or words.dim() != 1:
        raise ValueError(f"no 16-bit float has a mantissa of {halves.mantissa} bits")


def _fit_tally(new: Tensor, old: Tensor, mantissa: int) -> None:
    _fit_pair(new, old, Halves(mantissa, 0), torch.empty(CLASSES, dtype=torch.uint8, device="meta"))


@contract(_fit_tally)
def tally_changes(new: Tensor, old: Tensor, mantissa: int) -> Tensor:
    """Count changes by the exponent of the old number and by symbol.

    `new` and `old` (n,) are int16: bits of floats. Returns (256, 60) int64: of each exponent, the number of
    changes of each symbol.

    >>> old = torch.tensor([1.0, 2.0, 2.0]).bfloat16().view(torch.int16)
    >>> new = torch.tensor([1.0, 2.0, 2.015625]).bfloat16().view(torch.int16)
    >>> tally_changes(new, old, 7)[127:129, :3]
    tensor([[1, 0, 0],
            [1, 0, 1]])
    """
    symbols = symbols_of(changes_of(new, old))[0]
    at = exponents_of(old, mantissa) * SYMBOLS + symbols
    table = torch.zeros(256 * SYMBOLS, dtype=torch.int64, device=old.device)
    return table.index_add_(0, at, torch.ones_like(symbols)).view(256, SYMBOLS)


@contract(_fit_pair)
def pack_runs(new: Tensor, old: Tensor, halves: Halves, table: Tensor) -> Tensor:
    """Code the changes from `old` to `new` (n,) int16 as runs, in words (k,) int64.

    `table` (16,) uint8 has the parameters of Rice's codes of each class. The upper half is that of gaps
    between changes, or `NO_CHANGE` or `EVERY`; the lower half is that of changes. A class of `NO_CHANGE` must
    have none.

    >>> old = torch.tensor([1.0, 1.0, 1.0]).bfloat16().view(torch.int16)
    >>> pack_runs(old + torch.tensor([0, 1, 0]).short(), old, Halves(7, 127), torch.full((16,), 224).byte())
    tensor([], dtype=torch.int64)
    """
    bits, place = 0, 0

    def put(value: int, parameter: int) -> None:
        nonlocal bits, place
        ones = min(value >> parameter, MOST_ONES)
        rest, width = (value, 32) if ones == MOST_ONES else (value & ((1 << parameter) - 1), parameter)
        bits |= (1 << ones) - 1 << place
        place += ones + (ones < MOST_ONES)
        bits |= rest << place
        place += width

    change, classes = changes_of(new, old).tolist(), classes_of(old, halves).tolist()
    parameters = [(each >> 4, each & 15) for each in table.tolist()]
    gaps: dict[int, int] = {}
    """Numbers of a class between an element that changes, by its place, and the next one."""
    following, counts = {}, dict.fromkeys(range(CLASSES), 0)
    for at in reversed(range(len(change))):
        kind = classes[at]
        if change[at]:
            gaps[at], counts[kind] = counts[kind], 0
        else:
            counts[kind] += 1
    following = counts
    for kind, (gap, _) in enumerate(parameters):
        if gap < NO_CHANGE:
            put(following[kind], gap)
    for at, (kind, value) in enumerate(zip(classes, change, strict=True)):
        gap, parameter = parameters[kind]
        if gap == EVERY:
            put(value, parameter)
        elif gap < NO_CHANGE and value:
            put(value - 1, parameter)
            put(gaps[at], gap)
    count = -(-place // 64)
    words = [(bits >> 64 * i) & (1 << 64) - 1 for i in range(count)]
    return torch.tensor([each - (each >> 63 << 64) for each in words], dtype=torch.int64, device=old.device)


@contract(_fit_old)
def add_runs(words: Tensor, old: Tensor, halves: Halves, table: Tensor) -> Sound:
    """Make the new numbers of the `old` (n,) int16 in place, from `words` and `table` as of `pack_runs`.

    Returns whether the words are such a code. If not, `old` may hold anything.
    """
    bits: int = sum((each & (1 << 64) - 1) << 64 * i for i, each in enumerate(words.tolist()))
    place = 0

    def get(parameter: int) -> int:
        nonlocal place
        ones = 0
        while ones < MOST_ONES and bits >> place + ones & 1:
            ones += 1
        width = 32 if ones == MOST_ONES else parameter
        place += ones + (ones < MOST_ONES)
        rest = bits >> place & (1 << width) - 1
        place += width
        found: int = rest if ones == MOST_ONES else ones << parameter | rest
        return found

    parameters = [(each >> 4, each & 15) for each in table.tolist()]
    left = [get(gap) if gap < NO_CHANGE else 0 for gap, _ in parameters]
    found = []
    for kind in classes_of(old, halves).tolist():
        gap, parameter = parameters[kind]
        value = 0
        if gap == EVERY:
            value = get(parameter)
        elif gap < NO_CHANGE:
            left[kind] -= 1
            if left[kind] < 0:
                value, left[kind] = get(parameter) + 1, get(gap)
        found.append(value)
    is_sound = -(-place // 64) == words.numel() and not bits >> place and not any(left)
    if not is_sound or max(found, default=0) >= 1 << 16:
        return False
    old.copy_(changed(old, torch.tensor(found, dtype=torch.int64, device=old.device)))
    return True


@contract(_fit_pair)
def pack_widths(new: Tensor, old: Tensor, halves: Halves, table: Tensor) -> Tensor:
    """Code the changes from `old` to `new` (n,) int16 as fields of fixed widths, in words (k,) int32.

    `table` (16,) uint8 has the width of each class, 0 to 16 bits. Tiles of `TILE` elements begin with a whole
    word. Changes that do not fit into their fields are listed with their places in the tile. k is even, with
    a zero at the end where needed.

    >>> old = torch.tensor([1.0, 1.0, 1.0]).bfloat16().view(torch.int16)
    >>> pack_widths(old + torch.tensor([0, 1, 0]).short(), old, Halves(7, 127), torch.full((16,), 2).byte())
    tensor([1, 0, 8, 0], dtype=torch.int32)
    """
    change = changes_of(new, old)
    width, start, words_of_tile = _fields(old, halves, table)
    is_listed = change >> width > 0
    first = 2 * words_of_tile.numel()
    words = torch.zeros(first + int(words_of_tile.sum()) + 2, dtype=torch.int64, device=old.device)
    value = torch.where(is_listed, 0, change) << (start & 31)
    words.index_add_(0, first + (start >> 5), value & 0xFFFFFFFF)
    words.index_add_(0, first + (start >> 5) + 1, value >> 32)
    listed = is_listed.nonzero().view(-1)
    tiles = listed // TILE
    of_tile = torch.zeros_like(words_of_tile).index_add_(0, tiles, torch.ones_like(listed))
    words[0:first:2], words[1:first:2] = words_of_tile.cumsum(0), of_tile.cumsum(0)
    whole = torch.cat([words[:-2], listed % TILE | change[listed] << 16]).to(torch.int32)
    return torch.nn.functional.pad(whole, (0, whole.numel() % 2))


@contract(_fit_old)
def add_widths(words: Tensor, old: Tensor, halves: Halves, table: Tensor) -> Sound:
    """Make the new numbers of the `old` (n,) int16 in place, from `words` and `table` as of `pack_widths`.

    Returns whether the words are such a code. If not, `old` may hold anything.
    """
    width, start, words_of_tile = _fields(old, halves, table)
    tiles = words_of_tile.numel()
    first, after = 2 * tiles, 2 * tiles + int(words_of_tile.sum())
    wide = words.long() & 0xFFFFFFFF
    if wide.numel() < after or not torch.equal(wide[0:first:2], words_of_tile.cumsum(0)):
        return False
    ends = wide[1:first:2]
    of_tile, count = ends.diff(prepend=ends.new_zeros(1)), int(ends[-1]) if tiles else 0
    listed, rest = wide[after : after + count], wide[after + count :]
    if wide.numel() != after + count + (after + count) % 2 or bool((of_tile < 0).any() | rest.any()):
        return False
    at = torch.arange(tiles, device=old.device).repeat_interleave(of_tile) * TILE + (listed & 0xFFFF)
    if bool(((listed & 0xFFFF) >= TILE).any() | (at >= old.numel()).any() | (at.diff() <= 0).any()):
        return False
    padded = torch.cat([wide[:after], wide.new_zeros(2)])
    low, high = padded[first + (start >> 5)], padded[first + (start >> 5) + 1]
    change = ((low >> (start & 31)) | (high << (32 - (start & 31)))) & ((1 << width) - 1)
    change[at] = listed >> 16
    old.copy_(changed(old, change))
    return True


def _fit_states(new: Tensor, old: Tensor, halves: Halves, weights: Tensor) -> None:
    _fit_pair(new, old, halves, torch.empty(CLASSES, dtype=torch.uint8, device="meta"))
    if weights.shape != (CLASSES, SYMBOLS) or weights.dtype != torch.uint8 or bool((weights >= 64).any()):
        raise ValueError(f"weights are ({CLASSES}, {SYMBOLS}) uint8 below 64, not {tuple(weights.shape)}")


@contract(_fit_states)
def pack_states(new: Tensor, old: Tensor, halves: Halves, weights: Tensor) -> Tensor:
    """Code the changes from `old` to `new` (n,) int16 by asymmetric numeral systems, in words (k,) int64.

    They are tabled (Duda, "Asymmetric numeral systems", 2013, arXiv:1311.2540). `weights` (16, 60) uint8,
    below 64, say about how often each symbol occurs in a class. Each that occurs must have a weight. Where
    none but the first symbol has one, no number of the class changes.

    >>> old = torch.tensor([1.0, 1.0, 1.0]).bfloat16().view(torch.int16)
    >>> weights = torch.zeros(16, 60, dtype=torch.uint8)
    >>> weights[0, 0], weights[0, 2] = 2, 1
    >>> pack_states(old + torch.tensor([0, 1, 0]).short(), old, Halves(7, 127), weights).shape
    torch.Size([3])
    """
    listed = listed_symbols(weights.cpu().numpy()).tolist()
    lists = [row[:count] for row, count in zip(weights.tolist(), listed, strict=True)]
    inverse: list[dict[tuple[int, int], tuple[int, int, int]]] = []
    """By class: from a symbol and the state after it to the state before it, and bits and their number."""
    for each in lists:
        entries = enumerate(_states(shares_of(np.array(each)).tolist() if each else [1 << STATE_BITS]))
        inverse.append({
            (symbol, base + rest): (state, rest, bits)
            for state, (symbol, base, bits) in entries
            for rest in range(1 << bits)
        })  # fmt: skip
    states, stream, length = [0] * STREAMS, 0, 0
    change = changes_of(new, old)
    symbols, spared = symbols_of(change)
    coded = (classes_of(old, halves), symbols, change & (1 << spared) - 1, spared)
    columns = [each.tolist() for each in coded]
    for at in reversed(range(old.numel())):
        kind, symbol, low, width = (each[at] for each in columns)
        turn = at % STREAMS
        states[turn], rest, bits = inverse[kind][symbol, states[turn]]
        stream = (stream << width | low) << bits | rest
        length += width + bits
    head = [number for each in lists for number in _compact(each)]
    front = sum(each << 6 * i for i, each in enumerate(head))
    head_words, words = -(-6 * len(head) // 64), -(-length // 64)
    skipped = 64 * words - length
    first = sum(each << STATE_BITS * i for i, each in enumerate(states)) | skipped << STREAMS * STATE_BITS
    whole = first | front << 64 | stream << skipped + 64 * (1 + head_words)
    count = 1 + head_words + words
    found = [(whole >> 64 * i) & (1 << 64) - 1 for i in range(count)]
    return torch.tensor([each - (each >> 63 << 64) for each in found], dtype=torch.int64, device=old.device)


@contract(_fit_old)
def add_states(words: Tensor, old: Tensor, halves: Halves, table: Tensor) -> Sound:
    """Make the new numbers of the `old` (n,) int16 in place, from `words` as of `pack_states`.

    `table` (16,) uint8 is `listed_symbols` of the weights. Returns whether the words are such a code. If not,
    `old` may hold anything.
    """
    whole: int = sum((each & (1 << 64) - 1) << 64 * i for i, each in enumerate(words.tolist()))
    end, place = 64 * words.numel(), 64

    def get(bits: int) -> int:
        nonlocal place
        place += bits
        return whole >> place - bits & (1 << bits) - 1

    entries = []
    for listed in table.tolist():
        weights: list[int] = []
        while len(weights) < listed and place < end:
            weights.append(get(6))
            weights += [0] * (get(6) if not weights[-1] else 0)
        if len(weights) != listed or listed > SYMBOLS or (listed and not any(weights)):
            return False
        entries.append(_states(shares_of(np.array(weights)).tolist() if listed else [1 << STATE_BITS]))
    if get(-place % 64) or whole >> STREAMS * STATE_BITS + 6 & (1 << 64 - STREAMS * STATE_BITS - 6) - 1:
        return False
    states = [whole >> STATE_BITS * i & (1 << STATE_BITS) - 1 for i in range(STREAMS)]
    if get(whole >> STREAMS * STATE_BITS & 63):
        return False
    found = []
    for at, kind in enumerate(classes_of(old, halves).tolist()):
        symbol, base, bits = entries[kind][states[at % STREAMS]]
        states[at % STREAMS] = base + get(bits)
        spared = max(0, symbol // 4 - 1)
        upper = symbol if symbol < 4 else 4 + symbol % 4
        found.append(upper << spared | get(spared))
    if place != end or any(states):
        return False
    old.copy_(changed(old, torch.tensor(found, dtype=torch.int64, device=old.device)))
    return True


def _states(shares: Sequence[int]) -> list[tuple[int, int, int]]:
    """Of each state: its symbol, the least state that follows, and how many bits choose among those."""
    size = 1 << STATE_BITS
    symbols, at = [0] * size, 0
    for symbol, share in enumerate(shares):
        for _ in range(share):
            symbols[at] = symbol
            at = (at + SPREAD) % size
    next_one, found = list(shares), []
    for symbol in symbols:
        bits = STATE_BITS + 1 - next_one[symbol].bit_length()
        found.append((symbol, (next_one[symbol] << bits) - size, bits))
        next_one[symbol] += 1
    return found


def _compact(weights: Sequence[int]) -> list[int]:
    """The list in which zeros are one zero, and how many more there are."""
    found, at = [], 0
    while at < len(weights):
        found.append(weights[at])
        at += 1
        if not found[-1]:
            more = next((i for i, each in enumerate(weights[at:]) if each), len(weights) - at)
            found.append(more)
            at += more
    return found


def listed_symbols(weights: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """How many of the weights (16, 60) are listed (16,): to the last one; none in classes without changes."""
    places = np.where(weights > 0, np.arange(SYMBOLS), 0).max(1)
    return np.where(places, places + 1, 0).astype(np.uint8)


def shares_of(weights: NDArray[np.integer]) -> NDArray[np.int64]:
    """Shares (…, n) of all states that symbols of these `weights` (…, n) have; one at least, where not 0.

    The first of the largest has what is over. Where all weights are 0, nothing else is meant by it.
    """
    sizes = LEVELS[weights]
    shares: NDArray[np.int64] = (sizes << STATE_BITS) // np.maximum(sizes.sum(-1, keepdims=True), 1)
    shares = np.maximum(shares, sizes > 0)
    largest = sizes.argmax(-1)[..., None]
    left = (1 << STATE_BITS) - shares.sum(-1, keepdims=True)
    np.put_along_axis(shares, largest, np.take_along_axis(shares, largest, -1) + left, -1)
    return shares


def symbols_of(change: Tensor) -> tuple[Tensor, Tensor]:
    """Symbols (n,) of the changes (n,) int64, and how many low bits tell each from others of its symbol."""
    bits = (change[:, None] >= 1 << torch.arange(16, device=change.device)).sum(1)
    spared = (bits - 3).clamp(min=0)
    return torch.where(change < 4, change, 4 * (bits - 2) + (change >> spared & 3)), spared


def _fields(old: Tensor, halves: Halves, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Width and first bit of each element's field, counted from the first tile's, and words of each tile."""
    width = table.long()[classes_of(old, halves)]
    padded = torch.nn.functional.pad(width, (0, -old.numel() % TILE)).view(-1, TILE)
    ends = padded.cumsum(1)
    words = (ends[:, -1] + 31) // 32
    starts = ends - padded + 32 * (words.cumsum(0) - words)[:, None]
    return width, starts.view(-1)[: old.numel()], words


def changes_of(new: Tensor, old: Tensor) -> Tensor:
    """Changes (n,) int64, 0 to 65535, from the bits `old` to the bits `new`, both (n,) int16."""
    step = (_ascending(new) - _ascending(old)).to(torch.int16).long()
    return ((step << 1) ^ (step >> 15)) & 0xFFFF


def changed(old: Tensor, change: Tensor) -> Tensor:
    """New bits (n,) int16 of the bits `old`; inverse of `changes_of`."""
    step = (change >> 1) ^ -(change & 1)
    return _ascending((_ascending(old) + step).to(torch.int16)).to(torch.int16)


def _ascending(bits: Tensor) -> Tensor:
    """Integers that ascend with the floats of these `bits`, int64. Applied twice it changes nothing."""
    wide = bits.long()
    return wide ^ (wide >> 15 & 0x7FFF)


def exponents_of(bits: Tensor, mantissa: int) -> Tensor:
    """Exponents (n,) int64 of floats of these `bits` (n,) int16."""
    return (bits.long() >> mantissa) & ((1 << 15 - mantissa) - 1)


def classes_of(bits: Tensor, halves: Halves) -> Tensor:
    """Classes (n,) int64 of floats of these `bits` (n,) int16."""
    return (halves.base - exponents_of(bits, halves.mantissa)).clamp(0, CLASSES - 1)

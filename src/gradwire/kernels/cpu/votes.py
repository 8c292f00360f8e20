"""Ballots of signs, their tally by bit-sliced counters, and the winners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.cpu.jit import kernel
from gradwire.kernels.cpu.prepared import prepared
from gradwire.kernels.cpu.signs import pack_flags
from gradwire.kernels.cpu.sums import LANES, add_magnitudes, total
from gradwire.kernels.layouts import Blocks

_BLOCK = 4096  # elements; a multiple of a group
_GROUP = 64
_ONE, _ALL = np.uint64(1), np.uint64(0xFFFFFFFFFFFFFFFF)


def cast_votes(x: Tensor, sizes: Sequence[int], groups: int, rows: Tensor, means: Tensor) -> None:
    """Write ballots and means as the contract says, in one pass over x."""
    bounds = Blocks(tuple(sizes)).bounds
    _cast_votes(x.numpy(), bounds, groups, rows.numpy().view(np.uint64), means.numpy())


def tally(ballots: Tensor, groups: int) -> Tensor:
    """Count as the contract says, 64 elements at a time: each word holds one binary digit of 64 counters."""
    out = torch.empty(2, groups, dtype=torch.int64, device=ballots.device)
    _tally(ballots.numpy().view(np.uint64), groups, out.numpy().view(np.uint64))
    return out


def apply_votes(results: Tensor, sizes: Sequence[int], levels: Tensor, out: Tensor) -> None:
    """Apply the results as the contract says, group by group."""
    bounds = Blocks(tuple(sizes)).bounds
    _apply_votes(results.numpy().view(np.uint64), bounds, levels.numpy(), out.numpy())


@kernel
def _any(x: Any) -> Any:
    found = False
    for i in range(x.size):
        found |= x[i] != 0
    return found


@kernel
def _cast_block(x: Any, first: Any, flags: Any, bits: Any, groups: Any, rows: Any) -> None:
    """Write the ballots of up to _BLOCK elements x to `rows`, from group number `first` on; a row has
    `groups` groups.

    `flags` (_BLOCK,) and `bits` (_BLOCK / 8,) are scratch memory.
    """
    count = (x.size + _GROUP - 1) // _GROUP
    bits[8 * count - 8 : 8 * count] = 0
    pack_flags(x, flags, bits[: (x.size + 7) // 8])
    words = bits.view(np.uint64)
    for j in range(count):
        row, place = (first + j) // groups, (first + j) % groups
        rows[row, place] = words[j]
        if _any(x[_GROUP * j : _GROUP * (j + 1)]):
            rows[row, groups + place // 64] |= _ONE << np.uint64(place % 64)


@prepared("float32[::1], int64[::1], int64, uint64[:, ::1], float32[::1]")
@kernel
def _cast_votes(x: Any, bounds: Any, groups: Any, rows: Any, means: Any) -> None:
    """Write the ballots of x and the mean magnitude of each part.

    Args:
        x: float32 (numel,).
        bounds: (parts + 1,), ends of the parts. Every part begins a new group of 64 elements.
        groups: groups per row.
        rows: uint64 (r, groups + ⌈groups/64⌉), zeros before: a word of signs per group, then a bit per group
            that says whether any of its elements is not 0.
        means: float32 (parts,), written.
    """
    flags, bits, lanes = np.zeros(_BLOCK, np.uint8), np.zeros(_BLOCK // 8, np.uint8), np.zeros(LANES)
    first = 0
    for part in range(bounds.size - 1):
        lanes[:] = 0
        for start in range(bounds[part], bounds[part + 1], _BLOCK):
            here = x[start : min(start + _BLOCK, bounds[part + 1])]
            _cast_block(here, first, flags, bits, groups, rows)
            add_magnitudes(here, lanes)
            first += (here.size + _GROUP - 1) // _GROUP
        means[part] = np.float32(total(lanes) / max(bounds[part + 1] - bounds[part], 1))


@kernel
def _count(ballots: Any, groups: Any, j: Any, counters: Any) -> Any:
    """Count the ones in each bit of word j over all ballots that vote on it; returns the number of voters.

    `counters` (digits,) uint64 has the binary digits of the 64 counts, the lowest digit first.
    """
    voters = 0
    counters[:] = 0
    for r in range(ballots.shape[0]):
        if (ballots[r, groups + j // 64] >> np.uint64(j % 64)) & _ONE:
            voters += 1
            carry = ballots[r, j]
            for k in range(counters.size):
                both = counters[k] & carry
                counters[k] ^= carry
                carry = both
    return voters


@prepared("uint64[:, ::1], int64, uint64[:, ::1]")
@kernel
def _tally(ballots: Any, groups: Any, out: Any) -> None:
    """out (2, groups) uint64: bits with more ones than zeros among the voters, and bits with fewer."""
    digits = 1
    while (1 << digits) <= ballots.shape[0]:
        digits += 1
    counters = np.zeros(digits, np.uint64)
    for j in range(groups):
        voters = _count(ballots, groups, j, counters)
        more, same = np.uint64(0), _ALL
        for k in range(digits - 1, -1, -1):
            if (voters // 2 >> k) & 1:
                same &= counters[k]
            else:
                more |= same & counters[k]
                same &= ~counters[k]
        out[0, j] = more
        # Of an odd number of votes there is no half.
        out[1, j] = ~more if voters & 1 else ~(more | same)


@kernel
def _elect(out: Any, more: Any, fewer: Any, level: Any) -> None:
    for i in range(out.size):
        place = np.uint64(i)
        vote = np.int32((more >> place) & _ONE) - np.int32((fewer >> place) & _ONE)
        out[i] = level * np.float32(vote)


@prepared(
    "uint64[:, :, ::1], int64[::1], float32[::1], float32[::1]",
    "uint64[:, :, :], int64[::1], float32[::1], float32[::1]",
)
@kernel
def _apply_votes(results: Any, bounds: Any, levels: Any, out: Any) -> None:
    """float32: out = ±levels[part], or 0 in a tie, from `results` (r, 2, groups) uint64."""
    number, groups = 0, results.shape[2]
    for part in range(bounds.size - 1):
        for start in range(bounds[part], bounds[part + 1], _GROUP):
            row, place = number // groups, number % groups
            here = out[start : min(start + _GROUP, bounds[part + 1])]
            _elect(here, results[row, 0, place], results[row, 1, place], levels[part])
            number += 1

"""The planes of `gradwire.kernels.elias_fano` in plain torch: the oracle, and other devices' path."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.elias_fano import BLOCK, DECODING, ENCODING, GROUP, ORDER, PATTERNS, Planes

_LONGEST_PLACE = 7


def _bits(numbers: Tensor, width: int) -> Tensor:
    """(numbers, width) bits, the lowest first."""
    return (numbers.view(-1, 1) >> torch.arange(width, device=numbers.device)) & 1


def _numbers(bits: Tensor) -> Tensor:
    """Inverse of `_bits`."""
    return (bits << torch.arange(bits.shape[1], device=bits.device)).sum(1)


def _words(bits: Tensor) -> Tensor:
    """Bits in a row as int32 words, filled up with zeros."""
    return _numbers(torch.nn.functional.pad(bits, (0, -bits.numel() % 32)).view(-1, 32)).to(torch.int32)


def pack_elias_fano(indices: Tensor, planes: Planes) -> Tensor:
    """Ascending, distinct `indices` (count,) as (words,) int32."""
    device = indices.device
    rank = torch.arange(planes.count, device=device)
    above_rank = indices.long() - rank
    row = torch.zeros(planes.blocks * BLOCK, dtype=torch.int64, device=device)
    row[(above_rank >> planes.low_bits) + rank] = 1
    code = torch.from_numpy(ENCODING).to(device, torch.int64)[_numbers(row.view(-1, BLOCK))]
    places = _bits(code >> 9, _LONGEST_PLACE)
    used = torch.arange(_LONGEST_PLACE, device=device) < (code >> 6 & 7).view(-1, 1)
    words = torch.zeros(planes.words, dtype=torch.int32, device=device)
    parts = (_bits(above_rank, planes.low_bits).view(-1), _bits(code, GROUP).view(-1), places[used])
    for start, bits in zip(planes.starts, parts, strict=True):
        part = _words(bits)
        words[start : start + part.numel()] = part
    return words


def unpack_elias_fano(words: Tensor, planes: Planes) -> Tensor | None:
    """Indices (count,) int64, or None where the words are no packed indices."""
    bits = _bits(words, 32).view(-1)
    low, groups, places = (bits[32 * start :] for start in planes.starts)
    patterns = _patterns(groups[: GROUP * planes.blocks].view(-1, GROUP), places, planes.count)
    if patterns is None:
        return None
    ones = _bits(patterns, BLOCK).view(-1).nonzero().view(-1)
    if ones.numel() != planes.count:
        return None
    rank = torch.arange(planes.count, device=words.device)
    below = _numbers(low[: planes.count * planes.low_bits].view(planes.count, planes.low_bits))
    indices = ((ones - rank) << planes.low_bits) + below + rank
    good = (indices.diff() > 0).all() and (indices < planes.numel).all()
    return indices if good else None


def _patterns(groups: Tensor, places: Tensor, most: int) -> Tensor | None:
    """What the blocks hold, or None where they mean nothing or take more than `most` bits of `places`."""
    entry = torch.from_numpy(DECODING).to(groups.device, torch.int64)[_numbers(groups)]
    width = entry >> 11
    stop = width.cumsum(0)
    if int(width.sum()) > most:
        return None
    padded = torch.nn.functional.pad(places, (0, _LONGEST_PLACE))
    at = torch.arange(_LONGEST_PLACE, device=groups.device)
    bits = padded[(stop - width).view(-1, 1) + at] * (at < width.view(-1, 1))
    position = (entry & 2047) + _numbers(bits)
    if (position >= PATTERNS).any():
        return None
    return torch.tensor(ORDER, device=groups.device)[position]

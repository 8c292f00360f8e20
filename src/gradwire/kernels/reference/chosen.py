"""Chosen elements as one payload of places and values, and places as Elias and Fano's planes; and back."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.dispatch import checked
from gradwire.kernels.payload import BLOCK, DECODING, ENCODING, GROUP, ORDER, PATTERNS, Planes, Shape
from gradwire.kernels.reference.places import add_at, index_type, pack_bits, unpack_bits

_LONGEST_PLACE = 7


def _has_elements(x: Tensor, shape: Shape) -> None:
    if x.numel() != shape.planes.numel:
        raise ValueError(f"{x.numel()} elements where the payload is for {shape.planes.numel}")


def _can_take(x: Tensor, indices: Tensor, shape: Shape) -> None:
    _has_elements(x, shape)
    if indices.numel() != shape.planes.count:
        raise ValueError(f"{indices.numel()} indices do not fit a payload for {shape.planes.count}")


def _can_add(payload: Tensor, shape: Shape, out: Tensor, weight: float = 1.0) -> None:
    _has_elements(out, shape)
    if payload.numel() != shape.bytes or payload.dtype != torch.uint8:
        raise ValueError(
            f"a payload of {payload.numel()} bytes, {payload.dtype}, where {shape.bytes} are due"
        )


def _has_count(indices: Tensor, planes: Planes) -> None:
    if indices.numel() != planes.count:
        raise ValueError(f"{indices.numel()} indices do not fit a layout for {planes.count}")


def _has_words(packed: Tensor, planes: Planes) -> None:
    if packed.numel() != planes.words:
        raise ValueError(f"{packed.numel()} words do not fit a layout of {planes.words}")


@checked(_can_take)
def take_chosen(x: Tensor, indices: Tensor, shape: Shape) -> Tensor:
    """The payload (bytes,) uint8 of x (n,) at ascending `indices` (count,), taken out of x.

    Values are rounded to the payload's type and saturated at its largest number; Inf stays Inf, NaN stays
    NaN. What rounding drops stays in x. `ValueError` when the indices are out of order or range.

    >>> planes = Planes(count=1, numel=3, low_bits=0)
    >>> shape = Shape("list", planes, words=1, start=8, bytes=12, dtype=torch.float16)
    >>> x = torch.tensor([1.0, 2.0, 3.0])
    >>> payload = take_chosen(x, torch.tensor([1]), shape)
    >>> payload.tolist(), x
    ([1, 0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0], tensor([1., 0., 3.]))
    """
    if not _ascends(indices, shape.planes.numel):
        raise ValueError(f"indices must ascend within 0 … {shape.planes.numel - 1}, without repeats")
    values = _narrowed(x[indices.long()], shape.dtype)
    payload = torch.zeros(shape.bytes, dtype=torch.uint8, device=x.device)
    words, room = shape.parts(payload)
    words.copy_(_packed(indices, shape))
    room.copy_(values)
    add_at(x, indices, values.to(x.dtype), -1.0)
    return payload


@checked(_can_add)
def add_chosen(payload: Tensor, shape: Shape, out: Tensor, weight: float = 1.0) -> bool:
    """Add weight · values of a payload (bytes,) to `out` (n,).

    False, and nothing is added, for words that stand for no choice of `count` elements.

    >>> planes = Planes(count=1, numel=3, low_bits=0)
    >>> shape = Shape("list", planes, words=1, start=8, bytes=12, dtype=torch.float16)
    >>> payload, out = take_chosen(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1]), shape), torch.ones(3)
    >>> add_chosen(payload, shape, out, 0.5), out
    (True, tensor([1., 2., 1.]))
    """
    words, values = shape.parts(payload)
    indices = _unpacked(words, shape)
    if indices is None:
        return False
    add_at(out, indices, values.to(out.dtype), weight)
    return True


@checked(_has_count)
def pack_elias_fano(indices: Tensor, planes: Planes) -> Tensor:
    """Ascending, distinct `indices` (count,) within 0 … numel - 1 as (words,) int32, laid out as `planes`.

    `ValueError` when they are out of order or range so that a kernel would write where it must not.

    >>> pack_elias_fano(torch.tensor([1, 20, 40]), Planes(count=3, numel=50, low_bits=3))
    tensor([409,  20,   4], dtype=torch.int32)
    """
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


@checked(_has_words)
def unpack_elias_fano(packed: Tensor, planes: Planes) -> Tensor | None:
    """The indices (count,) that `pack_elias_fano` laid out as `planes`, or None where it cannot have done so.

    int32 if numel ≤ 2^31, else int64.

    >>> planes = Planes(count=3, numel=50, low_bits=3)
    >>> unpack_elias_fano(pack_elias_fano(torch.tensor([1, 20, 40]), planes), planes)
    tensor([ 1, 20, 40], dtype=torch.int32)
    """
    bits = _bits(packed, 32).view(-1)
    low, groups, places = (bits[32 * start :] for start in planes.starts)
    patterns = _patterns(groups[: GROUP * planes.blocks].view(-1, GROUP), places, planes.count)
    if patterns is None:
        return None
    ones = _bits(patterns, BLOCK).view(-1).nonzero().view(-1)
    if ones.numel() != planes.count:
        return None
    rank = torch.arange(planes.count, device=packed.device)
    below = _numbers(low[: planes.count * planes.low_bits].view(planes.count, planes.low_bits))
    indices = ((ones - rank) << planes.low_bits) + below + rank
    return indices.to(index_type(planes.numel)) if _ascends(indices, planes.numel) else None


def _ascends(indices: Tensor, numel: int) -> bool:
    """Whether they ascend within 0 … numel - 1, without repeats."""
    if indices.numel() == 0:
        return True
    return bool((indices.diff() > 0).all()) and int(indices[0]) >= 0 and int(indices[-1]) < numel


def _narrowed(values: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == values.dtype:
        return values
    limit = torch.finfo(dtype).max
    return torch.where(values.isinf(), values, values.clamp(-limit, limit)).to(dtype)


def _packed(indices: Tensor, shape: Shape) -> Tensor:
    if shape.form == "list":
        return indices.int()
    if shape.form == "bitmap":
        return pack_bits(indices, shape.words)
    return pack_elias_fano(indices, shape.planes)


def _unpacked(words: Tensor, shape: Shape) -> Tensor | None:
    if shape.form == "coded":
        return unpack_elias_fano(words, shape.planes)
    found = words if shape.form == "list" else unpack_bits(words, shape.planes.count)
    good = found.numel() == shape.planes.count and _ascends(found, shape.planes.numel)
    return found if good else None


def _bits(numbers: Tensor, width: int) -> Tensor:
    """(numbers, width) bits, the lowest first."""
    return (numbers.view(-1, 1) >> torch.arange(width, device=numbers.device)) & 1


def _numbers(bits: Tensor) -> Tensor:
    """Inverse of `_bits`."""
    return (bits << torch.arange(bits.shape[1], device=bits.device)).sum(1)


def _words(bits: Tensor) -> Tensor:
    """Bits in a row as int32 words, filled up with zeros."""
    return _numbers(torch.nn.functional.pad(bits, (0, -bits.numel() % 32)).view(-1, 32)).to(torch.int32)


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

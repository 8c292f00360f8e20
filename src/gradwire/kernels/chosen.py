"""Payloads of chosen elements, as places and values: encode, decode, and Elias and Fano's planes of places.

Nothing here reads a number on the host, and no size depends on the data: masks are replaced by running sums.
So the indices to encode are not checked; selectors promise that they ascend and are in range. Kernels on the
CPU, where a check costs nothing, raise `ValueError` for others. Elsewhere the ranks that receive such a
payload find it invalid.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from gradwire.kernels.dispatch import contract
from gradwire.kernels.flagged import require_mark
from gradwire.kernels.payload import (
    BLOCK,
    DECODING,
    ENCODING,
    GROUP,
    ORDER,
    PATTERNS,
    Planes,
    Shape,
    Sound,
    marked,
)
from gradwire.kernels.places import add_at, choice, ones, pack_bits, unpack_bits

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


def _has_words(packed: Tensor, planes: Planes, mark: Tensor | None = None) -> None:
    require_mark(mark)
    if packed.numel() != planes.words:
        raise ValueError(f"{packed.numel()} words do not fit a layout of {planes.words}")


@contract(_can_take)
def take_chosen(x: Tensor, indices: Tensor, shape: Shape) -> Tensor:
    """Take x (n,) at ascending `indices` (count,) out of x; returns them as a payload (bytes,) uint8.

    Values are rounded to the payload's type and saturated at its largest number. Inf stays Inf and NaN stays
    NaN. The rounding errors stay in x, which is 0 elsewhere at `indices`. Raises `ValueError` on the CPU if
    indices are out of order or range.

    >>> planes = Planes(count=1, numel=3, low_bits=0)
    >>> shape = Shape(words=1, count=1, dtype=torch.float16, form="list", planes=planes)
    >>> x = torch.tensor([1.0, 2.0, 3.0])
    >>> payload = take_chosen(x, torch.tensor([1]), shape)
    >>> payload.tolist(), x
    ([1, 0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0], tensor([1., 0., 3.]))
    """
    values = saturating_cast(x[indices.long()], shape.dtype)
    payload = torch.zeros(shape.bytes, dtype=torch.uint8, device=x.device)
    words, room = shape.parts(payload)
    words.copy_(_packed(indices, shape))
    room.copy_(values)
    add_at.plain(x, indices, values.to(x.dtype), -1.0)
    return payload


@contract(_can_add)
def add_chosen(payload: Tensor, shape: Shape, out: Tensor, weight: float = 1.0) -> Sound:
    """Add weight · values of a payload (bytes,) to `out` (n,) at the payload's places.

    Returns False, and adds nothing, if the payload's words are no `count` ascending places below n.

    >>> planes = Planes(count=1, numel=3, low_bits=0)
    >>> shape = Shape(words=1, count=1, dtype=torch.float16, form="list", planes=planes)
    >>> payload, out = take_chosen(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1]), shape), torch.ones(3)
    >>> add_chosen(payload, shape, out, 0.5), out
    (True, tensor([1., 2., 1.]))
    """
    words, values = shape.parts(payload)
    indices, sound = _unpacked(words, shape)
    values = values.to(out.dtype)
    add_at.plain(
        out, indices, torch.where(sound, values, 0.0) if isinstance(sound, Tensor) else values, weight
    )
    return sound


def _can_average(
    payloads: Tensor, shape: Shape, out: Tensor, weight: float, mark: Tensor | None = None
) -> None:
    _has_elements(out, shape)
    require_mark(mark)
    if payloads.dim() != 2 or payloads.shape[1] != shape.bytes or payloads.dtype != torch.uint8:
        raise ValueError(f"payloads {tuple(payloads.shape)}, {payloads.dtype}, of {shape.bytes} bytes each")


@contract(_can_average)
def average_chosen(
    payloads: Tensor, shape: Shape, out: Tensor, weight: float, mark: Tensor | None = None
) -> Tensor | Literal[True]:
    """Decode `payloads` (rows, bytes) into out (n,): weight · the sum of their values, in the order of rows.

    Rows whose words are no valid choice of places are left out. Returns a bool (): True unless the words of
    such a row are not all zeros. A rank whose encoder has failed sends zeros. A CPU kernel returns Python's
    `True`. With `mark` (1,) int32, the result is True, and the mark becomes 1 instead.

    >>> planes = Planes(count=1, numel=3, low_bits=0)
    >>> shape = Shape(words=1, count=1, dtype=torch.float16, form="list", planes=planes)
    >>> payload, out = take_chosen(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1]), shape), torch.ones(3)
    >>> average_chosen(torch.stack([payload, payload]), shape, out, 0.5), out
    (True, tensor([0., 2., 0.]))
    """
    out.zero_()
    sound = [add_chosen(payload, shape, out, weight) for payload in payloads]
    known = [each if isinstance(each, Tensor) else torch.tensor(each, device="cpu") for each in sound]
    words = payloads.view(torch.int32)[:, : shape.words]
    return marked((torch.stack(known) | ~words.any(1)).all(), mark)


@contract(_has_count)
def pack_elias_fano(indices: Tensor, planes: Planes) -> Tensor:
    """Pack ascending, distinct `indices` (count,) within 0 … numel - 1 into (words,) int32, laid out as
    `planes`.

    Raises `ValueError` on the CPU if indices are so far out of order or range that a kernel would write
    elsewhere.

    >>> pack_elias_fano(torch.tensor([1, 20, 40]), Planes(count=3, numel=50, low_bits=3))
    tensor([409,  20,   4], dtype=torch.int32)
    """
    device = indices.device
    rank = torch.arange(planes.count, device=device)
    above_rank = indices.long() - rank
    row = torch.zeros(planes.blocks * BLOCK, dtype=torch.int64, device=device)
    row.index_fill_(0, (above_rank >> planes.low_bits) + rank, 1)
    code = _tables(device)[0][_numbers(row.view(-1, BLOCK))]
    words = torch.zeros(planes.words, dtype=torch.int32, device=device)
    places = _in_a_row(_bits(code >> 9, _LONGEST_PLACE), code >> 6 & 7, planes.count)
    parts = (_bits(above_rank, planes.low_bits).view(-1), _bits(code, GROUP).view(-1), places)
    for start, bits in zip(planes.starts, parts, strict=True):
        part = _words(bits)
        words[start : start + part.numel()] = part
    return words


@contract(_has_words)
def unpack_elias_fano(packed: Tensor, planes: Planes, mark: Tensor | None = None) -> tuple[Tensor, Sound]:
    """Unpack the indices (count,) that `pack_elias_fano` laid out as `planes`; also returns whether they are
    accepted.

    Indices are int32 if numel ≤ 2^31, else int64. If the words are no valid choice, the indices are 0 … count
    - 1. That is accepted if all words are zeros: a rank whose encoder has failed sends them, and its row of
    the status vote tells. With `mark` (1,) int32, the second result is True, and the mark becomes 1 if they
    are not accepted.

    >>> planes = Planes(count=3, numel=50, low_bits=3)
    >>> unpack_elias_fano(pack_elias_fano(torch.tensor([1, 20, 40]), planes), planes)
    (tensor([ 1, 20, 40], dtype=torch.int32), True)
    """
    indices, sound = _unpacked_planes(packed, planes)
    return indices, marked(sound | ~packed.any(), mark)


def saturating_cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` in `dtype`, saturated at its largest number; Inf stays Inf and NaN stays NaN.

    >>> saturating_cast(torch.tensor([1.0, 1e6, torch.inf]), torch.float16)
    tensor([1.0000e+00, 6.5504e+04,        inf], dtype=torch.float16)
    """
    if dtype == values.dtype:
        return values
    limit = torch.finfo(dtype).max
    return torch.where(values.isinf(), values, values.clamp(-limit, limit)).to(dtype)


def _unpacked_planes(packed: Tensor, planes: Planes) -> tuple[Tensor, Sound]:
    """Indices (count,), and whether they are valid; if not, they are 0 … count - 1."""
    bits = _bits(packed, 32).view(-1)
    low, groups, places = (bits[32 * start :] for start in planes.starts)
    patterns, sound = _patterns(groups[: GROUP * planes.blocks].view(-1, GROUP), places, planes.count)
    row, as_many = ones(_bits(patterns, BLOCK).view(-1), planes.count)
    rank = torch.arange(planes.count, device=packed.device)
    below = _numbers(low[: planes.count * planes.low_bits].view(planes.count, planes.low_bits))
    indices = ((row - rank) << planes.low_bits) + below + rank
    return choice(indices, sound & as_many, planes.numel)


def _packed(indices: Tensor, shape: Shape) -> Tensor:
    if shape.form == "list":
        return indices.int()
    if shape.form == "bitmap":
        return pack_bits.plain(indices, shape.words)
    return pack_elias_fano.plain(indices, shape.planes)


def _unpacked(words: Tensor, shape: Shape) -> tuple[Tensor, Sound]:
    if shape.form == "coded":
        return _unpacked_planes(words, shape.planes)
    found, sound = (words, True) if shape.form == "list" else unpack_bits.plain(words, shape.planes.count)
    return choice(found, sound, shape.planes.numel)


def _bits(numbers: Tensor, width: int) -> Tensor:
    """Bits (numbers, width) of `numbers` (numbers,), the lowest first."""
    return (numbers.view(-1, 1) >> torch.arange(width, device=numbers.device)) & 1


def _numbers(bits: Tensor) -> Tensor:
    """Inverse of `_bits`: numbers (numbers,) from their bits (numbers, width)."""
    return (bits << torch.arange(bits.shape[1], device=bits.device)).sum(1)


def _words(bits: Tensor) -> Tensor:
    """Pack a row of bits into int32 words, the last one padded with zeros."""
    return _numbers(torch.nn.functional.pad(bits, (0, -bits.numel() % 32)).view(-1, 32)).to(torch.int32)


def _in_a_row(bits: Tensor, widths: Tensor, most: int) -> Tensor:
    """Concatenate fields of different widths.

    Args:
        bits: (n, longest), the bits of each field, the lowest first.
        widths: (n,), bits to take from each field, from the lowest on. Their sum is at most `most`.

    Returns the bits (most,): all fields one after the other, then zeros.
    """
    at = torch.arange(bits.shape[1], device=bits.device)
    places = (widths.cumsum(0) - widths).view(-1, 1) + at
    places = torch.where(at < widths.view(-1, 1), places, most)
    return bits.new_zeros(most + 1).scatter_(0, places.view(-1), bits.view(-1))[:-1]


def _patterns(groups: Tensor, places: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Decode the upper row from its block code.

    Args:
        groups: bits (blocks, 6) of the blocks' group numbers.
        places: bits of the plane of places in the group, in a row.
        most: bits of `places` that valid blocks take at most.

    Returns (patterns of the blocks, whether they are valid).
    """
    _encoding, decoding, order = _tables(groups.device)
    entry = decoding[_numbers(groups)]
    width = entry >> 11
    stop = width.cumsum(0)
    padded = torch.nn.functional.pad(places, (0, _LONGEST_PLACE))
    at = torch.arange(_LONGEST_PLACE, device=groups.device)
    within = ((stop - width).view(-1, 1) + at).clamp(max=padded.numel() - 1)
    position = (entry & 2047) + _numbers(padded[within] * (at < width.view(-1, 1)))
    sound = (width.sum() <= most) & (position < PATTERNS).all()
    return order[position.clamp(max=PATTERNS - 1)], sound


@lru_cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Tables of the block code on `device`, int64: `ENCODING`, `DECODING` and `ORDER`.

    They are uploaded once. The host waits for the upload, so that any stream may read them afterwards.
    """
    encoding, decoding = (torch.from_numpy(table).to(device, torch.int64) for table in (ENCODING, DECODING))
    return encoding, decoding, torch.tensor(ORDER, device=device)

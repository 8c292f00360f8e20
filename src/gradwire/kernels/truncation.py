"""The upper bits of float32, packed without a gap.

A chunk of 32 rows of `LANES` elements becomes words lane by lane: the 32 codes of a column, one after the
other in `width` words, so that packing is the same shift for a whole row (the vertical layout of Lemire and
Boytsov 2015, "Decoding billions of integers per second through vectorization", section 4). The last chunk
has as many lanes as it needs, so fewer than 32 codes are padding.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradwire.kernels.dispatch import contract
from gradwire.kernels.layouts import pack_codes, unpack_codes

LANES = 128
"""32 rows of it, as floats and as codes, stay in the first-level cache."""
ROWS = 32


def upper_words(numel: int, drop: int) -> int:
    """int32 words of the upper 32 - drop bits of `numel` elements.

    >>> upper_words(4096, 18), upper_words(1, 18)
    (1792, 14)
    """
    return (32 - drop) * -(-numel // 32)


def _leaves_some(x: Tensor, drop: int, left: bool) -> None:
    if not 1 <= drop <= 22:
        raise ValueError(f"{drop} bits cannot be dropped of 23 bits of mantissa; choose 1 … 22")


def _fit(words: Tensor, drop: int, out: Tensor, weight: float) -> None:
    _leaves_some(out, drop, left=False)
    if words.numel() != upper_words(out.numel(), drop) or words.dtype != torch.int32:
        raise ValueError(f"{out.numel()} elements take {upper_words(out.numel(), drop)} int32 words")


@contract(_leaves_some)
def pack_upper(x: Tensor, drop: int, left: bool) -> Tensor:
    """The upper 32 - drop bits of x (n,) as (upper_words,) int32; with `left`, x keeps the rest.

    Other types are rounded to float32 first, and held to its largest number; `drop` is 1 … 22.

    >>> x = torch.tensor([1.75, -3.0])
    >>> words = pack_upper(x, 22, left=True)
    >>> x
    tensor([0.2500, 0.0000])
    >>> out = torch.zeros(2)
    >>> add_upper(words, 22, out, 1.0)
    >>> out
    tensor([ 1.5000, -3.0000])
    """
    width, words = 32 - drop, [torch.zeros(0, dtype=torch.int32, device=x.device)]
    for start, stop, columns in chunks(x.numel()):
        here = x[start:stop]
        codes = upper_bits(saturated(here), drop)
        if left:
            here.sub_(as_float(codes, drop).to(here.dtype))
        padded = torch.nn.functional.pad(codes, (0, ROWS * columns - codes.numel()))
        packed = pack_codes(padded.view(ROWS, columns).T.reshape(-1), width)
        words.append(packed.view(torch.int32).view(columns, width).T.reshape(-1))
    return torch.cat(words)


@contract(_fit)
def add_upper(words: Tensor, drop: int, out: Tensor, weight: float) -> None:
    """out (n,) += weight · what `pack_upper` kept in `words`; the example is there."""
    width, place = 32 - drop, 0
    for start, stop, columns in chunks(out.numel()):
        packed = words[place : place + width * columns].view(width, columns).T.contiguous()
        codes = unpack_codes(packed.view(-1).view(torch.uint8), width, ROWS * columns)
        values = as_float(codes.view(columns, ROWS).T.reshape(-1)[: stop - start], drop)
        # Two roundings: torch's own `alpha` has one on some processors and two on others.
        out[start:stop].add_((values.to(wide(out.dtype)) * weight).to(out.dtype))
        place += width * columns


def chunks(numel: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, columns) of the pieces in which elements are packed: 32 rows of `columns` lanes."""
    for start in range(0, numel, ROWS * LANES):
        stop = min(start + ROWS * LANES, numel)
        yield start, stop, min(LANES, -(-(stop - start) // ROWS))


def upper_bits(x: Tensor, drop: int) -> Tensor:
    """The upper 32 - drop bits of each float32 as int64; a NaN keeps a bit that tells it from Inf."""
    bits = x.view(torch.int32).long() & 0xFFFFFFFF
    return torch.where(x.isnan(), bits | 0x00400000, bits) >> drop


def as_float(codes: Tensor, drop: int) -> Tensor:
    """The float32 whose upper bits `codes` are and whose others are 0."""
    return (codes << drop).to(torch.int32).view(torch.float32)


def saturated(x: Tensor) -> Tensor:
    """x in float32, what is finite held to the largest number; Inf stays Inf and NaN stays NaN."""
    limit = torch.finfo(torch.float32).max
    if torch.finfo(x.dtype).max <= limit:
        return x.float()
    return torch.where(x.isinf(), x, x.clamp(-limit, limit)).float()


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which products are formed: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32

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
"""Elements of a row of a chunk. 32 such rows, as floats and as codes, fit the first-level cache."""
ROWS = 32


def upper_words(numel: int, drop: int) -> int:
    """int32 words that the upper 32 - drop bits of `numel` elements take.

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
    """Pack the upper 32 - drop bits of x (n,) into (upper_words,) int32; with `left`, x keeps the lower bits.

    Types other than float32 are rounded to float32 first, and finite numbers are saturated at its largest.
    `drop` is 1 … 22.

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
    """out (n,) += weight · the numbers that `pack_upper` packed into `words`; see the example there."""
    width, place = 32 - drop, 0
    for start, stop, columns in chunks(out.numel()):
        packed = words[place : place + width * columns].view(width, columns).T.contiguous()
        codes = unpack_codes(packed.view(-1).view(torch.uint8), width, ROWS * columns)
        values = as_float(codes.view(columns, ROWS).T.reshape(-1)[: stop - start], drop)
        # Two roundings: torch's own `alpha` has one on some processors and two on others.
        out[start:stop].add_((values.to(wide(out.dtype)) * weight).to(out.dtype))
        place += width * columns


def chunks(numel: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, columns) of each chunk of `numel` elements: 32 rows of `columns` lanes, the last
    ones padded.
    """
    for start in range(0, numel, ROWS * LANES):
        stop = min(start + ROWS * LANES, numel)
        yield start, stop, min(LANES, -(-(stop - start) // ROWS))


def upper_bits(x: Tensor, drop: int) -> Tensor:
    """Upper 32 - drop bits of each float32 in x, as int64. A NaN gets a mantissa bit that survives, so that
    it stays NaN.
    """
    bits = x.view(torch.int32).long() & 0xFFFFFFFF
    return torch.where(x.isnan(), bits | 0x00400000, bits) >> drop


def as_float(codes: Tensor, drop: int) -> Tensor:
    """float32 numbers whose upper bits are `codes`; the lower `drop` bits are 0."""
    return (codes << drop).to(torch.int32).view(torch.float32)


def saturated(x: Tensor) -> Tensor:
    """Convert x to float32. Finite numbers are saturated at its largest; Inf stays Inf and NaN stays NaN."""
    limit = torch.finfo(torch.float32).max
    if torch.finfo(x.dtype).max <= limit:
        return x.float()
    return torch.where(x.isinf(), x, x.clamp(-limit, limit)).float()


def wide(dtype: torch.dtype) -> torch.dtype:
    """Type in which products are computed: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32

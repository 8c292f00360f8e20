"""The upper bits of float32, packed lane by lane, in plain torch: the oracle, and the path of other types."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gradwire.kernels.reference_bits import pack_codes, unpack_codes

ROWS = 32


def chunks(numel: int, lanes: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, columns) of the pieces in which elements are packed: 32 rows of `columns` lanes each."""
    for start in range(0, numel, ROWS * lanes):
        stop = min(start + ROWS * lanes, numel)
        yield start, stop, min(lanes, -(-(stop - start) // ROWS))


def upper_bits(x: Tensor, drop: int) -> Tensor:
    """The upper 32 - drop bits of each float32 as int64; a NaN keeps a bit that tells it from Inf."""
    bits = x.view(torch.int32).long() & 0xFFFFFFFF
    return torch.where(x.isnan(), bits | 0x00400000, bits) >> drop


def as_float(codes: Tensor, drop: int) -> Tensor:
    """The float32 whose upper bits `codes` are and whose others are 0."""
    return (codes << drop).to(torch.int32).view(torch.float32)


def pack_upper(x: Tensor, drop: int, lanes: int, left: bool) -> Tensor:
    """int32 words; with `left`, x keeps what they do not say. x is of any type: float32 travels."""
    width, words = 32 - drop, [torch.zeros(0, dtype=torch.int32, device=x.device)]
    for start, stop, columns in chunks(x.numel(), lanes):
        here = x[start:stop]
        codes = upper_bits(saturated(here), drop)
        if left:
            here.sub_(as_float(codes, drop).to(here.dtype))
        padded = torch.nn.functional.pad(codes, (0, ROWS * columns - codes.numel()))
        packed = pack_codes(padded.view(ROWS, columns).T.reshape(-1), width)
        words.append(packed.view(torch.int32).view(columns, width).T.reshape(-1))
    return torch.cat(words)


def saturated(x: Tensor) -> Tensor:
    """x in float32, what is finite held to the largest number; Inf stays Inf and NaN stays NaN."""
    limit = torch.finfo(torch.float32).max
    if torch.finfo(x.dtype).max <= limit:
        return x.float()
    return torch.where(x.isinf(), x, x.clamp(-limit, limit)).float()


def add_upper(words: Tensor, drop: int, lanes: int, out: Tensor, weight: float) -> None:
    """out += weight · what `pack_upper` kept."""
    width, place = 32 - drop, 0
    for start, stop, columns in chunks(out.numel(), lanes):
        packed = words[place : place + width * columns].view(width, columns).T.contiguous()
        codes = unpack_codes(packed.view(-1).view(torch.uint8), width, ROWS * columns)
        values = as_float(codes.view(columns, ROWS).T.reshape(-1)[: stop - start], drop)
        # Two roundings: torch's own `alpha` has one on some processors and two on others.
        out[start:stop].add_((values.to(wide(out.dtype)) * weight).to(out.dtype))
        place += width * columns


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which products are formed: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32

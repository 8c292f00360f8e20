"""Blocks in a few bits, each with a scale, in plain torch: the oracle, and the path of all other types."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.kernels.reference_bits import pack_codes, unpack_codes


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type of the scales, and in which codes are found: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rows(x: Tensor, block: int) -> Tensor:
    """A part (n,) as (blocks, block), the last one filled with zeros."""
    return torch.nn.functional.pad(x, (0, -x.numel() % block)).view(-1, block)


def scales_of(blocks: Tensor, largest: float) -> Tensor:
    """Scales (blocks, 1): max / largest, 0 for a block of zeros and NaN for one that is not finite.

    Rounded towards zero, so that the largest code decodes to no more than the maximum and cannot overflow;
    below the normal range upwards, so that no code is larger than the largest.
    """
    maxima = blocks.abs().amax(1, keepdim=True)
    # A tensor, because a division by a number may be a multiplication by its rounded reciprocal.
    scales = maxima / torch.tensor(largest, dtype=maxima.dtype, device=maxima.device)
    tiny = scales < torch.finfo(scales.dtype).smallest_normal
    back = scales * largest
    scales = torch.where(tiny & (back < maxima), scales.nextafter(maxima), scales)
    scales = torch.where(~tiny & (back > maxima), scales.nextafter(torch.zeros_like(maxima)), scales)
    return torch.where(maxima.isfinite(), scales, torch.nan)


def codes_of(blocks: Tensor, scales: Tensor, is_fp8: bool) -> Tensor:
    """Codes (blocks, block) int8; of e4m3 its bits. Zeros where the scale is 0 or NaN."""
    quotients = torch.where(scales > 0, blocks / scales, 0.0)
    if is_fp8:
        return quotients.to(torch.float8_e4m3fn).view(torch.int8)
    return quotients.round().to(torch.int8)


def values_of(codes: Tensor, scales: Tensor, is_fp8: bool) -> Tensor:
    """Decoded blocks (blocks, block) in the type of the scales (blocks, 1)."""
    numbers = codes.view(torch.float8_e4m3fn).float() if is_fp8 else codes
    return scales * numbers.to(scales.dtype)


def pack_rows(codes: Tensor, count: int) -> Tensor:
    """`count` codes of 4 bits in (blocks, block) as bytes; every block begins a byte."""
    even = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    last = (count - 1) % codes.shape[1] + 1
    whole = (codes.shape[0] - 1) * even.shape[1] // 2
    return pack_codes(even.reshape(-1) & 15, 4)[: whole + -(-last // 2)]


def unpack_rows(packed: Tensor, count: int, block: int) -> Tensor:
    """The reverse: (blocks, block) int8."""
    blocks, width = -(-count // block), block + block % 2
    filled = torch.nn.functional.pad(packed, (0, blocks * width // 2 - packed.numel()))
    codes = unpack_codes(filled, 4, blocks * width).view(blocks, width)[:, :block]
    return ((codes ^ 8) - 8).to(torch.int8)


def encode_blocks(
    x: Tensor, sizes: Sequence[int], block: int, kind: str, largest: float, left: bool
) -> tuple[Tensor, Tensor]:
    """Scales (blocks,) and codes (bytes,) uint8; with `left`, x (n,) keeps what they do not say."""
    scales, codes = [x.new_zeros(0, dtype=wide(x.dtype))], [x.new_zeros(0, dtype=torch.uint8)]
    for part in torch.split(x, list(sizes)):
        if part.numel() == 0:
            continue
        block_ = min(block, part.numel())
        blocks = rows(part.to(wide(x.dtype)), block_)
        scale = scales_of(blocks, largest)
        code = codes_of(blocks, scale, kind == "fp8")
        scales.append(scale.view(-1))
        flat = code.reshape(-1)[: part.numel()].view(torch.uint8)
        codes.append(pack_rows(code, part.numel()) if kind == "int4" else flat)
        if left:
            values = values_of(code, scale, kind == "fp8").reshape(-1)[: part.numel()]
            part.sub_(values.to(part.dtype))
    return torch.cat(scales), torch.cat(codes)


def add_blocks(
    scales: Tensor, codes: Tensor, sizes: Sequence[int], block: int, kind: str, out: Tensor, weight: float
) -> None:
    """out += weight · decoded."""
    number = place = 0
    for part in torch.split(out, list(sizes)):
        count = part.numel()
        if count == 0:
            continue
        block_ = min(block, count)
        blocks, last = -(-count // block_), (count - 1) % block_ + 1
        size = (blocks - 1) * -(-block_ // 2) + -(-last // 2) if kind == "int4" else count
        packed = codes[place : place + size]
        code = (
            unpack_rows(packed, count, block_)
            if kind == "int4"
            else rows(packed, block_).contiguous().view(torch.int8)
        )
        values = values_of(code, scales[number : number + blocks, None], kind == "fp8")
        # Two roundings: torch's own `alpha` has one on some processors and two on others.
        part.add_((values.reshape(-1)[:count] * weight).to(part.dtype))
        number, place = number + blocks, place + size

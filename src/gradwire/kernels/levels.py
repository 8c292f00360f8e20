"""Two bits per element: a sign, and which of the block's two magnitudes it has."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradwire.kernels.dispatch import contract
from gradwire.kernels.layouts import Blocks, packed_bytes, scale_type


def _fit(x: Tensor, blocks: Blocks, levels: Tensor, codes: Tensor, *, leave: bool = False) -> None:
    size = sum(packed_bytes(each, 2) for each in blocks.sizes)
    found, right = (x.shape, levels.shape, codes.shape), ((blocks.numel,), (blocks.count, 2), (size,))
    if found != right or codes.dtype != torch.uint8:
        raise ValueError(f"elements, levels and bytes are {found}, but {right} for {blocks}")


def _fit_sum(levels: Tensor, codes: Tensor, blocks: Blocks, out: Tensor, weight: float = 1.0) -> None:
    _fit(out, blocks, levels, codes)


@contract(_fit)
def encode_levels(x: Tensor, blocks: Blocks, levels: Tensor, codes: Tensor, *, leave: bool = False) -> None:
    """Encode x (n,) with two magnitudes per block: write `levels` (blocks, 2) of `scale_type`, and `codes`
    uint8.

    A magnitude is high if it exceeds the middle between the block's smallest and largest. The two levels of a
    block are the means of its low and of its high magnitudes; 0 if there are none. In a block with a zero,
    the low level is 0, so that zeros stay zeros. NaN or Inf makes the levels of the block NaN.

    Codes are packed four to a byte, part by part: bit 0 is set if x is negative, bit 1 if the magnitude is
    high. With `leave`, x is overwritten with its rounding errors.

    >>> x, levels, codes = torch.tensor([3.0, -8.0, 1.0]), torch.empty(1, 2), torch.empty(1).byte()
    >>> encode_levels(x, Blocks((3,)), levels, codes, leave=True)
    >>> levels, codes, x
    (tensor([[2., 8.]]), tensor([12], dtype=torch.uint8), tensor([ 1.,  0., -1.]))
    """
    for elements, here, there in _parts(blocks):
        part = x[elements].to(scale_type(x.dtype))
        step = min(blocks.step, part.numel())
        # The last block is filled up with its own last element, which changes neither end of its range.
        filled = -part.numel() % step
        rows = torch.cat([part, part[-1:].expand(filled)]).abs().view(-1, step)
        counts = pad(torch.ones_like(part, dtype=torch.bool), (0, filled)).view(-1, step)
        least, most = rows.aminmax(dim=1, keepdim=True)
        high = rows > least / 2 + most / 2  # half by half, because the sum may overflow
        low, top = (mean_of_rows(rows, counts & side) for side in (~high, high))
        means = torch.stack([torch.where(least[:, 0] > 0, low, 0.0), top], dim=1)
        levels[here] = torch.where(most.isfinite(), means, torch.nan).to(levels.dtype)
        codes[there] = _packed((part < 0).byte() | high.view(-1)[: part.numel()].byte() << 1)
    if leave:
        add_levels.plain(levels, codes, blocks, x, -1.0)


@contract(_fit_sum)
def add_levels(levels: Tensor, codes: Tensor, blocks: Blocks, out: Tensor, weight: float = 1.0) -> None:
    """Decode and add: out (n,) += weight · the level of each code, with its sign. `levels` (blocks, 2) and
    uint8 `codes` are as `encode_levels` writes them.

    >>> out = torch.ones(3)
    >>> add_levels(torch.tensor([[2.0, 8.0]]), torch.tensor([12]).byte(), Blocks((3,)), out, 0.5)
    >>> out
    tensor([ 2., -3.,  2.])
    """
    for elements, here, there in _parts(blocks):
        numel = elements.stop - elements.start
        row = torch.arange(numel, device=out.device) // blocks.step
        low, high = levels[here].to(out.dtype).unbind(1)
        known = torch.stack([low, -low, high, -high], dim=1).view(-1)  # by block and code
        # Rounded before the sum: a fused multiply and add would not round.
        out[elements] += known[4 * row + _unpacked(codes[there], numel)] * weight


def mean_of_rows(rows: Tensor, counts: Tensor) -> Tensor:
    """Mean of the elements of each row that `counts` selects, (rows,) float64; 0 if it selects none.

    The selected elements must not be negative.
    """
    wide = rows.double().masked_fill(~counts, 0.0)
    number = counts.sum(1).clamp_min(1)
    if rows.dtype != torch.float64:
        return wide.sum(1) / number
    # A sum of numbers of this type may overflow: it is taken relative to the largest.
    largest = wide.amax(1)
    share = (wide / largest[:, None]).sum(1) / number
    return torch.where(largest == 0, largest, largest * share.clamp_max(1.0))


def _parts(blocks: Blocks) -> Iterator[tuple[slice, slice, slice]]:
    """Slices of the elements, the levels and the bytes of each part that is not empty."""
    element = row = byte = 0
    for size in blocks.sizes:
        ends = element + size, row + -(-size // blocks.step), byte + packed_bytes(size, 2)
        if size > 0:
            yield slice(element, ends[0]), slice(row, ends[1]), slice(byte, ends[2])
        element, row, byte = ends


def _packed(codes: Tensor) -> Tensor:
    quads = pad(codes, (0, -codes.numel() % 4)).view(-1, 4)
    return quads[:, 0] | quads[:, 1] << 2 | quads[:, 2] << 4 | quads[:, 3] << 6


def _unpacked(packed: Tensor, count: int) -> Tensor:
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] >> places & 3).view(-1)[:count]

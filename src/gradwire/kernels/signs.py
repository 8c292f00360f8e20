"""One bit per element, with one level (±) or two levels per block."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from gradwire.kernels.dispatch import contract
from gradwire.kernels.layouts import Blocks, pack_codes, unpack_codes
from gradwire.kernels.levels import mean_of_rows


def _fit(x: Tensor, blocks: Blocks, levels: Tensor, packed: Tensor, *, leave: bool = False) -> None:
    blocks.check(x, levels, packed)


def _fit_sum(levels: Tensor, packed: Tensor, blocks: Blocks, out: Tensor, weight: float = 1.0) -> None:
    blocks.check(out, levels, packed)


@contract(_fit)
def pack_signs(x: Tensor, blocks: Blocks, levels: Tensor, packed: Tensor, *, leave: bool = False) -> None:
    """Encode x (n,) by signs: write the bits of x >= 0 to `packed` (blocks.bytes,) uint8, and the levels to
    `levels`.

    `levels` (blocks.count, 1) receives the mean magnitude of each block. `levels` (blocks.count, 2) receives
    the mean of its elements >= 0 and the mean of the others. With `leave`, x is overwritten with its rounding
    errors.

    >>> x, levels, packed = torch.tensor([1.0, -2.0, 3.0]), torch.empty(1, 2), torch.empty(1).byte()
    >>> pack_signs(x, Blocks((3,)), levels, packed, leave=True)
    >>> levels, packed, x
    (tensor([[ 2., -2.]]), tensor([5], dtype=torch.uint8), tensor([-1.,  0.,  1.]))
    """
    for elements, rows, row_bytes in _parts(blocks):
        part = x[elements]
        packed[row_bytes] = pack_codes(part >= 0, 1)
        levels[rows] = _means(part, blocks.step, levels.shape[1]).to(levels.dtype)
    if leave:
        add_signs.plain(levels, packed, blocks, x, -1.0)


@contract(_fit_sum)
def add_signs(levels: Tensor, packed: Tensor, blocks: Blocks, out: Tensor, weight: float = 1.0) -> None:
    """out (n,) += weight · decoded x, from `levels` and `packed` as `pack_signs` wrote them.

    >>> out = torch.zeros(3)
    >>> add_signs(torch.tensor([[2.0]]), torch.tensor([5]).byte(), Blocks((3,)), out)
    >>> out
    tensor([ 2., -2.,  2.])
    """
    for elements, rows, row_bytes in _parts(blocks):
        numel = elements.stop - elements.start
        high, low = levels[rows, 0], levels[rows, 1] if levels.shape[1] == 2 else -levels[rows, 0]
        row = torch.arange(numel, device=out.device) // blocks.step
        is_high = unpack_codes(packed[row_bytes], 1, numel).bool()
        # Rounded before the sum, as the kernels do: a fused multiply and add would not round.
        out[elements] += torch.where(is_high, high[row], low[row]).to(out.dtype) * weight


def _parts(blocks: Blocks) -> Iterator[tuple[slice, slice, slice]]:
    """Slices of the elements, the levels and the bytes of each part."""
    element = row = byte = 0
    for size in blocks.sizes:
        ends = element + size, row + -(-size // blocks.step), byte + -(-size // 8)
        yield slice(element, ends[0]), slice(row, ends[1]), slice(byte, ends[2])
        element, row, byte = ends


def _means(part: Tensor, step: int, levels: int) -> Tensor:
    """Levels (blocks, levels) float64 of a part: mean magnitudes, or the means of elements >= 0 and of the
    others.
    """
    step = max(1, min(step, part.numel()))
    rows = pad(part, (0, -part.numel() % step)).view(-1, step)
    if levels == 1:
        here = torch.ones_like(part, dtype=torch.bool)
        return mean_of_rows(rows.abs(), _within(here, step)).view(-1, 1)
    above, below = _within(part >= 0, step), _within(~(part >= 0), step)
    return torch.stack([mean_of_rows(rows, above), -mean_of_rows(-rows, below)], dim=1)


def _within(mask: Tensor, step: int) -> Tensor:
    return pad(mask, (0, -mask.numel() % step)).view(-1, step)

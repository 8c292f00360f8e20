"""Count sketches."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels import cpu, reference
from gradwire.kernels.dispatch import is_fast
from gradwire.kernels.slices import each_slice


def count_sketch(x: Tensor, hashes: Tensor, columns: int) -> Tensor:
    """x (n,), float32 or float64, as a count sketch (rows, columns); sketches of several x add up.

    `hashes` (rows, 2) are int64 of any value: a multiplier and an addend per row.

    >>> import torch
    >>> x, hashes = torch.zeros(1000), torch.tensor([[3 << 57, 5], [7 << 55, 11], [9 << 54, 2]])
    >>> x[700] = 8.0
    >>> table = count_sketch(x, hashes, columns=4)
    >>> table.shape, table.abs().sum(1)
    (torch.Size([3, 4]), tensor([8., 8., 8.]))
    >>> count_sketch_estimates(table, hashes, torch.empty(1000))[700]
    tensor(8.)
    """
    if not (is_fast(x) and hashes.device.type == "cpu"):
        return reference.count_sketch(x, hashes, columns)
    table = torch.zeros(hashes.shape[0], columns)
    cpu.count_sketch(x.numpy(), *_unsigned(hashes), table.numpy())
    return table


def count_sketch_estimates(table: Tensor, hashes: Tensor, out: Tensor) -> Tensor:
    """Write to `out` (n,), and return, what a count sketch (rows, columns) says of the sketched elements.

    The median over an odd number of rows. NaN in the table counts as Inf, which has a place in the order.
    """
    if hashes.shape[0] % 2 == 0:
        raise ValueError(f"{hashes.shape[0]} rows have no middle one; take an odd number")
    table = table.nan_to_num(torch.inf, torch.inf, -torch.inf)
    if not (is_fast(table, out) and hashes.device.type == "cpu"):
        return out.copy_(reference.count_sketch_estimates(table, hashes, out.numel()))
    numbers, (multipliers, addends) = table.numpy(), _unsigned(hashes)
    estimates = out.numpy()

    def part(here: slice) -> None:
        # A hash is multiplier · index + addend: a slice's first index goes into the addend.
        first = addends + multipliers * np.uint64(here.start)
        cpu.count_sketch_estimates(numbers, multipliers, first, estimates[here])

    each_slice(out.numel(), part)
    return out


def _unsigned(hashes: Tensor) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Multipliers and addends, each (rows,)."""
    multipliers, addends = hashes.t().contiguous().numpy().view(np.uint64)
    return multipliers, addends

"""Count sketches: compressed vectors that can be summed, and estimates of their elements."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.dispatch import contract


def _has_a_middle_row(table: Tensor, hashes: Tensor, out: Tensor) -> None:
    if hashes.shape[0] % 2 == 0:
        raise ValueError(f"{hashes.shape[0]} rows have no middle one; take an odd number")
    if table.dim() != 2 or hashes.shape != (table.shape[0], 2):
        raise ValueError(f"hashes {tuple(hashes.shape)} do not fit a table {tuple(table.shape)}")


@contract()
def count_sketch(x: Tensor, hashes: Tensor, columns: int) -> Tensor:
    """Sketch x (n,), float32 or float64, as a table (rows, columns). Sketches of several x with equal
    `hashes` add up.

    `hashes` (rows, 2) are a multiplier and an addend per row: int64 of any value, on any device.

    >>> x, hashes = torch.zeros(1000), torch.tensor([[3 << 57, 5], [7 << 55, 11], [9 << 54, 2]])
    >>> x[700] = 8.0
    >>> table = count_sketch(x, hashes, columns=4)
    >>> table.shape, table.abs().sum(1)
    (torch.Size([3, 4]), tensor([8., 8., 8.]))
    >>> count_sketch_estimates(table, hashes, torch.empty(1000))[700]
    tensor(8.)
    """
    column, sign = count_sketch_buckets(x.numel(), hashes.to(x.device), columns)
    return x.new_zeros(hashes.shape[0], columns).scatter_add_(1, column, sign.to(x.dtype) * x)


@contract(_has_a_middle_row)
def count_sketch_estimates(table: Tensor, hashes: Tensor, out: Tensor) -> Tensor:
    """Estimate the sketched elements from a `table` (rows, columns); write them to `out` (n,) and return it.

    An estimate is the median over rows, of which there is an odd number. NaN in the table counts as Inf, so
    that it has a rank.
    """
    table = table.nan_to_num(torch.inf, torch.inf, -torch.inf)
    column, sign = count_sketch_buckets(out.numel(), hashes.to(table.device), table.shape[1])
    return out.copy_((sign.to(table.dtype) * table.gather(1, column)).median(0).values)


def count_sketch_buckets(n: int, hashes: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Column (rows, n) int64 and sign (rows, n), 1 or -1, of each of n elements in each row of a table.

    `hashes` (rows, 2) int64 has a multiplier and an addend for each row; `columns` is the width of the table.

    Multiply-shift (Thorup 2015, "High speed hashing for integers and strings", section 3.3): the upper half
    of multiplier · i + addend mod 2^64 is uniform, and independent for any two i below 2^32. Its lowest bit
    gives the sign, the 31 bits above it give the column.
    """
    multipliers, addends = hashes[:, :1], hashes[:, 1:]
    # int64 products wrap; the mask undoes the sign extension of the shift.
    hashed = (multipliers * torch.arange(n, device=hashes.device) + addends) >> 32 & 0xFFFFFFFF
    return (hashed >> 1) * columns >> 31, 1 - 2 * (hashed & 1)

"""Count sketches."""

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
    """x (n,), float32 or float64, as a count sketch (rows, columns); sketches of several x add up.

    `hashes` (rows, 2) are int64 of any value, on any device: a multiplier and an addend per row.

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
    """Write to `out` (n,), and return, what a count sketch (rows, columns) says of the sketched elements.

    The median over an odd number of rows. NaN in the table counts as Inf, which has a place in the order.
    """
    table = table.nan_to_num(torch.inf, torch.inf, -torch.inf)
    column, sign = count_sketch_buckets(out.numel(), hashes.to(table.device), table.shape[1])
    return out.copy_((sign.to(table.dtype) * table.gather(1, column)).median(0).values)


def count_sketch_buckets(n: int, hashes: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """For rows of a table and n elements: column (rows, n) int64 and sign (rows, n), 1 or -1.

    Multiply-shift (Thorup 2015, "High speed hashing for integers and strings", section 3.3): the upper half
    of multiplier · i + addend mod 2^64 is uniform, and independent for any two i below 2^32. Its lowest bit
    is the sign, the 31 above it are the column.
    """
    multipliers, addends = hashes[:, :1], hashes[:, 1:]
    # int64 products wrap; the mask undoes the sign extension of the shift.
    hashed = (multipliers * torch.arange(n, device=hashes.device) + addends) >> 32 & 0xFFFFFFFF
    return (hashed >> 1) * columns >> 31, 1 - 2 * (hashed & 1)

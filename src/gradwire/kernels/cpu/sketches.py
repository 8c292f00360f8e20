"""Count sketch: every element is added, with a random sign, to one random column of each row of a table."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels.cpu.jit import kernel
from gradwire.kernels.cpu.prepared import prepared
from gradwire.kernels.slices import each_slice

_BLOCK = 2048  # elements; a row of estimates for each of five rows stays in the first-level cache


def count_sketch(x: Tensor, hashes: Tensor, columns: int) -> Tensor:
    """Twin of `gradwire.kernels.sketches.count_sketch`. Sketch row after row of the table."""
    table = torch.zeros(hashes.shape[0], columns, dtype=x.dtype, device=x.device)
    _count_sketch(x.numpy(), *_unsigned(hashes), table.numpy())
    return table


def count_sketch_estimates(table: Tensor, hashes: Tensor, out: Tensor) -> Tensor:
    """Twin of `gradwire.kernels.sketches.count_sketch_estimates`. Estimate in slices, on several threads if
    cores are free.
    """
    numbers = table.nan_to_num(torch.inf, torch.inf, -torch.inf).numpy()
    multipliers, addends = _unsigned(hashes)
    estimates = out.numpy()

    def part(here: slice) -> None:
        # A hash is multiplier · index + addend: a slice's first index goes into the addend.
        first = addends + multipliers * np.uint64(here.start)
        _count_sketch_estimates(numbers, multipliers, first, estimates[here])

    each_slice(out.numel(), part)
    return out


def _unsigned(hashes: Tensor) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Multipliers and addends of the hashes, each (rows,) uint64."""
    multipliers, addends = hashes.t().contiguous().numpy().view(np.uint64)
    return multipliers, addends


@kernel
def _bucket(hashed: Any, columns: Any) -> Any:
    """Column of a hash: its upper 31 bits as a fraction of 2^31, times the number of columns."""
    return np.int64(((hashed >> np.uint64(33)) * columns) >> np.uint64(31))


@kernel
def _signed(value: Any, hashed: Any) -> Any:
    """`value`, negated if bit 32 of the hash is set."""
    return -value if (hashed >> np.uint64(32)) & np.uint64(1) else value


@prepared("float32[::1], uint64[::1], uint64[::1], float32[:, ::1]")
@kernel
def _count_sketch(x: Any, multipliers: Any, addends: Any, table: Any) -> None:
    """float32: add x (n,) to `table` (rows, columns); uint64 multipliers and addends (rows,)."""
    columns = np.uint64(table.shape[1])
    # Row after row: a row of the table fits into the second-level cache, the table does not.
    for r in range(table.shape[0]):
        row, hashed = table[r], addends[r]
        for i in range(x.size):
            row[_bucket(hashed, columns)] += _signed(x[i], hashed)
            hashed += multipliers[r]


@kernel
def _read(row: Any, hashed: Any, multiplier: Any, out: Any) -> None:
    """Write to `out` the estimates of elements from one `row` of the table. `hashed` is the hash of the first
    element; that of the next one is larger by `multiplier`.
    """
    columns = np.uint64(row.size)
    for i in range(out.size):
        out[i] = _signed(row[_bucket(hashed, columns)], hashed)
        hashed += multiplier


@kernel
def _order(low: Any, high: Any) -> None:
    """Sort pairs: swap elements where `low` is above `high`. Written so that it vectorises."""
    for i in range(low.size):
        smaller, larger = min(low[i], high[i]), max(low[i], high[i])
        low[i] = smaller
        high[i] = larger


@prepared("float32[:, ::1], uint64[::1], uint64[::1], float32[::1]")
@kernel
def _count_sketch_estimates(table: Any, multipliers: Any, addends: Any, out: Any) -> None:
    """float32: out[i] = median of the rows' estimates. The number of rows is odd, and the table has no NaN.
    `multipliers` and `addends` (rows,) uint64 are those of the hashes.
    """
    rows = table.shape[0]
    read = np.empty((rows, _BLOCK), np.float32)
    for start in range(0, out.size, _BLOCK):
        size = min(_BLOCK, out.size - start)
        for r in range(rows):
            hashed = addends[r] + multipliers[r] * np.uint64(start)
            _read(table[r], hashed, multipliers[r], read[r, :size])
        # Odd-even transposition sort of the rows: as many passes as rows, and no branch on a value.
        for turn in range(rows):
            for r in range(turn & 1, rows - 1, 2):
                _order(read[r, :size], read[r + 1, :size])
        out[start : start + size] = read[rows // 2, :size]

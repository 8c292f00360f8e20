"""Products of matrices with thin factors. All matrices of a unit lie one after the other and take one call.

A row of `places` has the first element of a matrix, its rows, its columns, and the first elements of its left
and right factors. Factors are flat, too: per matrix `rank` columns, each of as many numbers as the matrix has
rows (left) or columns (right).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.cpu.jit import kernel, reordered
from gradwire.kernels.cpu.prepared import prepared
from gradwire.kernels.dispatch import takes

_LOST = 1e-6  # of a column of float32 that shrinks to this share, rounding is all that is left


def left_products(
    x: Tensor, places: Tensor, rank: int, left: Tensor, right: Tensor, subtract: bool = False
) -> None:
    """Multiply as the contract says; every row of a matrix is read once."""
    _left_products(x.numpy(), places.numpy(), rank, left.numpy(), right.numpy(), subtract)


def right_products(x: Tensor, places: Tensor, rank: int, left: Tensor, right: Tensor) -> None:
    """Multiply as the contract says, row by row, in two passes over x."""
    _right_products(x.numpy(), places.numpy(), rank, left.numpy(), right.numpy())


def outer_products(out: Tensor, places: Tensor, rank: int, left: Tensor, right: Tensor) -> None:
    """Multiply as the contract says; the sum of an element is in the order of the factors' columns."""
    _outer_products(out.numpy(), places.numpy(), rank, left.numpy(), right.numpy())


@takes(torch.float32, torch.float64)
def orthonormalise(factors: Tensor, spans: Tensor, rank: int, spare: Tensor | None = None) -> None:
    """Make columns orthonormal in place, as the contract says.

    float64 has a kernel, too: sums of a library may depend on alignment and threads, so that ranks would get
    different bits.
    """
    other = factors[:0] if spare is None else spare
    _orthonormalise(factors.numpy(), spans.numpy(), rank, other.numpy())


# Only the order of the sum is left to the compiler, so that it can use all lanes: half the time of eight sums
# by hand. NaN and Inf mean what they mean. A rank's own product need not have anyone else's bits.
@reordered
def _dot(a: Any, b: Any) -> Any:
    total = np.float32(0.0)
    for i in range(a.size):
        total += a[i] * b[i]
    return total


@kernel
def _add(out: Any, weight: Any, a: Any) -> None:
    for i in range(out.size):
        out[i] += weight * a[i]


@kernel
def _scale(out: Any, weight: Any, a: Any) -> None:
    for i in range(out.size):
        out[i] = weight * a[i]


@prepared("float32[::1], int64[:, ::1], int64, float32[::1], float32[::1], boolean")
@kernel
def _left_products(x: Any, places: Any, rank: Any, left: Any, right: Any, subtract: Any) -> None:
    """float32: left = M·right for every matrix of x at `places`; with `subtract` M loses left·rightᵀ in the
    same pass. The arguments are as in the contract.
    """
    for matrix in range(places.shape[0]):
        start, rows, columns, at_left, at_right = places[matrix]
        for i in range(rows):
            row = x[start + i * columns : start + (i + 1) * columns]
            for k in range(rank):
                left[at_left + k * rows + i] = _dot(
                    row, right[at_right + k * columns : at_right + (k + 1) * columns]
                )
            if subtract:
                for k in range(rank):
                    factor = right[at_right + k * columns : at_right + (k + 1) * columns]
                    _add(row, -left[at_left + k * rows + i], factor)


@prepared("float32[::1], int64[:, ::1], int64, float32[::1], float32[::1]")
@kernel
def _right_products(x: Any, places: Any, rank: Any, left: Any, right: Any) -> None:
    """float32: right = Mᵀ·left for every matrix of x at `places`, and M loses left·rightᵀ. The arguments are
    as in the contract.
    """
    for matrix in range(places.shape[0]):
        start, rows, columns, at_left, at_right = places[matrix]
        right[at_right : at_right + rank * columns] = np.float32(0.0)
        for i in range(rows):
            row = x[start + i * columns : start + (i + 1) * columns]
            for k in range(rank):
                factor = right[at_right + k * columns : at_right + (k + 1) * columns]
                _add(factor, left[at_left + k * rows + i], row)
        for i in range(rows):
            row = x[start + i * columns : start + (i + 1) * columns]
            for k in range(rank):
                factor = right[at_right + k * columns : at_right + (k + 1) * columns]
                _add(row, -left[at_left + k * rows + i], factor)


@prepared("float32[::1], int64[:, ::1], int64, float32[::1], float32[::1]")
@kernel
def _outer_products(out: Any, places: Any, rank: Any, left: Any, right: Any) -> None:
    """float32: write left·rightᵀ to the matrices of `out` at `places`, each element summed in the order of
    the columns. The arguments are as in the contract.
    """
    for matrix in range(places.shape[0]):
        start, rows, columns, at_left, at_right = places[matrix]
        for i in range(rows):
            row = out[start + i * columns : start + (i + 1) * columns]
            _scale(row, left[at_left + i], right[at_right : at_right + columns])
            for k in range(1, rank):
                factor = right[at_right + k * columns : at_right + (k + 1) * columns]
                _add(row, left[at_left + k * rows + i], factor)


@kernel
def _norm(a: Any) -> Any:
    total = 0.0
    for i in range(a.size):
        total += a[i] * a[i]
    return np.sqrt(total)


@kernel
def _accept(work: Any, taken: Any, k: Any, column: Any) -> Any:
    """Orthogonalise `column` against the rows of `work` that `taken` marks, and normalise it into work[k].

    Returns False if it is zero, or only rounding is left of it.
    """
    total = 0.0
    for i in range(column.size):
        total += abs(np.float64(column[i]))
    if total == 0.0:
        return False
    new = work[k]
    for i in range(column.size):
        new[i] = column[i] / total  # no square can overflow; and if anything is not finite, nothing is
    before = _norm(new)
    for _ in range(2):
        for j in range(taken.size):
            if taken[j]:
                along = 0.0
                for i in range(new.size):
                    along += work[j, i] * new[i]
                for i in range(new.size):
                    new[i] -= along * work[j, i]
    after = _norm(new)
    if after <= _LOST * before:
        return False
    for i in range(new.size):
        new[i] /= after
    return True


@prepared(
    "float32[::1], int64[:, ::1], int64, float32[::1]",
    "float64[::1], int64[:, ::1], int64, float64[::1]",
)
@kernel
def _orthonormalise(factors: Any, spans: Any, rank: Any, spare: Any) -> None:
    """Make the columns of every factor orthonormal in place, as the contract says, whose arguments these are;
    float32 or float64. No `spare` is an empty one.

    All sums are float64 and in order, so that every processor gets the same bits.
    """
    for matrix in range(spans.shape[0]):
        start, size = spans[matrix]
        work, taken = np.empty((rank, size)), np.zeros(rank, dtype=np.bool_)
        for k in range(rank):
            taken[k] = _accept(work, taken, k, factors[start + k * size : start + (k + 1) * size])
        for k in range(rank):
            for j in range(rank if spare.size else 0):
                if not taken[k]:
                    taken[k] = _accept(work, taken, k, spare[start + j * size : start + (j + 1) * size])
        for k in range(rank):
            for i in range(size):
                factors[start + k * size + i] = work[k, i] if taken[k] else 0.0

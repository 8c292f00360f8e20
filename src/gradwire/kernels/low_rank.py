"""Products of a unit's matrices with thin factors, and factors with orthonormal columns.

`places` (matrices, 5), int64 on the CPU, has a row per matrix: first element in the unit, rows, columns, and
first elements of its left and right factors in the flat `left` and `right`. A factor has `rank` columns,
stored one after the other; each has as many numbers as the matrix has rows (left) or columns (right). Factors
are float64 for a unit of float64, else float32.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.kernels.dispatch import contract

_PRECISION = threading.Lock()
"""Lock held while the precision of float32 products is set for the whole process."""

LOST = 1e-6
"""Share of a float32 column left by Gram-Schmidt, at or below which only rounding is left of it."""


def _fit(x: Tensor, places: Tensor, rank: int, left: Tensor, right: Tensor, subtract: bool = False) -> None:
    if rank < 1 or places.dtype != torch.int64 or places.dim() != 2 or places.shape[1] != 5:
        raise ValueError(f"rank={rank} and places {tuple(places.shape)}, {places.dtype} describe no matrices")
    start, rows, columns, at_left, at_right = places.numpy().T
    ends = (start + rows * columns, at_left + rank * rows, at_right + rank * columns)
    sizes = (x.numel(), left.numel(), right.numel())
    if (places.numpy() < 0).any() or any((end > size).any() for end, size in zip(ends, sizes, strict=True)):
        raise ValueError(f"matrices {places.tolist()} of rank {rank} do not fit into {sizes} elements")


def _fit_out(out: Tensor, places: Tensor, rank: int, left: Tensor, right: Tensor) -> None:
    _fit(out, places, rank, left, right)


def _factors_fit(factors: Tensor, spans: Tensor, rank: int, spare: Tensor | None = None) -> None:
    if rank < 1 or spans.dtype != torch.int64 or spans.dim() != 2 or spans.shape[1] != 2:
        raise ValueError(f"rank={rank} and spans {tuple(spans.shape)}, {spans.dtype} describe no factors")
    start, size = spans.numpy().T
    if (spans.numpy() < 0).any() or (start + rank * size > factors.numel()).any():
        raise ValueError(f"factors {spans.tolist()} of rank {rank} exceed {factors.numel()} elements")
    if spare is not None and (spare.shape, spare.dtype) != (factors.shape, factors.dtype):
        raise ValueError(f"spare factors {spare.shape}, {spare.dtype} do not fit {factors.shape}")


@contract(_fit)
def left_products(
    x: Tensor, places: Tensor, rank: int, left: Tensor, right: Tensor, subtract: bool = False
) -> None:
    """left = M·right for every matrix M in `x` (numel,); with `subtract`, M loses left·rightᵀ. `places` and
    `rank` are as the module says.

    >>> x, left = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.empty(2)
    >>> left_products(x, torch.tensor([[0, 2, 2, 0, 0]]), 1, left, torch.tensor([1.0, 0.0]), subtract=True)
    >>> left, x
    (tensor([1., 3.]), tensor([0., 2., 0., 4.]))
    """
    with _whole_products():
        for matrix, rows, columns in _each(x, places, rank, left, right):
            rows.copy_((matrix.to(rows.dtype) @ columns.t()).t())
            if subtract:
                matrix.copy_(matrix.to(rows.dtype) - rows.t() @ columns)


@contract(_fit)
def right_products(x: Tensor, places: Tensor, rank: int, left: Tensor, right: Tensor) -> None:
    """right = Mᵀ·left for every matrix M in `x` (numel,), and M loses left·rightᵀ. `places` and `rank` are as
    the module says.

    >>> x, right = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.empty(2)
    >>> right_products(x, torch.tensor([[0, 2, 2, 0, 0]]), 1, torch.tensor([1.0, 0.0]), right)
    >>> right, x
    (tensor([1., 2.]), tensor([0., 0., 3., 4.]))
    """
    with _whole_products():
        for matrix, rows, columns in _each(x, places, rank, left, right):
            columns.copy_(rows @ matrix.to(rows.dtype))
            matrix.copy_(matrix.to(rows.dtype) - rows.t() @ columns)


@contract(_fit_out)
def outer_products(out: Tensor, places: Tensor, rank: int, left: Tensor, right: Tensor) -> None:
    """Write left·rightᵀ to the places of the matrices in `out` (numel,); equal factors give equal bits.
    `places` and `rank` are as the module says.

    >>> out = torch.zeros(5)
    >>> factors = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    >>> outer_products(out, torch.tensor([[1, 2, 2, 0, 0]]), 1, *factors)
    >>> out
    tensor([0., 3., 4., 6., 8.])
    """
    for matrix, rows, columns in _each(out, places, rank, left, right):
        total = rows[0, :, None] * columns[0]
        for k in range(1, rank):
            total += rows[k, :, None] * columns[k]
        matrix.copy_(total)


@contract(_factors_fit)
def orthonormalise(factors: Tensor, spans: Tensor, rank: int, spare: Tensor | None = None) -> None:
    """Make the columns of every factor orthonormal, in place, from the first to the last.

    `spans` (matrices, 2), int64 on the CPU, has (first element, length of a column) of each factor. A column
    that is zero, or up to rounding a sum of those before it, is replaced: by the first column of the `spare`
    factor (laid out likewise) that is independent of those before, or by zeros. An element that is not finite
    makes its column NaN. Sums are float64 and in order, so that equal factors give equal bits on every rank.

    >>> factors = torch.tensor([3.0, 4.0, 6.0, 8.0])
    >>> orthonormalise(factors, torch.tensor([[0, 2]]), rank=2)
    >>> factors
    tensor([0.6000, 0.8000, 0.0000, 0.0000])
    >>> orthonormalise(factors, torch.tensor([[0, 2]]), rank=2, spare=torch.tensor([0.0, 0.0, 1.0, 0.0]))
    >>> factors
    tensor([ 0.6000,  0.8000,  0.8000, -0.6000])
    """
    for start, size in spans.tolist():
        here = slice(start, start + rank * size)
        columns = factors[here].view(rank, size)
        others = columns[:0] if spare is None else spare[here].view(rank, size)
        own: list[_Fit] = []
        for column in columns:
            own.append(_beside(own, column))
        later: list[_Fit] = []
        for lost in own:
            found = _Fit(torch.zeros_like(lost.column), torch.zeros_like(lost.is_there))
            for column in others:
                fit = _beside(own + later, column)
                is_taken = fit.is_there & ~lost.is_there & ~found.is_there
                found = _Fit(torch.where(is_taken, fit.column, found.column), found.is_there | is_taken)
            later.append(found)
        for k in range(rank):
            columns[k] = torch.where(own[k].is_there, own[k].column, later[k].column)


@contextmanager
def _whole_products() -> Iterator[None]:
    """Context in which float32 products on GPUs keep all bits, even if the script allows TF32.

    The memory loses the product that is sent. If TF32 rounded the two differently, the difference would be
    lost, not late. Different GPUs in one run would also round differently.
    """
    products = torch.backends.cuda.matmul
    with _PRECISION:  # or two models' threads could put back what the other has set
        before, products.fp32_precision = products.fp32_precision, "ieee"
        try:
            yield
        finally:
            products.fp32_precision = before


def _each(x: Tensor, places: Tensor, rank: int, left: Tensor, right: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of each matrix (rows, columns), its left factor (rank, rows) and its right factor (rank,
    columns).
    """
    for start, rows, columns, at_left, at_right in places.tolist():
        yield (
            x[start : start + rows * columns].view(rows, columns),
            left[at_left : at_left + rank * rows].view(rank, rows),
            right[at_right : at_right + rank * columns].view(rank, columns),
        )


class _Fit(NamedTuple):
    """A column (size,) float64 of length 1, or of zeros, and whether it was accepted: a bool () on the
    device.

    No number is read on the host: all columns are computed, and masks select the accepted ones.
    """

    column: Tensor
    is_there: Tensor


def _beside(taken: list[_Fit], column: Tensor) -> _Fit:
    """Orthogonalise `column` against the accepted columns of `taken`, and normalise it.

    It is accepted if more than rounding is left of it.
    """
    wide = column.double()
    total = wide.abs().sum()
    wide = wide / total
    before = wide.square().sum().sqrt()
    for _ in range(2):
        for other in taken:
            rest = wide - (wide * other.column).sum() * other.column
            wide = torch.where(other.is_there, rest, wide)
    after = wide.square().sum().sqrt()
    is_there = (total != 0.0) & ~(after <= LOST * before)
    return _Fit(torch.where(is_there, wide / after, 0.0), is_there)

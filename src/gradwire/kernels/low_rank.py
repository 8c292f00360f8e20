"""Matrices of a unit times thin factors, and factors with orthonormal columns.

`places` (matrices, 5), int64 on the CPU, has a row per matrix: where it starts in the unit, rows, columns,
and where its left and right factor start in the flat `left` and `right`. There it has `rank` runs of as many
numbers as it has rows (left) or columns (right). Factors are float64 for a unit of float64, else float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels import cpu
from gradwire.kernels import reference_low_rank as reference
from gradwire.kernels.dispatch import is_fast


def left_products(
    x: Tensor, places: Tensor, rank: int, left: Tensor, right: Tensor, subtract: bool = False
) -> None:
    """left = M·right for every matrix M in `x` (numel,); with `subtract`, M loses left·rightᵀ.

    >>> import torch
    >>> x, left = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.empty(2)
    >>> left_products(x, torch.tensor([[0, 2, 2, 0, 0]]), 1, left, torch.tensor([1.0, 0.0]), subtract=True)
    >>> left, x
    (tensor([1., 3.]), tensor([0., 2., 0., 4.]))
    """
    _check(x, places, rank, left, right)
    if not is_fast(x, left, right):
        reference.left_products(x, places, rank, left, right, subtract)
        return
    cpu.left_products(x.numpy(), places.numpy(), rank, left.numpy(), right.numpy(), subtract)


def right_products(x: Tensor, places: Tensor, rank: int, left: Tensor, right: Tensor) -> None:
    """right = Mᵀ·left for every matrix M in `x` (numel,), and M loses left·rightᵀ.

    >>> import torch
    >>> x, right = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.empty(2)
    >>> right_products(x, torch.tensor([[0, 2, 2, 0, 0]]), 1, torch.tensor([1.0, 0.0]), right)
    >>> right, x
    (tensor([1., 2.]), tensor([0., 0., 3., 4.]))
    """
    _check(x, places, rank, left, right)
    if not is_fast(x, left, right):
        reference.right_products(x, places, rank, left, right)
        return
    cpu.right_products(x.numpy(), places.numpy(), rank, left.numpy(), right.numpy())


def outer_products(out: Tensor, places: Tensor, rank: int, left: Tensor, right: Tensor) -> None:
    """Write left·rightᵀ to where the matrices lie in `out` (numel,); the same bits from the same factors.

    >>> import torch
    >>> out = torch.zeros(5)
    >>> factors = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    >>> outer_products(out, torch.tensor([[1, 2, 2, 0, 0]]), 1, *factors)
    >>> out
    tensor([0., 3., 4., 6., 8.])
    """
    _check(out, places, rank, left, right)
    if not is_fast(out, left, right):
        reference.outer_products(out, places, rank, left, right)
        return
    cpu.outer_products(out.numpy(), places.numpy(), rank, left.numpy(), right.numpy())


def orthonormalise(factors: Tensor, spans: Tensor, rank: int, spare: Tensor | None = None) -> None:
    """Make the columns of every factor orthonormal, in place, from the first to the last.

    `spans` (matrices, 2), int64 on the CPU, says where a factor starts and how long its columns are. Of a
    column that is zero, or a sum of those before it up to rounding, nothing is left: it becomes the first of
    the `spare` factor's columns, laid out likewise, of which something is, or else zero. What is not finite
    makes its column NaN. Sums are float64 and in order: equal factors give equal bits on every rank.

    >>> import torch
    >>> factors = torch.tensor([3.0, 4.0, 6.0, 8.0])
    >>> orthonormalise(factors, torch.tensor([[0, 2]]), rank=2)
    >>> factors
    tensor([0.6000, 0.8000, 0.0000, 0.0000])
    >>> orthonormalise(factors, torch.tensor([[0, 2]]), rank=2, spare=torch.tensor([0.0, 0.0, 1.0, 0.0]))
    >>> factors
    tensor([ 0.6000,  0.8000,  0.8000, -0.6000])
    """
    _check_spans(factors, spans, rank)
    if spare is not None and (spare.shape, spare.dtype) != (factors.shape, factors.dtype):
        raise ValueError(f"spare factors {spare.shape}, {spare.dtype} do not fit {factors.shape}")
    if factors.device.type != "cpu" or not factors.is_contiguous():
        reference.orthonormalise(factors, spans, rank, spare)
        return
    # float64 as well: a library's sums may depend on alignment and threads, and so differ between ranks.
    other = factors[:0] if spare is None else spare.contiguous()
    cpu.orthonormalise(factors.numpy(), spans.numpy(), rank, other.numpy())


def _check(x: Tensor, places: Tensor, rank: int, left: Tensor, right: Tensor) -> None:
    """Kernels check no bounds."""
    if rank < 1 or places.dtype != torch.int64 or places.dim() != 2 or places.shape[1] != 5:
        raise ValueError(f"rank={rank} and places {tuple(places.shape)}, {places.dtype} describe no matrices")
    start, rows, columns, at_left, at_right = places.numpy().T
    ends = (start + rows * columns, at_left + rank * rows, at_right + rank * columns)
    sizes = (x.numel(), left.numel(), right.numel())
    if (places.numpy() < 0).any() or any((end > size).any() for end, size in zip(ends, sizes, strict=True)):
        raise ValueError(f"matrices {places.tolist()} of rank {rank} do not fit into {sizes} elements")


def _check_spans(factors: Tensor, spans: Tensor, rank: int) -> None:
    if rank < 1 or spans.dtype != torch.int64 or spans.dim() != 2 or spans.shape[1] != 2:
        raise ValueError(f"rank={rank} and spans {tuple(spans.shape)}, {spans.dtype} describe no factors")
    start, size = spans.numpy().T
    if (spans.numpy() < 0).any() or (start + rank * size > factors.numel()).any():
        raise ValueError(f"factors {spans.tolist()} of rank {rank} exceed {factors.numel()} elements")

"""Products with thin factors, and orthonormal factors, in plain torch: the oracle of the kernels."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

LOST = 1e-6


def _each(x: Tensor, places: Tensor, rank: int, left: Tensor, right: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Matrix (rows, columns), left factor (rank, rows) and right factor (rank, columns), all views."""
    for start, rows, columns, at_left, at_right in places.tolist():
        yield (
            x[start : start + rows * columns].view(rows, columns),
            left[at_left : at_left + rank * rows].view(rank, rows),
            right[at_right : at_right + rank * columns].view(rank, columns),
        )


def left_products(x: Tensor, places: Tensor, rank: int, left: Tensor, right: Tensor, subtract: bool) -> None:
    """left = M·right, in the factors' type; with `subtract` M loses left·rightᵀ."""
    for matrix, rows, columns in _each(x, places, rank, left, right):
        rows.copy_((matrix.to(rows.dtype) @ columns.t()).t())
        if subtract:
            matrix.copy_(matrix.to(rows.dtype) - rows.t() @ columns)


def right_products(x: Tensor, places: Tensor, rank: int, left: Tensor, right: Tensor) -> None:
    """right = Mᵀ·left, in the factors' type, and M loses left·rightᵀ."""
    for matrix, rows, columns in _each(x, places, rank, left, right):
        columns.copy_(rows @ matrix.to(rows.dtype))
        matrix.copy_(matrix.to(rows.dtype) - rows.t() @ columns)


def outer_products(out: Tensor, places: Tensor, rank: int, left: Tensor, right: Tensor) -> None:
    """left·rightᵀ; element by element, because a library's matrix product may depend on alignment."""
    for matrix, rows, columns in _each(out, places, rank, left, right):
        total = rows[0, :, None] * columns[0]
        for k in range(1, rank):
            total += rows[k, :, None] * columns[k]
        matrix.copy_(total)


def orthonormalise(factors: Tensor, spans: Tensor, rank: int, spare: Tensor | None) -> None:
    """Gram-Schmidt, twice per column; see the entrance in `gradwire.kernels.low_rank`."""
    for start, size in spans.tolist():
        here = slice(start, start + rank * size)
        columns = factors[here].view(rank, size)
        taken: dict[int, Tensor] = {}
        others = [] if spare is None else list(spare[here].view(rank, size))
        for candidates in (None, others):
            for k in range(rank):
                for column in [columns[k]] if candidates is None else candidates:
                    fit = None if k in taken else _beside(list(taken.values()), column)
                    if fit is not None:
                        taken[k] = fit
        for k in range(rank):
            columns[k] = taken.get(k, 0.0)


def _beside(taken: list[Tensor], column: Tensor) -> Tensor | None:
    """The normalised part of `column` orthogonal to those taken, in float64; None if there is none."""
    wide = column.double()
    total = wide.abs().sum()
    if total == 0.0:
        return None
    wide = wide / total
    before = wide.square().sum().sqrt()
    for _ in range(2):
        for other in taken:
            wide = wide - (wide * other).sum() * other
    after = wide.square().sum().sqrt()
    return None if after <= LOST * before else wide / torch.as_tensor(after)

"""Work that depends on a number on the device: done or skipped there, without reading the number on
the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.kernels.dispatch import contract
from gradwire.kernels.pieces import Pieces


def _is_number(buffers: Sequence[Tensor], bad: Tensor) -> None:
    if bad.numel() != 1:
        raise ValueError(f"a flag is one number, but its shape is {tuple(bad.shape)}")


def _has_flags(plane: Tensor, pieces: Pieces, idle: Tensor) -> None:
    if idle.shape != (len(pieces),) or idle.dtype != torch.bool or pieces.ends[0] > plane.numel():
        raise ValueError(
            f"{len(pieces)} pieces do not fit flags {tuple(idle.shape)} and {tuple(plane.shape)}"
        )


def require_mark(mark: Tensor | None) -> None:
    """Raise `ValueError` unless `mark` is one int32, or `None`."""
    if mark is not None and (mark.shape != (1,) or mark.dtype != torch.int32):
        raise ValueError(f"a mark is one int32, but this is {tuple(mark.shape)} {mark.dtype}")


@contract(lambda _values, mark: require_mark(mark))
def mark_not_finite(values: Tensor, mark: Tensor) -> None:
    """Set `mark` (1,) int32 to 1 if one of `values` (n,) is NaN or infinite. It stays as it is otherwise.

    >>> mark = torch.zeros(1, dtype=torch.int32)
    >>> mark_not_finite(torch.tensor([1.0, torch.inf]), mark), mark_not_finite(torch.zeros(2), mark), mark
    (None, None, tensor([1], dtype=torch.int32))
    """
    mark.bitwise_or_((~values.isfinite().all()).int())


@contract(_is_number)
def poison(buffers: Sequence[Tensor], bad: Tensor) -> None:
    """Fill `buffers`, of any float types and shapes, with NaN, unless the number `bad` is 0.

    >>> x, y = torch.ones(2), torch.ones(1)
    >>> poison([x], torch.tensor(0.0)), poison([y], torch.tensor(2.0)), x, y
    (None, None, tensor([1., 1.]), tensor([nan]))
    """
    for buffer in buffers:
        buffer.masked_fill_((bad != 0).view(()), torch.nan)


@contract(_has_flags)
def zero_idle(plane: Tensor, pieces: Pieces, idle: Tensor) -> None:
    """Set to zero those pieces of `plane` (n,) for which `idle` (pieces,) bool is True.

    >>> plane = torch.ones(3)
    >>> zero_idle(plane, Pieces([(0, 0, 2), (2, 2, 1)]), torch.tensor([False, True]))
    >>> plane
    tensor([1., 1., 0.])
    """
    for (place, _bucket), is_idle in zip(pieces.slices(), idle, strict=True):
        plane[place].masked_fill_(is_idle, 0.0)

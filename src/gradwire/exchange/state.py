"""Kinds of state that exchanges keep by parameter, and a check of each when a checkpoint is loaded.

This module is separate from the exchanges, so that loading a checkpoint does not import all of them.

All ranks must resume from equal and valid numbers. Factors of another rank r, and counts of another number of
ranks, are valid: their exchange discards them and starts anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from gradwire.kernels.range import is_finite
from gradwire.unit.context import ExchangeState

LEFT, RIGHT = "P", "Q"
"""Low-rank factors of a matrix: (rank, rows) and (rank, columns)."""
TURN = "turn"
"""Side of a matrix's factors that ACP-SGD has sent last, (1,): see `exchange.low_rank.SIDE`."""
COUNTED = "symbols"
"""GComp's counts of symbols. The full kind ends with the number of the first counted element of the
parameter."""
LED, GAINS = "led", "gains"
"""Number of times that each rank has led in AR-Topk, and the gain of each election. The full kind ends with
the unit."""

_SKEW = 1e-3
"""Largest deviation from orthonormality that is accepted: far above rounding errors, far below harm."""
_SYMBOLS = 256
"""Number of symbols, which are bytes."""
_MOST = 2**48
"""Bound of counts, below which sums of them are exact."""


def complaint(kind: str, kept: Tensor, shape: tuple[int, ...]) -> str | None:
    """Why `kept` is not a valid `kind` of state for a parameter of this `shape`; `None` if it is valid.

    >>> complaint("Q", torch.tensor([[0.6, 0.8]]), (5, 2)), complaint("P", torch.ones(1, 5), (5, 2))
    (None, 'is not orthonormal')
    """
    family = kind.partition("/")[0].partition(" ")[0]
    if family in (LEFT, RIGHT):
        return _of_factors(kept, shape[0] if family == LEFT and shape else math.prod(shape[1:]))
    if family == COUNTED:
        fits = kept.dtype == torch.int64 and kept.shape == (_SYMBOLS,)
        return None if fits and 0 <= int(kept.min()) <= int(kept.max()) < _MOST else "is no count of symbols"
    if family in (LED, GAINS):
        fits = kept.dtype == torch.float64 and kept.dim() == 1 and is_finite(kept) and bool((kept >= 0).all())
        return None if fits else "is no row of numbers from 0 on"
    if kept.dtype.is_complex:
        return f"is of {kept.dtype}, neither floating nor integer"
    return None if is_finite(kept) else "is not finite"


def _of_factors(kept: Tensor, size: int) -> str | None:
    if not kept.is_floating_point() or kept.dim() != 2 or kept.shape[1] != size:
        return f"is {kept.dtype} of shape {tuple(kept.shape)}, not rows of {size} floating numbers"
    gram = kept.double() @ kept.double().T
    # A factor may be zero where its matrix was zero.
    wanted = gram.diagonal().round().clamp(0.0, 1.0).diag()
    return None if bool(((gram - wanted).abs() <= _SKEW).all()) else "is not orthonormal"


def times_led(flat_buffers: Iterable[ExchangeState]) -> list[int] | None:
    """The number of times that each rank has led, over all flat buffers and units; `None` if no rank
    leads."""
    counts = [
        tensor
        for kept in flat_buffers
        for kind, tensors in kept.committed.items()
        if kind.startswith(f"{LED}/")
        for tensor in tensors.values()
    ]
    return [int(count) for count in torch.stack(counts).sum(0)] if counts else None

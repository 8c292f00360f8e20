"""What a checkpoint may bring of what exchanges keep by parameter.

All ranks must go on from equal and sensible numbers. Factors of another rank, or counts of another world, are
sensible: their exchange takes none of them and starts anew.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradwire.codec.gcomp import SYMBOLS
from gradwire.exchange.election import GAINS, LED
from gradwire.exchange.gcomp import COUNTED
from gradwire.exchange.low_rank import LEFT, RIGHT
from gradwire.kernels import is_finite

_SKEW = 1e-3
"""How far factors may be from orthonormal: far above their roundings, far below what would matter."""
_MOST = 2**48
"""Symbols that are counted stay below this, as exact sums of counts have to."""


def complaint(kind: str, kept: Tensor, shape: tuple[int, ...]) -> str | None:
    """Why `kept` cannot be the `kind` that was kept for a parameter of this `shape`; `None` if it can.

    >>> complaint("Q", torch.tensor([[0.6, 0.8]]), (5, 2)), complaint("P", torch.ones(1, 5), (5, 2))
    (None, 'is not orthonormal')
    """
    family = kind.partition("/")[0].partition(" ")[0]
    if family in (LEFT, RIGHT):
        return _of_factors(kept, shape[0] if family == LEFT and shape else math.prod(shape[1:]))
    if family == COUNTED:
        fits = kept.dtype == torch.int64 and kept.shape == (SYMBOLS,)
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
    # A factor of which nothing was left may be zero.
    wanted = gram.diagonal().round().clamp(0.0, 1.0).diag()
    return None if bool(((gram - wanted).abs() <= _SKEW).all()) else "is not orthonormal"

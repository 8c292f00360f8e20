"""Signs, and the mean of either side.

Seide, Fu, Droppo, Li and Yu 2014, "1-bit stochastic gradient descent and its application to data-parallel
distributed training of speech DNNs", section 3.2: with the threshold at 0, each side is sent as its own mean,
which makes the squared error as small as two values can. Per block it leaves
‖x‖² − (S₊²/n₊ + S₋²/n₋), S and n being the sum and the number of either side. By Cauchy-Schwarz
S₊²/n₊ + S₋²/n₋ ≥ ‖x‖₁²/d, so it leaves no more than `sign` does, and γ ≤ 1 − 1/d.

Differences from the paper: two means per parameter, where the paper has two per column of a matrix, because
units may end within a column; `block` cuts parameters further, and with the length of a row as block every
row of a matrix (a neuron's weights) that starts its part has its own, which is finer than most links deserve.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gradwire.codec.two_levels import TwoLevels


@dataclass(frozen=True)
class OneBit(TwoLevels):
    """The mean of what is >= 0, and that of what is not, for each block or part: γ ≤ 1 − 1/d.

    1 bit per element and 64 per block.
    """

    levels: ClassVar[int] = 2


def one_bit(block: int | None = None) -> OneBit:
    """Send signs, with two means per parameter, or per `block` elements of one: a multiple of 8.

    >>> import torch
    >>> from gradwire.moment import Moment
    >>> x, at = torch.tensor([1.0, -2.0, 6.0]), Moment(step=0, unit=0, rank=0, world=1)
    >>> payload = one_bit().take(x, at)
    >>> payload.numel(), x
    (12, tensor([-2.5000,  0.0000,  2.5000]))
    """
    return OneBit(block)

"""Signs, and the mean magnitude.

Karimireddy, Rebjock, Stich and Jaggi 2019, "Error feedback fixes SignSGD and other gradient compression
schemes", algorithm 1: C(x) = ‖x‖₁/d · sign(x), layer by layer. It leaves ‖x‖² − ‖x‖₁²/d, that is a share
γ = 1 − ‖x‖₁²/(d‖x‖²) of the squared norm (lemma 8), which is 0.36 for normal numbers, and never above
1 − 1/d, because ‖x‖₁ ≥ ‖x‖.

Differences from the paper: 0 counts as positive, since one bit has no room for a third value, and error
feedback takes that back; a whole part of zeros is sent as zeros. Scales are per parameter, finer than per
unit wherever a unit holds several, or per block of one.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codec.two_levels import TwoLevels


@dataclass(frozen=True)
class Sign(TwoLevels):
    """± the mean magnitude of each block, or of each part: γ ≤ 1 − 1/d with d the elements of the largest.

    1 bit per element and 32 per block: 1/8 of a byte, and 4/`block` bytes.
    """


def sign(block: int | None = None) -> Sign:
    """Send signs, with one scale per parameter, or per `block` elements of one: a multiple of 8.

    Smaller blocks follow the gradient more closely, and cost 32/`block` bits more per element.

    >>> import torch
    >>> from gradwire.moment import Moment
    >>> x, at = torch.tensor([1.0, -2.0, 6.0]), Moment(step=0, unit=0, rank=0, world=1)
    >>> payload = sign().take(x, at)
    >>> payload.numel(), x
    (8, tensor([-2.,  1.,  3.]))
    """
    return Sign(block)

"""QSGD: a norm per bucket, and per element a sign and a level, rounded up or down at random.

Alistarh, Grubic, Li, Tomioka and Vojnovic 2017, "QSGD: Communication-efficient SGD via gradient quantization
and encoding", section 3.1: of a bucket v of d elements, element i becomes ‖v‖ · sgn(v_i) · ℓ/s or
‖v‖ · sgn(v_i) · (ℓ + 1)/s with ℓ = ⌊s·|v_i|/‖v‖⌋, the latter with probability s·|v_i|/‖v‖ − ℓ.

Differences from the paper: codes have a fixed number of bits, not Elias' lengths, because a collective needs
sizes that are known; sign and level are one number in two's complement, so there are s = 2^(bits − 1) − 1
levels; ‖v‖/s travels, not ‖v‖; buckets end where a parameter ends; a norm beyond the type's largest number
is cut to that, which is still no smaller than any element.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codec.base import CodecLaws
from gradwire.codec.levels import Levels, levels_of
from gradwire.kernels import Grid, Norm
from gradwire.moment import Moment


@dataclass(frozen=True)
class Qsgd:
    """Buckets of at most `bucket` elements of one parameter, codes of `bits` bits.

    In the mean over draws ‖Q(v) − v‖² ≤ min(d/(4s²), √d/s) ‖v‖² (lemma 3.1, where a variance of p(1 − p)
    per element is bounded by 1, not 1/4), and in every draw ‖Q(v) − v‖² < d/s² · ‖v‖², as no element moves
    by more than a step: with the Euclidean norm, and all the more with the largest magnitude, which is no
    larger. Beside that, the rounding of numbers of v's type.
    """

    bits: int
    bucket: int
    norm: Norm

    @property
    def laws(self) -> CodecLaws:
        """Contractive where d/s² < 1, in every draw.

        With 8 bits that is up to buckets of 16 128 elements, with 4 bits up to 48.
        """
        return CodecLaws(contractive=self.bucket < self._grid((1,)).levels ** 2, unbiased=True)

    def _grid(self, sizes: tuple[int, ...]) -> Grid:
        return Grid(sizes, self.bucket, self.bits, self.norm)

    def _levels(self, numel: int, dtype: torch.dtype, at: Moment) -> Levels:
        return levels_of(self._grid(at.sizes(numel)), dtype)

    def payload(self, numel: int, dtype: torch.dtype, at: Moment) -> tuple[int, torch.dtype]:
        """See `Codec.payload`. Bytes."""
        return self._levels(numel, dtype, at).bytes, torch.uint8

    def encode(self, x: Tensor, at: Moment) -> Tensor:
        """See `Codec.encode`."""
        return self._levels(x.numel(), x.dtype, at).write(x, at, subtract=False)

    def take(self, x: Tensor, at: Moment) -> Tensor:
        """See `Codec.take`."""
        return self._levels(x.numel(), x.dtype, at).write(x, at, subtract=True)

    def add_decoded(self, payload: Tensor, out: Tensor, weight: float, at: Moment) -> None:
        """See `Codec.add_decoded`."""
        self._levels(out.numel(), out.dtype, at).add(payload, out, weight)


def qsgd(bits: int = 8, bucket: int = 512, norm: Norm = "l2") -> Qsgd:
    """Stochastic levels of 2, 4 or 8 bits, scaled by the Euclidean norm of a bucket or by its maximum.

    A zero bucket stays zero; NaN or Inf make their bucket NaN. `norm="max"` errs less and is not sparse.

    >>> from gradwire.moment import Moment
    >>> at = Moment(step=0, unit=0, rank=0, world=1)
    >>> qsgd(bits=4).payload(1024, torch.float32, at)
    (520, torch.uint8)
    >>> qsgd(bits=8).laws.contractive, qsgd(bits=4).laws.contractive
    (True, False)
    >>> codec = qsgd(norm="max")
    >>> out = torch.zeros(2)
    >>> codec.add_decoded(codec.encode(torch.tensor([127.0, -64.0]), at), out, 1.0, at)
    >>> out
    tensor([127., -64.])
    """
    Grid((), bucket, bits, norm)  # says what is wrong with them
    return Qsgd(bits, bucket, norm)

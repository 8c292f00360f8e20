"""TernGrad: every element becomes −s, 0 or +s, right in the mean.

Wen, Xu, Yan, Wu, Wang, Chen and Li 2017, "TernGrad: ternary gradients to reduce communication in distributed
deep learning", section 3.1: s = max|x| of a layer, and x_i becomes s · sgn(x_i) with probability |x_i|/s.
Section 3.3 clips each layer's gradient at c = 2.5 standard deviations before that, so that s is not an
outlier's.

Differences from the paper: ranks do not share the largest s of all (section 3.2, "scaler sharing"). The paper
needs it so that sums of W ternary numbers have 2W + 1 levels and travel back from a server in few bits;
here every rank decodes every payload, and an s of each rank's own errs less. Clipping is off by default,
because it is not right in the mean; the deviation is taken about 0, which is near a gradient's mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codec.base import CodecLaws
from gradwire.codec.levels import Levels, levels_of
from gradwire.kernels import Grid
from gradwire.moment import Moment


@dataclass(frozen=True)
class TernGrad:
    """Two bits per element and one scale per parameter, or per what a unit holds of it.

    In the mean over draws ‖T(x) − x‖² = s‖x‖₁ − ‖x‖² ≤ (√d − 1)/2 · ‖x‖² for d elements, with equality for
    one of 1 and all others 1/(1 + √d): not a contraction from d = 9 on. With `clip`, what exceeds it is cut.
    """

    clip: float | None = None

    @property
    def laws(self) -> CodecLaws:
        """Unbiased unless it clips."""
        return CodecLaws(unbiased=self.clip is None)

    def _levels(self, numel: int, dtype: torch.dtype, at: Moment) -> Levels:
        clip = math.inf if self.clip is None else self.clip
        grid = Grid(at.sizes(numel), bucket=None, bits=2, norm="max", clip=clip)
        return levels_of(grid, dtype)

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


def tern_grad(clip: float | None = None) -> TernGrad:
    """Ternary numbers with a scale per parameter; `clip` is in standard deviations, in the paper 2.5.

    >>> from gradwire.moment import Moment
    >>> at = Moment(step=0, unit=0, rank=0, world=1)
    >>> codec, out = tern_grad(), torch.zeros(3)
    >>> codec.add_decoded(codec.encode(torch.tensor([5.0, 0.0, -5.0]), at), out, 1.0, at)
    >>> out
    tensor([ 5.,  0., -5.])
    >>> codec.payload(1000, torch.float32, at)
    (256, torch.uint8)
    """
    if clip is not None and not clip > 0.0:
        raise ValueError(
            f"clip={clip} must be positive standard deviations; 2.5 is usual, None clips nothing"
        )
    return TernGrad(clip)

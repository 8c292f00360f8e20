"""Numerator C of GComp's metric δ = C/g, to which a gradient g is compared. It depends on the optimizer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradwire.kernels.dispatch import contract


@dataclass(frozen=True)
class Terms:
    """Coefficients of an optimizer's numerator C.

    C = θ·(slope·(√(share·v) + eps) + offset) − pull·m, where θ is the parameter, and m and v are its first
    and second moments in the optimizer.
    """

    slope: float = 0.0
    offset: float = 0.0
    pull: float = 0.0
    share: float = 1.0
    eps: float = 0.0

    def times(self, factor: float) -> Terms:
        """Coefficients of the numerator `factor` · C.

        >>> Terms(offset=3.0, eps=1e-8).times(2.0)
        Terms(slope=0.0, offset=6.0, pull=0.0, share=1.0, eps=1e-08)
        """
        scaled = {name: getattr(self, name) * factor for name in ("slope", "offset", "pull")}
        return replace(self, **scaled)


def _fits_floats(
    parameter: Tensor, square: Tensor | None, momentum: Tensor | None, terms: Terms, out: Tensor
) -> None:
    _check((parameter, square, momentum), out, torch.float32)


def _fits_bytes(
    parameter: Tensor, square: Tensor | None, momentum: Tensor | None, terms: Terms, out: Tensor
) -> None:
    _check((parameter, square, momentum), out, torch.uint8)


def _fits_levels(x: Tensor, numerators: Tensor, out: Tensor) -> None:
    _check((x, numerators), out, torch.uint8)


def _check(given: tuple[Tensor | None, ...], out: Tensor, dtype: torch.dtype) -> None:
    if out.dtype != dtype or any(t is not None and t.shape != out.shape for t in given):
        shapes = [None if t is None else tuple(t.shape) for t in given]
        raise ValueError(f"out must be {dtype} of the shape that all others have: {shapes}")


@contract(_fits_floats)
def numerators(
    parameter: Tensor, square: Tensor | None, momentum: Tensor | None, terms: Terms, out: Tensor
) -> None:
    """out (n,) float32 = |C|, rounded towards zero; 0 where C is not finite.

    `parameter`, `square` and `momentum` are (n,): θ, v and m in `Terms`. `None` means zeros.

    >>> out = torch.empty(2)
    >>> numerators(torch.tensor([1.0, -2.0]), None, None, Terms(offset=10.0), out)
    >>> out
    tensor([10.0000, 20.0000])
    """
    exact = _exact(parameter, square, momentum, terms).abs() * (1.0 - 2.0**-23)
    out.copy_(torch.where(exact.isfinite(), exact, 0.0).float())


@contract(_fits_bytes)
def numerator_exponents(
    parameter: Tensor, square: Tensor | None, momentum: Tensor | None, terms: Terms, out: Tensor
) -> None:
    """out (n,) uint8 = exponents of C, biased as in float32 and clamped to 0 … 255; 0 where C is not finite.

    Arguments are as for `numerators`.

    >>> out = torch.empty(3, dtype=torch.uint8)
    >>> numerator_exponents(torch.tensor([1.0, -4.0, torch.nan]), None, None, Terms(offset=1.0), out)
    >>> out
    tensor([127, 129,   0], dtype=torch.uint8)
    """
    exact = _exact(parameter, square, momentum, terms)
    wide = (exact.view(torch.int64) >> 52) & 0x7FF
    out.copy_(torch.where(exact.isfinite(), (wide - 896).clamp(0, 255), 0))


@contract(_fits_levels)
def mantissa_levels(x: Tensor, numerators: Tensor, out: Tensor) -> None:
    """out (n,) uint8 = the largest L of 0, 6, 12, 18 with |x|·2^L below the numerator; 0 for NaN.

    x and `numerators` are (n,). L is the number of mantissa bits to drop.

    >>> out = torch.empty(3, dtype=torch.uint8)
    >>> mantissa_levels(torch.tensor([1.0, 0.01, torch.nan]), torch.full((3,), 65.0), out)
    >>> out
    tensor([ 6, 12,  0], dtype=torch.uint8)
    """
    value, limit = x.double().abs(), numerators.double()
    out.zero_()
    for level in (6, 12, 18):
        out += 6 * (value * 2.0**level < limit)


def _exact(parameter: Tensor, square: Tensor | None, momentum: Tensor | None, terms: Terms) -> Tensor:
    """Compute C (n,) in float64, from the arguments of `numerators`. No operations are fused, so that every
    processor gets the same bits.
    """
    if square is None:
        exact = parameter.double() * (terms.slope * terms.eps + terms.offset)
    else:
        root = (square.double() * terms.share).sqrt() + terms.eps
        exact = parameter.double() * (root * terms.slope + terms.offset)
    return exact if momentum is None else exact - momentum.double() * terms.pull

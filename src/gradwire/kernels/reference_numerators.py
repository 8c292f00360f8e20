"""What a gradient is compared with, in plain torch: the oracle, and the path of other types and devices."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.terms import Terms


def _exact(parameter: Tensor, square: Tensor | None, momentum: Tensor | None, terms: Terms) -> Tensor:
    """(n,) float64. One operation after the other, none fused: the same bits on every processor."""
    if square is None:
        exact = parameter.double() * (terms.slope * terms.eps + terms.offset)
    else:
        root = (square.double() * terms.share).sqrt() + terms.eps
        exact = parameter.double() * (root * terms.slope + terms.offset)
    return exact if momentum is None else exact - momentum.double() * terms.pull


def numerators(parameter: Tensor, square: Tensor | None, momentum: Tensor | None, terms: Terms) -> Tensor:
    """(n,) float32: magnitudes, rounded so that they are never larger; 0 for what is not finite."""
    exact = _exact(parameter, square, momentum, terms).abs() * (1.0 - 2.0**-23)
    return torch.where(exact.isfinite(), exact, 0.0).float()


def numerator_exponents(
    parameter: Tensor, square: Tensor | None, momentum: Tensor | None, terms: Terms
) -> Tensor:
    """(n,) uint8: the exponents of the same, biased as float32's are and held to 0 … 255."""
    exact = _exact(parameter, square, momentum, terms)
    wide = (exact.view(torch.int64) >> 52) & 0x7FF
    return torch.where(exact.isfinite(), (wide - 896).clamp(0, 255), 0).to(torch.uint8)


def mantissa_levels(x: Tensor, numerators: Tensor) -> Tensor:
    """(n,) uint8: the largest L of 0, 6, 12, 18 with |x|·2^L below the numerator."""
    value, limit = x.double().abs(), numerators.double()
    count = sum((value * 2.0**level < limit).to(torch.uint8) for level in (6, 12, 18))
    assert isinstance(count, Tensor)
    return count * 6

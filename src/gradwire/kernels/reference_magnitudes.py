"""Magnitudes in logarithmic bins in plain torch: the oracle of the tests, and the path of other types."""

from __future__ import annotations

import torch
from torch import Tensor


def magnitude_histogram(x: Tensor, shift: int, bins: int) -> tuple[Tensor, Tensor]:
    """Counts (bins,) int64 and energies (bins,) float64 of x (n,), binned as float32."""
    short = x.float()
    places = (short.view(torch.int32) & 0x7FFFFFFF).long() >> shift
    counts = torch.bincount(places, minlength=bins)
    energies = torch.zeros(bins, dtype=torch.float64, device=x.device)
    return counts, energies.index_add_(0, places, short.double().square())

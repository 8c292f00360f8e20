"""A histogram of magnitudes, from which the gain of every ratio follows (`gradwire.planning.ratio`)."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.dispatch import contract

_MANTISSA = 3
"""Mantissa bits that number a bin, beside the exponent: eight bins per octave, each at most an eighth
wide."""
SHIFT = 23 - _MANTISSA
"""Mantissa bits of float32 that the bins ignore."""
BINS = 256 << _MANTISSA
"""Number of bins that cover all of float32; the last ones hold Inf and NaN."""


class Histogram(NamedTuple):
    """Numbers of elements and sums of squares per bin of magnitude, (bins,) each. Histograms of units and
    ranks add up.
    """

    counts: Tensor
    energies: Tensor


@cache
def magnitude_edges() -> Tensor:
    """Edges (bins + 1,) float64 of the bins, on the CPU: bin b holds edges[b] <= |x| < edges[b + 1].
    Read only.
    """
    bits = np.arange(BINS + 1, dtype=np.uint32) << np.uint32(SHIFT)
    first_infinite = 255 << _MANTISSA
    edges = np.full(BINS + 1, np.inf)
    edges[:first_infinite] = bits[:first_infinite].view(np.float32)
    edges[first_infinite] = 2.0**128
    return torch.from_numpy(edges)


@contract()
def magnitude_histogram(x: Tensor) -> Histogram:
    """Histogram of the magnitudes of x (n,), rounded to float32: elements and energy per bin.

    >>> counts, energies = magnitude_histogram(torch.tensor([1.0, -1.1, 3.0]))
    >>> counts[counts > 0], energies.sum().round(decimals=2)
    (tensor([2, 1]), tensor(11.2100, dtype=torch.float64))
    """
    short = x.float()
    places = (short.view(torch.int32) & 0x7FFFFFFF).long() >> SHIFT
    counts = torch.bincount(places, minlength=BINS)
    energies = torch.zeros(BINS, dtype=torch.float64, device=x.device)
    return Histogram(counts, energies.index_add_(0, places, short.double().square()))

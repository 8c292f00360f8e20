"""A histogram of magnitudes, from which the gain of every ratio follows (`gradwire.plan.gain`)."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels import cpu
from gradwire.kernels.dispatch import is_fast
from gradwire.kernels.reference_magnitudes import magnitude_histogram as reference_histogram

_MANTISSA = 3
"""Bits of the mantissa beside the exponent: eight bins an octave, each at most an eighth wide."""
_SHIFT = 23 - _MANTISSA
BINS = 256 << _MANTISSA
"""Bins that cover all of float32; the last ones hold infinities and NaN."""


class Histogram(NamedTuple):
    """Elements per bin, and their sums of squares; (bins,) each, to be added up over units and ranks."""

    counts: Tensor
    energies: Tensor


@cache
def magnitude_edges() -> Tensor:
    """Edges (bins + 1,) float64: bin b holds edges[b] <= |x| < edges[b + 1]. Do not write into them."""
    bits = np.arange(BINS + 1, dtype=np.uint32) << np.uint32(_SHIFT)
    first_infinite = 255 << _MANTISSA
    edges = np.full(BINS + 1, np.inf)
    edges[:first_infinite] = bits[:first_infinite].view(np.float32)
    edges[first_infinite] = 2.0**128
    return torch.from_numpy(edges)


def magnitude_histogram(x: Tensor) -> Histogram:
    """How many elements of x (n,) lie in each bin of magnitude, and their energy, in one pass.

    >>> counts, energies = magnitude_histogram(torch.tensor([1.0, -1.1, 3.0]))
    >>> counts[counts > 0], energies.sum().round(decimals=2)
    (tensor([2, 1]), tensor(11.2100, dtype=torch.float64))
    """
    if not is_fast(x):
        return Histogram(*reference_histogram(x, _SHIFT, BINS))
    counts, energies = np.zeros(BINS, np.int64), np.zeros(BINS, np.float64)
    cpu.magnitude_histogram(x.numpy(), _SHIFT, counts, energies)
    return Histogram(torch.from_numpy(counts), torch.from_numpy(energies))

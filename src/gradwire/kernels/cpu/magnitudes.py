"""Histograms of magnitudes in logarithmic bins: counts and energies."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.cpu.jit import kernel
from gradwire.kernels.cpu.prepared import prepared
from gradwire.kernels.magnitudes import BINS, SHIFT, Histogram

_WAYS = 4  # tables in turn, so that neighbours in one bin do not wait for each other's sum


def magnitude_histogram(x: Tensor) -> Histogram:
    """Twin of `gradwire.kernels.magnitudes.magnitude_histogram`. Count and sum in one pass."""
    counts, energies = np.zeros(BINS, np.int64), np.zeros(BINS, np.float64)
    _magnitude_histogram(x.numpy(), SHIFT, counts, energies)
    return Histogram(torch.from_numpy(counts), torch.from_numpy(energies))


@prepared("float32[::1], int64, int64[::1], float64[::1]")
@kernel
def _magnitude_histogram(x: Any, shift: Any, counts: Any, energies: Any) -> None:
    """Add each element of float32 x to `counts` and, squared, to `energies` of its bin, which is the
    magnitude's bits without the lowest `shift`.
    """
    bits = x.view(np.uint32)
    bins = counts.size
    number = np.zeros(_WAYS * bins, np.int64)
    energy = np.zeros(_WAYS * bins, np.float64)
    for i in range(x.size):
        place = (i % _WAYS) * bins + np.int64((bits[i] & np.uint32(0x7FFFFFFF)) >> np.uint32(shift))
        value = np.float64(x[i])
        number[place] += 1
        energy[place] += value * value
    for way in range(_WAYS):
        for b in range(bins):
            counts[b] += number[way * bins + b]
            energies[b] += energy[way * bins + b]

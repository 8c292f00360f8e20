"""Magnitudes in logarithmic bins: counts and energies."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradwire.kernels.cpu.jit import kernel

_WAYS = 4  # tables in turn, so that neighbours in one bin do not wait for each other's sum


@kernel
def magnitude_histogram(x: Any, shift: Any, counts: Any, energies: Any) -> None:
    """Add each element's place in the bins that the upper bits of its magnitude name; float32."""
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

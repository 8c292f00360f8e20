"""Magnitudes of float32 as integers: comparisons of integers vectorise, and order NaN and Inf above
all numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradwire.kernels.cpu.jit import kernel

MAGNITUDE = np.int32(0x7FFFFFFF)
INFINITY = np.int32(0x7F800000)


@kernel
def magnitude(bits: Any) -> Any:
    """Magnitude of a float32, from its `bits` int32. Every NaN becomes equal to Inf, so that NaNs are not
    ordered.
    """
    return min(np.int32(bits & MAGNITUDE), INFINITY)

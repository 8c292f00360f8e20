"""A float32's magnitude as an integer: such comparisons vectorise, and order NaN and Inf above everything."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradwire.kernels.cpu.jit import kernel

MAGNITUDE = np.int32(0x7FFFFFFF)
INFINITY = np.int32(0x7F800000)


@kernel
def magnitude(bits: Any) -> Any:
    """That integer, with every NaN equal to Inf: their bits would order them."""
    return min(np.int32(bits & MAGNITUDE), INFINITY)

"""Sums of float32 in float64 over independent lanes. Without fast-math, a sum in a single lane is not
vectorised.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradwire.kernels.cpu.jit import kernel

LANES = 128  # a power of two


@kernel
def total(lanes: Any) -> Any:
    """Sum `lanes` (a power of two) by halves; overwrites them."""
    half = lanes.size // 2
    while half > 0:
        _add(lanes[:half], lanes[half : 2 * half])
        half //= 2
    return lanes[0]


@kernel
def _add(out: Any, a: Any) -> None:
    for i in range(out.size):
        out[i] += a[i]


@kernel
def _accumulate(x: Any, lanes: Any) -> None:
    for i in range(x.size):
        lanes[i] += abs(np.float64(x[i]))


@kernel
def add_magnitudes(x: Any, lanes: Any) -> None:
    """Add |x| of float32 x to float64 `lanes` (LANES,): element i to lane i mod LANES."""
    for start in range(0, x.size, LANES):
        _accumulate(x[start : start + LANES], lanes)


@kernel
def _accumulate_sides(x: Any, above: Any, below: Any, counts: Any) -> None:
    for i in range(x.size):
        value = np.float64(x[i])
        is_above = x[i] >= 0  # not so for NaN, which then shows in the other sum
        above[i] += value if is_above else 0.0
        below[i] += 0.0 if is_above else value
        counts[i] += is_above


@kernel
def add_sides(x: Any, above: Any, below: Any, counts: Any) -> None:
    """Add elements >= 0 of x to `above`, the others to `below`, and the number of the former to `counts`, all
    by lanes.
    """
    for start in range(0, x.size, LANES):
        _accumulate_sides(x[start : start + LANES], above, below, counts)

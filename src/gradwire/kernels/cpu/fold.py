"""Memory plus gradient in one pass."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradwire.kernels.cpu.bits import MAGNITUDE
from gradwire.kernels.cpu.jit import kernel

_BLOCK = 4096  # elements; two arrays of it stay in the first-level cache between the inner loops


@kernel
def _weighted_sum(out: Any, a: Any, b: Any, weight_a: Any, weight_b: Any) -> None:
    for i in range(out.size):
        out[i] = weight_a * a[i] + weight_b * b[i]


@kernel
def _max_magnitude(bits: Any) -> Any:
    """Magnitudes compared as integers vectorise, and order NaN and Inf above everything."""
    largest = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, np.int32(bits[i] & MAGNITUDE))
    return largest


@kernel
def _scaled(out: Any, a: Any, weight: Any) -> None:
    for i in range(out.size):
        out[i] = weight * a[i]


@kernel
def fold(
    working: Any, committed: Any, grad: Any, rows: Any, coefficient: Any, scale: Any, largest: Any
) -> Any:
    """float32: working = coefficient · committed + scale · grad on `rows` of `Pieces`, in blocks.

    An empty `committed` counts as zeros. Writes the largest magnitude of each row's gradient to `largest`
    and returns that of all sums: float32 bits as int32.
    """
    sum_max = np.int32(0)
    for row in range(rows.shape[0]):
        grad_max = np.int32(0)
        for done in range(0, rows[row, 2], _BLOCK):
            size = min(_BLOCK, rows[row, 2] - done)
            # Whole slices handed to small loops: index arithmetic inside the loops would stop vectorisation.
            there = slice(rows[row, 0] + done, rows[row, 0] + done + size)
            here = slice(rows[row, 1] + done, rows[row, 1] + done + size)
            if committed.size > 0:
                _weighted_sum(working[there], committed[there], grad[here], coefficient, scale)
            else:
                _scaled(working[there], grad[here], scale)
            grad_max = max(grad_max, _max_magnitude(grad[here].view(np.int32)))
            sum_max = max(sum_max, _max_magnitude(working[there].view(np.int32)))
        largest[row] = grad_max
    return sum_max


@kernel
def fold_momentum(
    v_out: Any,
    u_out: Any,
    v: Any,
    u: Any,
    grad: Any,
    rows: Any,
    momentum: Any,
    scales: Any,
    ahead: Any,
    largest: Any,
) -> Any:
    """float32: u' = momentum · u + scale · grad, v' = v + u'; `ahead` is Nesterov's; otherwise as `fold`."""
    sum_max = np.int32(0)
    one = np.float32(1.0)
    for row in range(rows.shape[0]):
        grad_max, scale = np.int32(0), scales[row]
        for done in range(0, rows[row, 2], _BLOCK):
            size = min(_BLOCK, rows[row, 2] - done)
            there = slice(rows[row, 0] + done, rows[row, 0] + done + size)
            here = slice(rows[row, 1] + done, rows[row, 1] + done + size)
            _weighted_sum(u_out[there], u[there], grad[here], momentum, scale)
            if ahead:
                _weighted_sum(v_out[there], v[there], u_out[there], one, momentum)
                _weighted_sum(v_out[there], v_out[there], grad[here], one, scale)
            else:
                _weighted_sum(v_out[there], v[there], u_out[there], one, one)
            grad_max = max(grad_max, _max_magnitude(grad[here].view(np.int32)))
            sum_max = max(sum_max, _max_magnitude(v_out[there].view(np.int32)))
        largest[row] = grad_max
    return sum_max


@kernel
def mask_zeros(target: Any, like: Any) -> None:
    """float32: target = 0 wherever like is 0."""
    for i in range(target.size):
        target[i] = np.float32(0.0) if like[i] == 0 else target[i]

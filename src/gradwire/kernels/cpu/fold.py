"""Memory plus gradient in one pass."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from gradwire.kernels.cpu.bits import INFINITY, MAGNITUDE

_BLOCK = 4096  # elements; two arrays of it stay in the first-level cache between the inner loops


@njit(nogil=True, cache=True)
def _weighted_sum(out: Any, a: Any, b: Any, weight_a: Any, weight_b: Any) -> None:
    for i in range(out.size):
        out[i] = weight_a * a[i] + weight_b * b[i]


@njit(nogil=True, cache=True)
def _max_magnitude(bits: Any) -> Any:
    """Magnitudes compared as integers vectorise, and order NaN and Inf above everything."""
    largest = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, np.int32(bits[i] & MAGNITUDE))
    return largest


@njit(nogil=True, cache=True)
def fold(working: Any, committed: Any, grad: Any, coefficient: Any, scale: Any) -> Any:
    """float32: working = coefficient · committed + scale · grad, with the flags of the reference."""
    grad_bits, sum_bits = grad.view(np.int32), working.view(np.int32)
    grad_max, sum_max = np.int32(0), np.int32(0)
    # Whole slices handed to small loops: index arithmetic inside the loops would stop vectorisation.
    for block in range((working.size + _BLOCK - 1) // _BLOCK):
        here = slice(block * _BLOCK, min((block + 1) * _BLOCK, working.size))
        _weighted_sum(working[here], committed[here], grad[here], coefficient, scale)
        grad_max = max(grad_max, _max_magnitude(grad_bits[here]))
        sum_max = max(sum_max, _max_magnitude(sum_bits[here]))
    return grad_max != 0, sum_max < INFINITY


@njit(nogil=True, cache=True)
def fold_momentum(
    v_out: Any, u_out: Any, v: Any, u: Any, grad: Any, momentum: Any, scale: Any, ahead: Any
) -> Any:
    """float32: u' = momentum · u + scale · grad, v' = v + u'; `ahead` is Nesterov's; flags as `fold`."""
    grad_bits, sum_bits = grad.view(np.int32), v_out.view(np.int32)
    grad_max, sum_max = np.int32(0), np.int32(0)
    one = np.float32(1.0)
    for block in range((v_out.size + _BLOCK - 1) // _BLOCK):
        here = slice(block * _BLOCK, min((block + 1) * _BLOCK, v_out.size))
        _weighted_sum(u_out[here], u[here], grad[here], momentum, scale)
        if ahead:
            _weighted_sum(v_out[here], v[here], u_out[here], one, momentum)
            _weighted_sum(v_out[here], v_out[here], grad[here], one, scale)
        else:
            _weighted_sum(v_out[here], v[here], u_out[here], one, one)
        grad_max = max(grad_max, _max_magnitude(grad_bits[here]))
        sum_max = max(sum_max, _max_magnitude(sum_bits[here]))
    return grad_max != 0, sum_max < INFINITY


@njit(nogil=True, cache=True)
def mask_zeros(target: Any, like: Any) -> None:
    """float32: target = 0 wherever like is 0."""
    for i in range(target.size):
        target[i] = np.float32(0.0) if like[i] == 0 else target[i]

"""Conversion of float32 to 16-bit floats and back, by integers: Numba has no 16-bit floats on the CPU.

Rounding is to nearest, ties to even. A finite number that is too large becomes the largest number; Inf stays
Inf and NaN stays NaN. float16 has 5 bits of exponent and 10 of mantissa, bfloat16 has 8 and 7. Loops choose
between results instead of branching, so that they vectorise.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gradwire.kernels.cpu.jit import kernel

_U = np.uint32
_INFINITY, _MAGNITUDE, _SIGN = _U(0x7F800000), _U(0x7FFFFFFF), _U(0x8000)
_LARGEST_FLOAT16, _SMALLEST_NORMAL_FLOAT16 = _U(0x477FE000), _U(0x38800000)
_LARGEST_BFLOAT16 = _U(0x7F7F0000)
_BIAS = _U(112 << 23)  # between the exponents of float32 and float16
_HALF, _HALF_BITS = np.float32(0.5), _U(0x3F000000)
_SUBNORMAL = np.float32(2.0**-24)  # one unit of float16's last place there


@kernel
def _rounded(bits: Any, dropped: Any) -> Any:
    """Round away the lowest `dropped` bits, ties to even. A carry into the exponent gives the right
    number.
    """
    return (bits + (_U(1) << (dropped - _U(1))) - _U(1) + ((bits >> dropped) & _U(1))) >> dropped


@kernel
def _to_float16(values: Any, out: Any) -> None:
    bits, shifted = values.view(np.uint32), np.empty(values.size, np.float32)
    # 0.5 has its last place where subnormals of float16 have theirs: the sum is rounded there.
    for j in range(values.size):
        shifted[j] = abs(values[j]) + _HALF
    subnormals = shifted.view(np.uint32)
    for j in range(values.size):
        magnitude = bits[j] & _MAGNITUDE
        short = _rounded(min(magnitude, _LARGEST_FLOAT16) - _BIAS, _U(13))
        short = subnormals[j] - _HALF_BITS if magnitude < _SMALLEST_NORMAL_FLOAT16 else short
        short = _U(0x7C00) if magnitude == _INFINITY else short
        short = _U(0x7E00) if magnitude > _INFINITY else short
        out[j] = np.uint16(((bits[j] >> _U(16)) & _SIGN) | short)


@kernel
def _to_bfloat16(values: Any, out: Any) -> None:
    bits = values.view(np.uint32)
    for j in range(values.size):
        magnitude = bits[j] & _MAGNITUDE
        short = _rounded(min(magnitude, _LARGEST_BFLOAT16), _U(16))
        short = _U(0x7F80) if magnitude == _INFINITY else short
        short = _U(0x7FC0) if magnitude > _INFINITY else short
        out[j] = np.uint16(((bits[j] >> _U(16)) & _SIGN) | short)


@kernel
def narrow(values: Any, is_bfloat16: Any, out: Any) -> None:
    """Round float32 `values` (n,) to bfloat16 or float16; `out` (n,) uint16 gets the bits."""
    if is_bfloat16:
        _to_bfloat16(values, out)
    else:
        _to_float16(values, out)


@kernel
def widen(halves: Any, is_bfloat16: Any, out: Any) -> None:
    """Convert bfloat16 or float16 numbers, given as bits `halves` (n,) uint16, to float32 `out` (n,)."""
    bits = out.view(np.uint32)
    if is_bfloat16:
        for j in range(halves.size):
            bits[j] = _U(halves[j]) << _U(16)
        return
    for j in range(halves.size):
        out[j] = np.float32(halves[j] & 1023) * _SUBNORMAL
    for j in range(halves.size):
        half = _U(halves[j])
        exponent = half & _U(0x7C00)
        normal = ((half & _U(0x7FFF)) << _U(13)) + _BIAS
        normal = normal + _BIAS if exponent == _U(0x7C00) else normal
        bits[j] = (bits[j] if exponent == _U(0) else normal) | ((half & _SIGN) << _U(16))

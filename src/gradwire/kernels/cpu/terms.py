"""Numerators of GComp's metric from parameters and optimizer state, in one pass.

All operations are in float64 and rounded one by one, so that ranks on different processors get the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from gradwire.kernels.cpu.jit import kernel
from gradwire.kernels.cpu.prepared import prepared
from gradwire.kernels.terms import Terms

_BLOCK = 512
_SAFE = 1.0 - 2.0**-23


def numerators(
    parameter: Tensor, square: Tensor | None, momentum: Tensor | None, terms: Terms, out: Tensor
) -> None:
    """Compute as the contract says, in one pass: 12 bytes are read per element for Adam."""
    _numerators(*_arrays(parameter, square, momentum), _numbers(terms), out.numpy())


def numerator_exponents(
    parameter: Tensor, square: Tensor | None, momentum: Tensor | None, terms: Terms, out: Tensor
) -> None:
    """Compute as the contract says, in one pass; one byte is written per element."""
    _numerator_exponents(*_arrays(parameter, square, momentum), _numbers(terms), out.numpy())


def mantissa_levels(x: Tensor, numerators: Tensor, out: Tensor) -> None:
    """Compute as the contract says, with three comparisons per element."""
    _mantissa_levels(x.numpy(), numerators.numpy(), out.numpy())


def _arrays(
    parameter: Tensor, square: Tensor | None, momentum: Tensor | None
) -> tuple[np.ndarray[tuple[int], np.dtype[np.float32]], ...]:
    """Parameter, square and momentum as float32 arrays; an empty array for `None`, which means zeros."""
    return tuple((parameter[:0] if each is None else each).numpy() for each in (parameter, square, momentum))


def _numbers(terms: Terms) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([terms.slope, terms.offset, terms.pull, terms.share, terms.eps])


@kernel
def _fill(parameter: Any, square: Any, momentum: Any, terms: Any, out: Any) -> None:
    slope, offset, pull, share, eps = terms[0], terms[1], terms[2], terms[3], terms[4]
    if square.size:
        for i in range(out.size):
            root = np.sqrt(share * np.float64(square[i])) + eps
            out[i] = np.float64(parameter[i]) * (slope * root + offset)
    else:
        factor = slope * eps + offset
        for i in range(out.size):
            out[i] = np.float64(parameter[i]) * factor
    if momentum.size:
        for i in range(out.size):
            out[i] -= pull * np.float64(momentum[i])


@prepared("float32[::1], float32[::1], float32[::1], float64[::1], float32[::1]")
@kernel
def _numerators(parameter: Any, square: Any, momentum: Any, terms: Any, out: Any) -> None:
    """out (n,) float32: |parameter·(slope·(√(share·square) + eps) + offset) − pull·momentum|, rounded towards
    zero.

    `terms` are slope, offset, pull, share and eps. An empty `square` or `momentum` means zeros. A result that
    is not finite becomes 0.
    """
    exact = np.empty(_BLOCK)
    for start in range(0, out.size, _BLOCK):
        stop = min(start + _BLOCK, out.size)
        here = exact[: stop - start]
        _fill(parameter[start:stop], square[start:stop], momentum[start:stop], terms, here)
        for i in range(here.size):
            value = np.abs(here[i]) * _SAFE
            out[start + i] = np.float32(value) if value < np.inf else np.float32(0.0)


@prepared("float32[::1], float32[::1], float32[::1], float64[::1], uint8[::1]")
@kernel
def _numerator_exponents(parameter: Any, square: Any, momentum: Any, terms: Any, out: Any) -> None:
    """Write to `out` (n,) uint8 the exponents of the results of `_numerators`, whose other arguments are the
    same, biased as float32's and clamped to 0 … 255.
    """
    exact = np.empty(_BLOCK)
    bits = exact.view(np.int64)
    for start in range(0, out.size, _BLOCK):
        stop = min(start + _BLOCK, out.size)
        _fill(parameter[start:stop], square[start:stop], momentum[start:stop], terms, exact[: stop - start])
        for i in range(stop - start):
            wide = (bits[i] >> 52) & 0x7FF
            exponent = min(max(wide - 896, 0), 255)
            out[start + i] = exponent if wide < 0x7FF else 0


@prepared("float32[::1], float32[::1], uint8[::1]")
@kernel
def _mantissa_levels(x: Any, numerators: Any, out: Any) -> None:
    """out (n,) uint8: the largest L of 0, 6, 12, 18 with |x|·2^L below the numerator."""
    for i in range(out.size):
        value = np.abs(np.float64(x[i]))
        limit = np.float64(numerators[i])
        count = int(value * 64.0 < limit) + int(value * 4096.0 < limit) + int(value * 262144.0 < limit)
        out[i] = 6 * count

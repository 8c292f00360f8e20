"""The numerator C of GComp's metric δ = C/g: with which quantity an optimizer compares a gradient.

Kernels read parameter and state once, 12 bytes per element for Adam, and write a float or an exponent.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels import cpu
from gradwire.kernels import reference_numerators as reference
from gradwire.kernels.dispatch import is_fast
from gradwire.kernels.terms import Terms

_NONE = torch.empty(0)


def numerators(
    parameter: Tensor, square: Tensor | None, momentum: Tensor | None, terms: Terms, out: Tensor
) -> None:
    """out (n,) float32 = |C|, rounded so that it is never more; 0 where that is not finite.

    `square` and `momentum` (n,) are the optimizer's moments; `None` means zeros.

    >>> out = torch.empty(2)
    >>> numerators(torch.tensor([1.0, -2.0]), None, None, Terms(offset=10.0), out)
    >>> out
    tensor([10.0000, 20.0000])
    """
    _check(parameter, square, momentum, out, torch.float32)
    if _is_fast(parameter, square, momentum, out):
        theta, v, m = _arrays(parameter, square, momentum)
        cpu.numerators(theta, v, m, _numbers(terms), out.numpy())
    else:
        out.copy_(reference.numerators(parameter, square, momentum, terms))


def numerator_exponents(
    parameter: Tensor, square: Tensor | None, momentum: Tensor | None, terms: Terms, out: Tensor
) -> None:
    """out (n,) uint8 = the exponents of C, biased as float32's are, held to 0 … 255; 0 if not finite.

    >>> out = torch.empty(3, dtype=torch.uint8)
    >>> numerator_exponents(torch.tensor([1.0, -4.0, torch.nan]), None, None, Terms(offset=1.0), out)
    >>> out
    tensor([127, 129,   0], dtype=torch.uint8)
    """
    _check(parameter, square, momentum, out, torch.uint8)
    if _is_fast(parameter, square, momentum, out):
        theta, v, m = _arrays(parameter, square, momentum)
        cpu.numerator_exponents(theta, v, m, _numbers(terms), out.numpy())
    else:
        out.copy_(reference.numerator_exponents(parameter, square, momentum, terms))


def mantissa_levels(x: Tensor, numerators: Tensor, out: Tensor) -> None:
    """out (n,) uint8 = the largest L of 0, 6, 12, 18 with |x|·2^L below the numerator; 0 for NaN.

    >>> out = torch.empty(3, dtype=torch.uint8)
    >>> mantissa_levels(torch.tensor([1.0, 0.01, torch.nan]), torch.full((3,), 65.0), out)
    >>> out
    tensor([ 6, 12,  0], dtype=torch.uint8)
    """
    _check(x, numerators, None, out, torch.uint8)
    if is_fast(x, numerators) and out.is_contiguous():
        cpu.mantissa_levels(x.numpy(), numerators.numpy(), out.numpy())
    else:
        out.copy_(reference.mantissa_levels(x, numerators))


def _is_fast(parameter: Tensor, square: Tensor | None, momentum: Tensor | None, out: Tensor) -> bool:
    given = [each for each in (parameter, square, momentum) if each is not None]
    return is_fast(*given) and out.device.type == "cpu" and out.is_contiguous()


def _arrays(
    parameter: Tensor, square: Tensor | None, momentum: Tensor | None
) -> tuple[np.ndarray[tuple[int], np.dtype[np.float32]], ...]:
    return tuple((_NONE if each is None else each).numpy() for each in (parameter, square, momentum))


def _numbers(terms: Terms) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([terms.slope, terms.offset, terms.pull, terms.share, terms.eps])


def _check(
    first: Tensor, second: Tensor | None, third: Tensor | None, out: Tensor, dtype: torch.dtype
) -> None:
    if out.dtype != dtype or any(t is not None and t.shape != out.shape for t in (first, second, third)):
        # The kernels check no bounds.
        raise ValueError(f"out must be {dtype} of the shape {tuple(first.shape)}, as all others are")

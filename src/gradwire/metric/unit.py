"""The metric over the parameters of a unit, as far as replicas agree on it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from gradwire.kernels import Terms, numerator_exponents
from gradwire.kernels import numerators as fill_numerators
from gradwire.metric.optimizers import Numerator, numerator_of
from gradwire.moment import Moment, Part, Replicated, is_dense

Fill = Callable[[Tensor, Tensor | None, Tensor | None, Terms, Tensor], None]
SHARE = {torch.bfloat16: 2.0**-5, torch.float16: 2.0**-2}
"""What counts as C where parameters have 16 bits, so that one rounding loses less than 2^-13·|C|.

In float32 a unit in the last place is nothing. In 16 bits it is what updates amount to, and through momentum
gradients that each move nothing move a parameter together: with whole units a small transformer in bfloat16
was at a loss of 2.78 after 200 steps of AdamW instead of 2.67, as it is like this.
"""
_HALF_BIAS = 127 - 15
"""Between the biased exponents of float32 and float16."""


def numerators(numel: int, at: Moment) -> Tensor:
    """(numel,) float32: |C| of every element of a unit, never more; 0 where nothing may be lost.

    C is what a gradient is compared with: times `at.scale`, where gradients come so many times as large, and
    by `SHARE` smaller where parameters have 16 bits.
    """
    return _over_parts(numel, at, torch.float32, fill_numerators)


def thresholds(numel: int, at: Moment, dtype: torch.dtype = torch.float32) -> Tensor:
    """(numel,) uint8: the exponents t of C, biased as those of `dtype`, which gradient and parameter have.

    Of a gradient with exponent e, t − e bits may be lost. Rounded to nearest that is an error of half a unit
    in the last place of C in that type or less, and so below 2^-24·|C| in float32; in 16-bit types, where C
    is taken smaller (`SHARE`), below 2^-13·|C|. As t depends on nothing but what replicas hold alike, whoever
    receives the gradient knows it already. 0 where nothing may be lost.

    >>> sgd = dict(lr=2.0**-10, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False)
    >>> ones = Replicated(torch.ones(2), sgd, {}, torch.optim.SGD)
    >>> thresholds(2, Moment(step=0, unit=0, rank=0, world=1, replicas=lambda name: ones))
    tensor([137, 137], dtype=torch.uint8)
    """
    found = _over_parts(numel, at, torch.uint8, numerator_exponents)
    return found.clamp_(min=_HALF_BIAS).sub_(_HALF_BIAS) if dtype == torch.float16 else found


def _over_parts(numel: int, at: Moment, dtype: torch.dtype, fill: Fill) -> Tensor:
    out = torch.zeros(numel, dtype=dtype)
    done = 0
    for part in at.parts or (Part("", (numel,), 0, numel),):
        seen = at.replicas(part.name)
        if seen is not None:
            refusal = _over_part(seen, part, at.scale, out[done : done + part.numel], fill)
            if refusal:
                _say(refusal)
        done += part.numel
    return out


def _over_part(seen: Replicated, part: Part, scale: float, out: Tensor, fill: Fill) -> str:
    """Fill in one parameter's, and return nothing; or leave zeros, and say why."""
    found = numerator_of(seen)
    if not isinstance(found, Numerator):
        return found
    if seen.parameter.dtype == torch.float64:
        return "parameters in float64"
    tensors: list[Tensor | None] = []
    for state in (seen.parameter, *(seen.state.get(name) for name in (found.square, found.momentum))):
        flat = _in_memory_order(state, seen.parameter)
        if state is not None and flat is None:
            return "an optimizer state that is laid out unlike its parameter"
        tensors.append(None if flat is None else flat[part.start : part.stop].float())
    parameter, square, momentum = tensors
    assert parameter is not None
    fill(parameter, square, momentum, found.terms.times(scale * SHARE.get(seen.parameter.dtype, 1.0)), out)
    return ""


def _in_memory_order(tensor: Tensor | None, like: Tensor) -> Tensor | None:
    """Flat, as DDP's buckets hold the gradient of `like`: in the order of its memory if that is dense."""
    if tensor is None or tensor.shape != like.shape:
        return None
    if not is_dense(like):
        return tensor.reshape(-1)
    if tensor.stride() != like.stride() and not (tensor.is_contiguous() and like.is_contiguous()):
        return None
    return tensor.as_strided((like.numel(),), (1,))


def _say(refusal: str) -> None:
    # Python shows a text once; it names no parameter, so that it is the same for all of them.
    text = (
        f"gcomp knows no error bound for {refusal}: gradients of its parameters are sent without loss, which "
        "takes up to three times the bytes. Use mode='lossless' to say that this is meant."
    )
    try:
        warnings.warn(text, stacklevel=2)
    except UserWarning:  # made an error, which would end every step
        _log_once(text)


@cache
def _log_once(text: str) -> None:
    logging.getLogger("gradwire").warning(text)

"""δ: how far below a parameter its update lies, and so how precise a gradient must be (GComp's metric).

Li et al. 2024, "Near-lossless gradient compression for data-parallel distributed DNN training" (GComp), table
2 and appendix A. Every optimizer there sets θ ← θ' − k·g with g the gradient and a θ' and k that do not
contain it, and δ = C/g with C = θ'/k: what is lost of g below 2^-24·|C| moves θ by less than a unit in the
last place of θ', if that is a float32. C follows from what all replicas hold alike, except for g's own part
in the second moment. First come the formulas for torch's optimizers, then C over the parameters of a unit.

Differences from the paper:

- Second moments are the previous step's, and of these what surely stays: √v̂ is at least √(β2·v/(1 − β2^t))
  whatever the gradient. For AdaGrad and RMSProp the bound then holds with all that a gradient does. In Adam
  it also turns the second moment under the first: at worst 1.47 times as much with β of 0.9 and 0.999.
- The first step of momentum takes g as it is, without 1 − τ, as torch does.
- What torch can do beside that (amsgrad, centered, maximize, a momentum in RMSProp, …) is refused with a
  reason, and so is every optimizer that is not exactly one of these.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import GradwireWarning
from gradwire.kernels.terms import Terms, numerator_exponents
from gradwire.kernels.terms import numerators as fill_numerators
from gradwire.unit.context import ExchangeContext, Part, Replicated, is_dense


@dataclass(frozen=True)
class Numerator:
    """C = θ·(slope·(√(share·v) + eps) + offset) − pull·m.

    `square` and `momentum` are the names of v and m in the optimizer's state, empty where they are zeros.
    """

    terms: Terms
    square: str = ""
    momentum: str = ""


UNTOUCHED = Numerator(Terms())
"""C = 0, so that nothing may be lost: for gradients that do not reach the parameter in this step."""

Formula = Callable[[Mapping[str, Any], Mapping[str, Any]], "Numerator | str"]
"""Function from a group's options and a parameter's state to C, or to the name of an option without a
formula."""


def numerator_of(seen: Replicated) -> Numerator | str:
    """Formula of C for the parameter `seen`; or the name of the optimizer, or its option, for which there is
    none.

    >>> parameter = torch.nn.Parameter(torch.ones(3))
    >>> sgd = torch.optim.SGD([parameter], lr=0.5)
    >>> numerator_of(Replicated(parameter, sgd.param_groups[0], {}, torch.optim.SGD)).terms.offset
    2.0
    >>> numerator_of(Replicated(parameter, {**sgd.param_groups[0], "maximize": True}, {}, torch.optim.SGD))
    'SGD(maximize=True)'
    """
    name = seen.optimizer.__name__
    formula = _FORMULAS.get(seen.optimizer)
    if formula is None:
        return f"{seen.optimizer.__module__}.{name}"
    if seen.parameter.is_complex():
        return f"{name} with complex parameters"
    for option in ("maximize", "differentiable", "amsgrad", "centered"):
        if seen.group.get(option):
            return f"{name}({option}=True)"
    found = formula(seen.group, seen.state)
    return f"{name}({found})" if isinstance(found, str) else found


def _sgd(group: Mapping[str, Any], state: Mapping[str, Any]) -> Numerator | str:
    rate, decay = float(group["lr"]), float(group["weight_decay"])
    momentum, dampening = float(group["momentum"]), float(group["dampening"])
    is_first = state.get("momentum_buffer") is None
    buffer = "" if is_first else "momentum_buffer"
    if rate == 0.0:
        return UNTOUCHED
    if group["nesterov"]:
        reach = rate * (1.0 + momentum)
        return Numerator(Terms(offset=1.0 / reach - decay, pull=momentum**2 / (1.0 + momentum)), "", buffer)
    if momentum == 0.0 or is_first:
        return Numerator(Terms(offset=1.0 / rate - decay))
    if dampening == 1.0:
        return UNTOUCHED
    share = 1.0 - dampening
    return Numerator(Terms(offset=1.0 / (rate * share) - decay, pull=momentum / share), "", buffer)


def _adagrad(group: Mapping[str, Any], state: Mapping[str, Any]) -> Numerator | str:
    rate = float(group["lr"]) / (1.0 + _steps(state) * float(group["lr_decay"]))
    if rate == 0.0:
        return UNTOUCHED
    terms = Terms(slope=1.0 / rate, offset=-float(group["weight_decay"]), eps=float(group["eps"]))
    return Numerator(terms, "sum" if "sum" in state else "")


def _rmsprop(group: Mapping[str, Any], state: Mapping[str, Any]) -> Numerator | str:
    if group["momentum"]:
        return f"momentum={group['momentum']}"
    rate = float(group["lr"])
    if rate == 0.0:
        return UNTOUCHED
    terms = Terms(
        slope=1.0 / rate,
        offset=-float(group["weight_decay"]),
        share=float(group["alpha"]),
        eps=float(group["eps"]),
    )
    return Numerator(terms, "square_avg" if "square_avg" in state else "")


def _adam(group: Mapping[str, Any], state: Mapping[str, Any]) -> Numerator | str:
    rate, decay = float(group["lr"]), float(group["weight_decay"])
    beta1, beta2 = (float(beta) for beta in group["betas"])
    if rate == 0.0:
        return UNTOUCHED
    step = _steps(state) + 1.0
    slope, offset = (1.0 - beta1**step) / (rate * (1.0 - beta1)), -decay
    if group.get("decoupled_weight_decay"):
        slope, offset = slope * (1.0 - rate * decay), 0.0
    terms = Terms(slope, offset, beta1 / (1.0 - beta1), beta2 / (1.0 - beta2**step), float(group["eps"]))
    if "exp_avg_sq" not in state:
        return Numerator(terms)
    return Numerator(terms, "exp_avg_sq", "exp_avg")


def _adamw(group: Mapping[str, Any], state: Mapping[str, Any]) -> Numerator | str:
    return _adam({**group, "decoupled_weight_decay": True}, state)


def _steps(state: Mapping[str, Any]) -> float:
    """Steps that the optimizer has taken; a tensor in some of its variants."""
    return float(state.get("step", 0.0))


_FORMULAS: Mapping[type, Formula] = {
    torch.optim.SGD: _sgd,
    torch.optim.Adagrad: _adagrad,
    torch.optim.RMSprop: _rmsprop,
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adamw,
}


Fill = Callable[[Tensor, Tensor | None, Tensor | None, Terms, Tensor], None]
SHARE = {torch.bfloat16: 2.0**-5, torch.float16: 2.0**-2}
"""The part of C that counts where parameters have 16 bits: one rounding then loses less than 2^-13·|C|.

In float32 a unit in the last place is nothing. In 16 bits it is what updates amount to, and through momentum
gradients that each move nothing move a parameter together: with whole units a small transformer in bfloat16
was at a loss of 2.78 after 200 steps of AdamW instead of 2.67, as it is like this.
"""
_HALF_BIAS = 127 - 15
"""Between the biased exponents of float32 and float16."""


def numerators(numel: int, ctx: ExchangeContext) -> Tensor:
    """|C| of every element of a unit, float32 (numel,), rounded towards zero; 0 where nothing may be lost.

    C is the number to which a gradient is compared. It is multiplied by `ctx.scale`, as gradients are, and
    for 16-bit parameters by `SHARE`.
    """
    return _over_parts(numel, ctx, torch.float32, fill_numerators)


def thresholds(numel: int, ctx: ExchangeContext, dtype: torch.dtype = torch.float32) -> Tensor:
    """Exponents t of C, uint8 (numel,), biased as those of `dtype`, the type of gradient and parameter.

    A gradient with exponent e may lose t − e bits. Rounding to nearest then errs by at most half a unit in
    the last place of C in that type: below 2^-24·|C| in float32; in 16-bit types, where C is taken smaller
    (`SHARE`), below 2^-13·|C|. t depends only on values that replicas share, so the receiver of a gradient
    knows it already. t is 0 where nothing may be lost.

    >>> sgd = dict(lr=2.0**-10, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False)
    >>> ones = Replicated(torch.ones(2), sgd, {}, torch.optim.SGD)
    >>> thresholds(2, ExchangeContext(step=0, unit=0, rank=0, world=1, replicas=lambda name: ones))
    tensor([137, 137], dtype=torch.uint8)
    """
    found = _over_parts(numel, ctx, torch.uint8, numerator_exponents)
    return found.clamp_(min=_HALF_BIAS).sub_(_HALF_BIAS) if dtype == torch.float16 else found


def _over_parts(numel: int, ctx: ExchangeContext, dtype: torch.dtype, fill: Fill) -> Tensor:
    out = torch.zeros(numel, dtype=dtype, device="cpu")
    done = 0
    for part in ctx.parts or (Part("", (numel,), 0, numel),):
        seen = ctx.replicas(part.name)
        if seen is not None:
            refusal = _over_part(seen, part, ctx.scale, out[done : done + part.numel], fill)
            if refusal:
                _say(refusal)
        done += part.numel
    return out


def _over_part(seen: Replicated, part: Part, scale: float, out: Tensor, fill: Fill) -> str:
    """Write the numerator of one parameter's elements, which all replicas have `seen`, to `out`, by `fill`.
    `part` says which elements they are, and `scale` multiplies the result. Returns an empty text; or
    leaves zeros, and returns the reason.
    """
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
        warnings.warn(text, GradwireWarning, stacklevel=2)
    except GradwireWarning:  # made an error, which would end every step
        _log_once(text)


@cache
def _log_once(text: str) -> None:
    logging.getLogger("gradwire").warning(text)

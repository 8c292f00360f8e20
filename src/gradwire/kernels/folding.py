"""Memory plus gradient, and what a memory does with what is left."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from gradwire.kernels import cpu, reference
from gradwire.kernels.dispatch import is_fast
from gradwire.kernels.slices import each_slice


class Folded(NamedTuple):
    """What one fold saw."""

    any_gradient: bool
    """Whether any element of the gradient was non-zero."""
    finite: bool
    """Whether memory plus gradient is finite everywhere."""


def fold(working: Tensor, committed: Tensor, grad: Tensor, coefficient: float, scale: float = 1.0) -> Folded:
    """working = coefficient · committed + scale · grad in one pass; all three are (numel,).

    >>> import torch
    >>> working = torch.empty(2)
    >>> fold(working, torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.0]), 0.5)
    Folded(any_gradient=True, finite=True)
    >>> working
    tensor([1., 1.])
    """
    if not working.shape == committed.shape == grad.shape:
        # The kernel checks no bounds: it would read beyond the shorter one.
        raise ValueError(f"shapes differ: {working.shape}, {committed.shape}, {grad.shape}")
    if not is_fast(working, committed, grad):
        return Folded(*reference.fold(working, committed, grad, coefficient, scale))
    out, old, new = working.numpy(), committed.numpy(), grad.numpy()
    weights = np.float32(coefficient), np.float32(scale)

    def part(here: slice) -> Folded:
        return Folded(*cpu.fold(out[here], old[here], new[here], *weights))

    return _together(each_slice(grad.numel(), part))


def _together(slices: list[Folded]) -> Folded:
    if len(slices) == 1:
        return slices[0]
    return Folded(any(seen.any_gradient for seen in slices), all(seen.finite for seen in slices))


def fold_momentum(
    working: tuple[Tensor, Tensor],
    committed: tuple[Tensor, Tensor],
    grad: Tensor,
    momentum: float,
    scale: float = 1.0,
    *,
    nesterov: bool = False,
) -> Folded:
    """From (v, u), each (numel,), to u' = momentum · u + scale · grad and v' = v + u', in one pass.

    With `nesterov`, v' = v + momentum · u' + scale · grad (Lin et al. 2018, section 3, and appendix B).

    >>> import torch
    >>> v, u = torch.empty(1), torch.empty(1)
    >>> fold_momentum((v, u), (torch.tensor([5.0]), torch.tensor([2.0])), torch.tensor([1.0]), 0.5)
    Folded(any_gradient=True, finite=True)
    >>> v, u
    (tensor([7.]), tensor([2.]))
    """
    planes = (*working, *committed)
    if any(plane.shape != grad.shape for plane in planes):
        raise ValueError(f"shapes differ: {[tuple(plane.shape) for plane in planes]}, {tuple(grad.shape)}")
    if not is_fast(*planes, grad):
        return Folded(*reference.fold_momentum(working, committed, grad, momentum, scale, nesterov))
    v_out, u_out, v, u = (plane.numpy() for plane in planes)
    new, weights = grad.numpy(), (np.float32(momentum), np.float32(scale))

    def part(here: slice) -> Folded:
        outs, olds = (v_out[here], u_out[here]), (v[here], u[here])
        return Folded(*cpu.fold_momentum(*outs, *olds, new[here], *weights, nesterov))

    return _together(each_slice(grad.numel(), part))


def mask_zeros(target: Tensor, like: Tensor) -> None:
    """Make `target` (numel,) zero wherever `like` (numel,) is.

    >>> import torch
    >>> target = torch.ones(3)
    >>> mask_zeros(target, torch.tensor([1.0, 0.0, 2.0]))
    >>> target
    tensor([1., 0., 1.])
    """
    if not is_fast(target, like) or target.shape != like.shape:
        reference.mask_zeros(target, like)
        return
    cpu.mask_zeros(target.numpy(), like.numpy())

"""Memory plus gradient, and what a memory does with what is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels import cpu, reference
from gradwire.kernels.dispatch import is_fast
from gradwire.kernels.pieces import Pieces, whole
from gradwire.kernels.range import LARGEST_GRADIENT, LARGEST_SUM
from gradwire.kernels.slices import each_slice, threads_for


class Folded(NamedTuple):
    """What one fold saw."""

    idle: tuple[int, ...]
    """Numbers of the pieces whose gradient has nothing but zeros."""
    finite: bool
    """Whether memory plus gradient is finite everywhere, and small enough to be remembered where there is a
    memory (`LARGEST_GRADIENT`, `LARGEST_SUM`)."""


def fold(
    working: Tensor,
    committed: Tensor | None,
    grad: Tensor,
    coefficient: float,
    scale: float = 1.0,
    pieces: Pieces | None = None,
) -> Folded:
    """working = coefficient · committed + scale · grad in one pass; without a memory, scale · grad.

    All are (numel,), or, with `pieces`, planes and a bucket: everything outside the pieces stays as it is.

    >>> import torch
    >>> working = torch.empty(2)
    >>> fold(working, torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.0]), 0.5)
    Folded(idle=(), finite=True)
    >>> working
    tensor([1., 1.])
    >>> fold(working, None, torch.tensor([0.0, 9.0]), 1.0, 2.0, Pieces([(1, 0, 1), (0, 1, 1)]))
    Folded(idle=(0,), finite=True)
    >>> working
    tensor([18.,  0.])
    """
    pieces = _checked(pieces, [working] if committed is None else [working, committed], grad)
    memory = None if committed is None else _loaded(working, committed, pieces)
    if not is_fast(working, grad) or not (memory is None or is_fast(memory)):

        def one(plane: slice, bucket: slice, _number: int) -> tuple[bool, bool]:
            old = None if memory is None else memory[plane]
            return reference.fold(working[plane], old, grad[bucket], coefficient, scale)

        return _piece_by_piece(pieces, one)
    out, new = working.numpy(), grad.numpy()
    old = out[:0] if memory is None else memory.numpy()
    weights = np.float32(coefficient), np.float32(scale)
    seen = _in_threads(
        pieces, lambda rows, _numbers, largest: cpu.fold(out, old, new, rows, *weights, largest)
    )
    return seen.judged(scale, remembers=memory is not None)


def fold_momentum(
    working: tuple[Tensor, Tensor],
    committed: tuple[Tensor, Tensor],
    grad: Tensor,
    momentum: float,
    scale: float | Sequence[float] = 1.0,
    pieces: Pieces | None = None,
    *,
    nesterov: bool = False,
) -> Folded:
    """From (v, u), each (numel,), to u' = momentum · u + scale · grad and v' = v + u', in one pass.

    With `nesterov`, v' = v + momentum · u' + scale · grad (Lin et al. 2018, section 3, and appendix B).
    `pieces` as for `fold`; each may have a scale of its own.

    >>> import torch
    >>> v, u = torch.empty(1), torch.empty(1)
    >>> fold_momentum((v, u), (torch.tensor([5.0]), torch.tensor([2.0])), torch.tensor([1.0]), 0.5)
    Folded(idle=(), finite=True)
    >>> v, u
    (tensor([7.]), tensor([2.]))
    """
    pieces = _checked(pieces, (*working, *committed), grad)
    planes = (*working, *(_loaded(*pair, pieces) for pair in zip(working, committed, strict=True)))
    scales = np.broadcast_to(np.asarray(scale, np.float64), len(pieces))
    if not is_fast(*planes, grad):

        def one(plane: slice, bucket: slice, number: int) -> tuple[bool, bool]:
            v_out, u_out, v, u = (each[plane] for each in planes)
            weights = momentum, float(scales[number])
            return reference.fold_momentum((v_out, u_out), (v, u), grad[bucket], *weights, nesterov)

        return _piece_by_piece(pieces, one)
    v_out, u_out, v, u = (plane.numpy() for plane in planes)
    new, weight, narrow = grad.numpy(), np.float32(momentum), scales.astype(np.float32)
    seen = _in_threads(
        pieces,
        lambda rows, numbers, largest: cpu.fold_momentum(
            v_out, u_out, v, u, new, rows, weight, narrow[numbers], nesterov, largest
        ),
    )
    return seen.judged(scales, remembers=True)


def _checked(pieces: Pieces | None, planes: Sequence[Tensor], grad: Tensor) -> Pieces:
    """The kernels check no bounds: they would read beyond the shortest one."""
    same = all(plane.shape == planes[0].shape for plane in planes)
    if pieces is None and same and grad.shape == planes[0].shape:
        return whole(grad.numel())
    if pieces is None or not same or pieces.ends[0] > planes[0].numel() or pieces.ends[1] > grad.numel():
        shapes = ", ".join(str(tuple(each.shape)) for each in (*planes, grad))
        raise ValueError(f"shapes differ, or are too small for the pieces: {shapes}")
    return pieces


def _loaded(working: Tensor, committed: Tensor, pieces: Pieces) -> Tensor:
    """`committed` in the working type: itself, or else its pieces in `working`, to be folded in place."""
    if committed.dtype == working.dtype:
        return committed
    for plane, _bucket in pieces.slices():
        working[plane] = committed[plane]
    return working


def _piece_by_piece(pieces: Pieces, fold_one: Callable[[slice, slice, int], tuple[bool, bool]]) -> Folded:
    seen = [fold_one(*where, number) for number, where in enumerate(pieces.slices())]
    idle = tuple(number for number, (any_gradient, _finite) in enumerate(seen) if not any_gradient)
    return Folded(idle, all(finite for _any_gradient, finite in seen))


Rows = NDArray[np.int64]
Magnitudes = NDArray[np.int32]
"""Bits of float32 without the sign: as integers they order NaN and Inf above everything."""


class _Seen(NamedTuple):
    """The largest magnitude of each piece's gradient, and of all sums."""

    gradients: Magnitudes
    sums: int

    def judged(self, scale: float | NDArray[np.float64], remembers: bool) -> Folded:
        """What to make of it, given what gradients are multiplied by."""
        bounds = (LARGEST_GRADIENT, LARGEST_SUM) if remembers else (np.inf, np.inf)
        with np.errstate(invalid="ignore"):  # NaN is not below anything
            scaled = self.gradients.view(np.float32).astype(np.float64) * np.abs(scale)
        small = bool((scaled < bounds[0]).all() and np.int32(self.sums).view(np.float32) < bounds[1])
        idle = self.gradients == 0
        return Folded(tuple(idle.nonzero()[0].tolist()) if idle.any() else (), small)


def _in_threads(pieces: Pieces, run: Callable[[Rows, Rows | slice, Magnitudes], int]) -> _Seen:
    """Run a kernel on rows of pieces, or parts of them, whose largest gradients it writes down."""
    if threads_for(pieces.numel) == 1:
        largest = np.empty(len(pieces), np.int32)
        return _Seen(largest, run(pieces.table, slice(None), largest))
    largest = np.zeros(len(pieces), np.int32)

    def part(here: slice) -> tuple[Rows, Magnitudes, int]:
        rows, numbers = pieces.within(here)
        seen = np.empty(len(rows), np.int32)
        return numbers, seen, run(rows, numbers, seen)

    parts = each_slice(pieces.numel, part)
    for numbers, seen, _sums in parts:
        largest[numbers] = np.maximum(largest[numbers], seen)
    return _Seen(largest, max(sums for _numbers, _seen, sums in parts))


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

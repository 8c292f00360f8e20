"""Memory plus gradient in one pass, with momentum if asked for, and findings about the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.dispatch import contract
from gradwire.kernels.flagged import zero_idle
from gradwire.kernels.pieces import Pieces, whole
from gradwire.kernels.range import LARGEST_GRADIENT, LARGEST_SUM
from gradwire.kernels.uploads import sent_to


class Findings(NamedTuple):
    """Findings of one compensation. On a device they stay there as tensors, because reading them would
    wait."""

    idle: tuple[int, ...] | Tensor
    """Numbers of the pieces whose gradient is all zeros; or (pieces,) bool on the device."""
    finite: bool | Tensor
    """True if memory plus gradient is finite everywhere. With a memory it must also be small enough to be
    remembered (`LARGEST_GRADIENT`, `LARGEST_SUM`). Or one bool on the device."""

    def read(self) -> tuple[tuple[int, ...], bool]:
        """Return (`idle` as numbers of pieces, `finite`) on the host; waits for the device if it holds them.

        >>> Findings(torch.tensor([False, True]), torch.tensor(True)).read()
        ((1,), True)
        """
        if not isinstance(self.idle, Tensor):
            return self.idle, bool(self.finite)
        finite = cast(Tensor, self.finite).view(1)
        *marks, is_finite = torch.cat([self.idle, finite]).tolist()  # at once: each read waits for the device
        return tuple(number for number, is_idle in enumerate(marks) if is_idle), is_finite


def _fits(
    working: Tensor,
    committed: Tensor | None,
    grad: Tensor,
    coefficient: float,
    scale: float = 1.0,
    pieces: Pieces | None = None,
) -> None:
    _check(pieces, (working,) if committed is None else (working, committed), grad)


def _marks_fit(
    working: Tensor,
    committed: Tensor | None,
    grad: Tensor,
    coefficient: float,
    scale: float,
    pieces: Pieces,
    slots: Sequence[int],
    marks: Tensor,
) -> None:
    _check(pieces, (working,) if committed is None else (working, committed), grad)
    count = marks.numel() // 2
    if max(slots, default=-1) >= count or marks.numel() != 2 * count + 1 or marks.dtype != torch.int32:
        raise ValueError(f"{marks.numel()} marks of {marks.dtype} do not fit parameters {list(slots)}")


def _momentum_fits(
    working: tuple[Tensor, Tensor],
    committed: tuple[Tensor, Tensor],
    grad: Tensor,
    momentum: float,
    scale: float | Sequence[float] = 1.0,
    pieces: Pieces | None = None,
    *,
    nesterov: bool = False,
) -> None:
    _check(pieces, (*working, *committed), grad)


def _check(pieces: Pieces | None, planes: Sequence[Tensor], grad: Tensor) -> None:
    """Raise `ValueError` if pieces reach beyond the planes or the gradient, where kernels would read on."""
    shape = planes[0].shape
    same = all(plane.shape == shape for plane in planes)
    if pieces is None and same and grad.shape == shape:
        return
    if pieces is None or not same or pieces.ends[0] > planes[0].numel() or pieces.ends[1] > grad.numel():
        shapes = ", ".join(str(tuple(each.shape)) for each in (*planes, grad))
        raise ValueError(f"shapes differ, or are too small for the pieces: {shapes}")


@contract(_fits)
def compensate(
    working: Tensor,
    committed: Tensor | None,
    grad: Tensor,
    coefficient: float,
    scale: float = 1.0,
    pieces: Pieces | None = None,
) -> Findings:
    """working = coefficient · committed + scale · grad in one pass; without `committed`, scale · grad.

    Args:
        working, committed: planes, (numel,) each. `committed` may be `None`.
        grad: the gradient (numel,), or with `pieces` a bucket of any size.
        coefficient, scale: factors of memory and gradient.
        pieces: stretches of the bucket and their places in the planes. Other elements stay as they are.

    Returns the findings, by number of piece.

    >>> working = torch.empty(2)
    >>> compensate(working, torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.0]), 0.5)
    Findings(idle=(), finite=True)
    >>> working
    tensor([1., 1.])
    >>> compensate(working, None, torch.tensor([0.0, 9.0]), 1.0, 2.0, Pieces([(1, 0, 1), (0, 1, 1)]))
    Findings(idle=(0,), finite=True)
    >>> working
    tensor([18.,  0.])
    """
    seen = []
    for plane, bucket in _all(pieces, grad).slices():
        out, new = working[plane], grad[bucket].to(working.dtype)
        bounds = (torch.inf, torch.inf) if committed is None else (LARGEST_GRADIENT, LARGEST_SUM)
        small = _is_below(bounds[0], new * scale)
        if committed is None:
            torch.mul(new, scale, out=out)
        else:
            torch.mul(committed[plane].to(out.dtype), coefficient, out=out)
            out.add_(new, alpha=scale)
        seen.append((_is_idle(grad[bucket]), small & _is_below(bounds[1], out)))
    return _findings(seen)


@contract(_marks_fit)
def compensate_marked(
    working: Tensor,
    committed: Tensor | None,
    grad: Tensor,
    coefficient: float,
    scale: float,
    pieces: Pieces,
    slots: Sequence[int],
    marks: Tensor,
) -> None:
    """Compensate as `compensate` does; findings stay on the device, and pieces whose gradient is all zeros
    become zero.

    Args:
        working, committed, grad, coefficient, scale, pieces: as for `compensate`.
        slots: number of the parameter to which each piece belongs.
        marks: int32 (2 · parameters + 1,), zeros before the first call. The first `parameters` entries are
            scratch. The next become 1 for parameters whose gradient is all zeros. The last becomes 1 if a sum
            is not finite, or too large for a memory.

    >>> x, marks = torch.ones(3), torch.zeros(5, dtype=torch.int32)
    >>> pieces = Pieces([(0, 0, 2), (2, 2, 1)])
    >>> compensate_marked(x, torch.ones(3), torch.tensor([0.0, 0.0, 2.0]), 1.0, 1.0, pieces, (1, 0), marks)
    >>> x, marks[2:]
    (tensor([0., 0., 3.]), tensor([0, 1, 0], dtype=torch.int32))
    """
    seen, parameters = compensate(working, committed, grad, coefficient, scale, pieces), marks.numel() // 2
    idle = seen.idle
    if not isinstance(idle, Tensor):
        idle = torch.tensor([n in idle for n in range(len(pieces))], dtype=torch.bool, device="cpu")
    zero_idle(working, pieces, idle)
    places = sent_to(torch.tensor(slots, dtype=torch.int64, device="cpu") + parameters, marks.device)
    marks.index_copy_(0, places, idle.int())
    unfit = ~seen.finite if isinstance(seen.finite, Tensor) else torch.tensor(not seen.finite, device="cpu")
    marks[-1:].bitwise_or_(unfit.int())


@contract(_momentum_fits)
def compensate_momentum(
    working: tuple[Tensor, Tensor],
    committed: tuple[Tensor, Tensor],
    grad: Tensor,
    momentum: float,
    scale: float | Sequence[float] = 1.0,
    pieces: Pieces | None = None,
    *,
    nesterov: bool = False,
) -> Findings:
    """Update momentum and memory: u' = momentum · u + scale · grad and v' = v + u', in one pass.

    Args:
        working: (v', u'), planes (numel,) each, written.
        committed: (v, u), planes (numel,) each.
        grad: the gradient, or with `pieces` a bucket, as for `compensate`.
        momentum: factor of u.
        scale: factor of the gradient; or one factor per piece.
        pieces: as for `compensate`.
        nesterov: v' = v + momentum · u' + scale · grad (Lin et al. 2018, section 3, and appendix B).

    Returns the findings, by number of piece.

    >>> v, u = torch.empty(1), torch.empty(1)
    >>> compensate_momentum((v, u), (torch.tensor([5.0]), torch.tensor([2.0])), torch.tensor([1.0]), 0.5)
    Findings(idle=(), finite=True)
    >>> v, u
    (tensor([7.]), tensor([2.]))
    """
    pieces = _all(pieces, grad)
    scales = np.broadcast_to(np.asarray(scale, np.float64), len(pieces)).tolist()
    seen = []
    for (plane, bucket), weight in zip(pieces.slices(), scales, strict=True):
        v_out, u_out = (each[plane] for each in working)
        v, u = (each[plane].to(v_out.dtype) for each in committed)
        new = grad[bucket].to(v_out.dtype)
        torch.mul(u, momentum, out=u_out)
        u_out.add_(new, alpha=weight)
        torch.add(v, u_out, alpha=momentum if nesterov else 1.0, out=v_out)
        if nesterov:
            v_out.add_(new, alpha=weight)
        small = _is_below(LARGEST_GRADIENT, new * weight)
        seen.append((_is_idle(grad[bucket]), small & _is_below(LARGEST_SUM, v_out)))
    return _findings(seen)


@contract()
def mask_zeros(target: Tensor, like: Tensor) -> None:
    """Set `target` (numel,) to zero wherever `like` (numel,) is zero.

    >>> target = torch.ones(3)
    >>> mask_zeros(target, torch.tensor([1.0, 0.0, 2.0]))
    >>> target
    tensor([1., 0., 1.])
    """
    target.masked_fill_(like == 0, 0.0)


def _all(pieces: Pieces | None, grad: Tensor) -> Pieces:
    return whole(grad.numel()) if pieces is None else pieces


def _is_idle(grad: Tensor) -> Tensor:
    """True if a gradient is all zeros. NaN counts as non-zero: a poisoned gradient is not an idle one."""
    return ~(grad != 0).any()


def _is_below(bound: float, x: Tensor) -> Tensor:
    return (x.abs() < bound).all()


def _findings(seen: Sequence[tuple[Tensor, Tensor]]) -> Findings:
    """Collect the (idle, finite) pairs of all pieces; on a device they are not read."""
    if not seen:
        return Findings((), True)
    idle, finite = (torch.stack(flags) for flags in zip(*seen, strict=True))
    found = Findings(idle, finite.all())
    return Findings(*found.read()) if idle.is_cpu else found

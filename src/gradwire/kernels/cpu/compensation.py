"""Memory plus gradient in one pass, with or without momentum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, bfloat16, float16, float32, float64

from gradwire.kernels import compensation as contracts
from gradwire.kernels.compensation import Findings
from gradwire.kernels.cpu.bits import MAGNITUDE
from gradwire.kernels.cpu.jit import kernel
from gradwire.kernels.cpu.prepared import prepared
from gradwire.kernels.dispatch import takes
from gradwire.kernels.pieces import Pieces, whole
from gradwire.kernels.range import LARGEST_GRADIENT, LARGEST_SUM
from gradwire.kernels.slices import SMALLEST, each_slice, threads_for

_BLOCK = 4096  # elements; two arrays of it stay in the first-level cache between the inner loops
_FLOATS = (float32, float64, float16, bfloat16)
"""Types that `compensate` takes: a memory may have a shorter type than the planes to which it is added."""


@takes(*_FLOATS)
def compensate(
    working: Tensor,
    committed: Tensor | None,
    grad: Tensor,
    coefficient: float,
    scale: float = 1.0,
    pieces: Pieces | None = None,
) -> Findings:
    """Twin of `gradwire.kernels.compensation.compensate`. Compensate all pieces in one call, or in slices on
    several threads if cores are free.
    """
    if working.dtype is not float32 or grad.dtype is not float32:
        return contracts.compensate.plain(working, committed, grad, coefficient, scale, pieces)
    pieces = whole(grad.numel()) if pieces is None else pieces
    out, new = working.numpy(), grad.numpy()
    old = out[:0] if committed is None else _loaded(working, committed, pieces).numpy()
    weights = np.float32(coefficient), np.float32(scale)
    if pieces.numel < 2 * SMALLEST:
        largest = np.empty(len(pieces.table), np.int32)
        seen = _Seen(largest, _compensate(out, old, new, pieces.table, *weights, largest))
    else:
        seen = _in_threads(
            pieces, lambda rows, _numbers, found: _compensate(out, old, new, rows, *weights, found)
        )
    return seen.judged(np.array([scale], np.float64), remembers=committed is not None)


@takes(*_FLOATS)
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
    """Twin of `gradwire.kernels.compensation.compensate_momentum`. Compensate as `compensate` does; each
    piece may have its own scale.
    """
    if working[0].dtype is not float32 or grad.dtype is not float32:
        plain = contracts.compensate_momentum.plain
        return plain(working, committed, grad, momentum, scale, pieces, nesterov=nesterov)
    pieces = whole(grad.numel()) if pieces is None else pieces
    planes = (*working, *(_loaded(*pair, pieces) for pair in zip(working, committed, strict=True)))
    scales = np.full(len(pieces), scale, np.float64)
    v_out, u_out, v, u = (plane.numpy() for plane in planes)
    new, weight, narrow = grad.numpy(), np.float32(momentum), scales.astype(np.float32)
    seen = _in_threads(
        pieces,
        lambda rows, numbers, largest: _compensate_momentum(
            v_out, u_out, v, u, new, rows, weight, narrow[numbers], nesterov, largest
        ),
    )
    return seen.judged(scales, remembers=True)


def mask_zeros(target: Tensor, like: Tensor) -> None:
    """Twin of `gradwire.kernels.compensation.mask_zeros`. Mask in one pass."""
    _mask_zeros(target.numpy(), like.numpy())


def _loaded(working: Tensor, committed: Tensor, pieces: Pieces) -> Tensor:
    """Memory in the type of `working`, for a compensation to read.

    Returns `committed` itself if it has this type. Otherwise converts all its pieces into `working`, and
    returns `working`, which the compensation then updates in place.
    """
    if committed.dtype == working.dtype:
        return committed
    for plane, _bucket in pieces.slices():
        working[plane] = committed[plane]
    return working


Rows = NDArray[np.int64]
Magnitudes = NDArray[np.int32]
"""Magnitudes of float32 as int32 bits, in which NaN and Inf are above all numbers."""


class _Seen(NamedTuple):
    """Largest magnitude of each piece's gradient, and of all sums, as float32 bits."""

    gradients: Magnitudes
    sums: int

    def judged(self, scales: NDArray[np.float64], remembers: bool) -> Findings:
        """Derive the findings of a compensation: idle pieces, and whether all numbers are finite and small
        enough.

        `scales` are the factors of the pieces' gradients. `remembers` says whether there is a memory.
        """
        bounds = (LARGEST_GRADIENT, LARGEST_SUM) if remembers else (np.inf, np.inf)
        idle, small = _judge(self.gradients, scales, bounds[0])
        small = small and bool(np.int32(self.sums).view(np.float32) < bounds[1])
        return Findings(tuple((self.gradients == 0).nonzero()[0].tolist()) if idle else (), small)


def _in_threads(pieces: Pieces, run: Callable[[Rows, Rows | slice, Magnitudes], int]) -> _Seen:
    """Run a compensation kernel on all pieces, on several threads if cores are free.

    `run` gets rows of pieces, the numbers of their pieces, and an array for the largest gradient of each row;
    it returns the largest sum.
    """
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


@prepared("int32[::1], float64[::1], float64")
@kernel
def _judge(largest: Any, scales: Any, bound: Any) -> Any:
    """Count the idle pieces, and compare the scaled gradients with `bound`.

    Args:
        largest: int32 (pieces,), largest magnitude of each piece's gradient, as float32 bits.
        scales: factors of the gradients, (pieces,), or (1,) for all.
        bound: number that scaled gradients must be below; NaN never is.

    Returns (number of zeros in `largest`, whether all are below the bound).
    """
    idle, small, numbers = 0, True, largest.view(np.float32)
    for i in range(largest.size):
        scaled = np.float64(numbers[i]) * abs(scales[min(i, scales.size - 1)])
        idle += largest[i] == 0
        small = small and scaled < bound
    return idle, small


@kernel
def _weighted_sum(out: Any, a: Any, b: Any, weight_a: Any, weight_b: Any) -> None:
    for i in range(out.size):
        out[i] = weight_a * a[i] + weight_b * b[i]


@kernel
def _max_magnitude(bits: Any) -> Any:
    """Largest magnitude of float32 `bits`, as int32. Integer comparisons vectorise, and order NaN and Inf
    above all numbers.
    """
    largest = np.int32(0)
    for i in range(bits.size):
        largest = max(largest, np.int32(bits[i] & MAGNITUDE))
    return largest


@kernel
def _scaled(out: Any, a: Any, weight: Any) -> None:
    for i in range(out.size):
        out[i] = weight * a[i]


@prepared("float32[::1], float32[::1], float32[::1], int64[:, ::1], float32, float32, int32[::1]")
@kernel
def _compensate(
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


@prepared(
    "float32[::1], float32[::1], float32[::1], float32[::1], float32[::1], int64[:, ::1], float32, "
    "float32[::1], boolean, int32[::1]"
)
@kernel
def _compensate_momentum(
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
    """float32: u' = momentum · u + scale · grad, v' = v + u'; with `ahead`, v' is Nesterov's.

    `v` and `u` are read, `v_out` and `u_out` written; `scales` has a factor for each row of pieces. Otherwise
    as `_compensate`.
    """
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


@prepared("float32[::1], float32[::1]")
@kernel
def _mask_zeros(target: Any, like: Any) -> None:
    """float32: target = 0 wherever like is 0."""
    for i in range(target.size):
        target[i] = np.float32(0.0) if like[i] == 0 else target[i]

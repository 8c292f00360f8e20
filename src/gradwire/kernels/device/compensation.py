"""Memory plus gradient in one pass. Findings are written to flags on the device."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.compensation import Findings
from gradwire.kernels.device.common import arrive, load, magnitude
from gradwire.kernels.device.launch import TILE, bound, is_taken, launch
from gradwire.kernels.device.tables import marked_tiles, piece_tiles
from gradwire.kernels.pieces import Pieces, whole
from gradwire.kernels.range import LARGEST_GRADIENT, LARGEST_SUM
from gradwire.kernels.uploads import sent_to

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Types that kernels read and widen to float32, in which they sum."""


def _bits(number: float) -> int:
    return int(torch.tensor(number, dtype=torch.float32, device="cpu").view(torch.int32))


INFINITY = _bits(torch.inf)
BOUNDS = (_bits(LARGEST_GRADIENT), _bits(LARGEST_SUM))


def compensate(
    working: Tensor,
    committed: Tensor | None,
    grad: Tensor,
    coefficient: float,
    scale: float = 1.0,
    pieces: Pieces | None = None,
) -> Findings:
    """Twin of `gradwire.kernels.compensation.compensate`. Compensate in one launch, after one that sets the
    flags. Memory traffic: 12 bytes per element.
    """
    old = working if committed is None else committed
    if not is_taken(working) or not is_taken(working, old, grad, dtypes=FLOATS):
        return NotImplemented
    pieces = whole(grad.numel()) if pieces is None else pieces
    tiles, flags = piece_tiles(pieces, working.device), _flags(pieces, working)
    bounds = (INFINITY, INFINITY) if committed is None else BOUNDS
    launch(
        _compensate, len(tiles.rows), working, old, grad, tiles.rows, flags.view(torch.uint8),
        len(pieces), coefficient, scale, *bounds,
        REMEMBERS=committed is not None, ALIGNED=tiles.aligned, TILE=TILE,
    )  # fmt: skip
    return Findings(flags[:-1], flags[-1])


@bound
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
    """Twin of `gradwire.kernels.compensation.compensate_marked`. Compensate in one launch. Memory traffic: 12
    bytes per element.
    """
    old = working if committed is None else committed
    if not is_taken(working) or not is_taken(working, old, grad, dtypes=FLOATS):
        return NotImplemented
    tiles = marked_tiles(pieces, slots, working.device)
    bounds = (INFINITY, INFINITY) if committed is None else BOUNDS
    launch(
        _compensate_marked, len(tiles.rows), working, old, grad, tiles.rows, marks, marks.numel() // 2,
        coefficient, scale, *bounds, REMEMBERS=committed is not None, ALIGNED=tiles.aligned, TILE=TILE,
    )  # fmt: skip
    return None


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
    """Twin of `gradwire.kernels.compensation.compensate_momentum`. Compensate in one launch, as `compensate`
    does. Memory traffic: 20 bytes per element.

    A sequence of scales is copied to the device.
    """
    if not is_taken(*working) or not is_taken(*working, *committed, grad, dtypes=FLOATS):
        return NotImplemented
    pieces = whole(grad.numel()) if pieces is None else pieces
    device = grad.device
    tiles, flags = piece_tiles(pieces, device), _flags(pieces, working[0])
    if isinstance(scale, Sequence):
        scales = sent_to(torch.tensor(scale, dtype=torch.float32, device="cpu"), device)
    else:
        scales = torch.full((len(pieces),), scale, dtype=torch.float32, device=device)
    launch(
        _compensate_momentum, len(tiles.rows), *working, *committed, grad, tiles.rows,
        flags.view(torch.uint8), len(pieces), momentum, scales, *BOUNDS,
        AHEAD=nesterov, ALIGNED=tiles.aligned, TILE=TILE,
    )  # fmt: skip
    return Findings(flags[:-1], flags[-1])


def _flags(pieces: Pieces, like: Tensor) -> Tensor:
    """Flags (pieces + 1,) bool, set: "idle" of each piece, then "finite" of all. Kernels clear them."""
    return torch.ones(len(pieces) + 1, dtype=torch.bool, device=like.device)


@triton.jit
def _seen(grad, added, total, gradient_bound, sum_bound):
    """Findings about a tile: (largest magnitude of the gradient as bits, 1 if a magnitude reaches its bound,
    else 0).
    """
    beyond = (magnitude(added) >= gradient_bound) | (magnitude(total) >= sum_bound)
    return tl.max(magnitude(grad)), tl.max(beyond.to(tl.int32))


@triton.jit
def _note(flags, piece, pieces, largest, beyond):
    """Clear the "idle" flag of a piece with a gradient, and the "finite" flag if a magnitude is too large."""
    if largest > 0:
        tl.store(flags + piece, 0)
    if beyond > 0:
        tl.store(flags + pieces, 0)


@triton.jit
def _compensate_tile(
    working, committed, grad, coefficient, scale, gradient_bound, sum_bound, mask, REMEMBERS: tl.constexpr
):
    """Compensate a tile; returns its findings, as `_seen` does."""
    new = load(grad, mask)
    added = new * scale
    if REMEMBERS:
        total = load(committed, mask) * coefficient + added
    else:
        total = added
    tl.store(working, total, mask)
    return _seen(new, added, total, gradient_bound, sum_bound)


@triton.jit(do_not_specialize=["pieces", "gradient_bound", "sum_bound"])
def _compensate(
    working, committed, grad, rows, flags, pieces, coefficient, scale, gradient_bound, sum_bound,
    REMEMBERS: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """working = coefficient · committed + scale · grad on a tile; clears flags, as `_note` does."""
    row = rows + tl.program_id(0).to(tl.int64) * 4
    plane, bucket, numel, piece = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    if ALIGNED:
        plane, bucket = tl.multiple_of(plane, 4), tl.multiple_of(bucket, 4)
    # A 64-bit start for the tile, 32 bits within it: addresses take fewer registers.
    place = tl.arange(0, TILE)
    to, old, new = working + plane + place, committed + plane + place, grad + bucket + place
    if numel == TILE:  # without a mask, which would keep loads from being vectors
        largest, beyond = _compensate_tile(
            to, old, new, coefficient, scale, gradient_bound, sum_bound, None, REMEMBERS
        )
    else:
        largest, beyond = _compensate_tile(
            to, old, new, coefficient, scale, gradient_bound, sum_bound, place < numel, REMEMBERS
        )
    _note(flags, piece, pieces, largest, beyond)


@triton.jit
def is_last_without_gradient(marks, slots, slot, tiles):
    """Count a tile without gradient. True if it completes its parameter, whose mark is then set.

    `marks` has a counter per parameter, then a mark per parameter (`slots` of each); `tiles` is the
    parameter's number of tiles. Tiles with a gradient are not counted. Everything that counting programs
    wrote before the count is visible to the last one.
    """
    is_last = arrive(marks + slot) == tiles - 1
    if is_last:
        tl.store(marks + slots + slot, 1)
    return is_last


@triton.jit(do_not_specialize=["slots", "gradient_bound", "sum_bound"])
def _compensate_marked(
    working, committed, grad, rows, marks, slots, coefficient, scale, gradient_bound, sum_bound,
    REMEMBERS: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """working = coefficient · committed + scale · grad on a tile. Parameters without a gradient are marked
    and cleared.
    """
    row = rows + tl.program_id(0).to(tl.int64) * 6
    plane, bucket, numel = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    if ALIGNED:
        plane, bucket = tl.multiple_of(plane, 4), tl.multiple_of(bucket, 4)
    place = tl.arange(0, TILE)
    to, old, new = working + plane + place, committed + plane + place, grad + bucket + place
    if numel == TILE:
        largest, beyond = _compensate_tile(
            to, old, new, coefficient, scale, gradient_bound, sum_bound, None, REMEMBERS
        )
    else:
        largest, beyond = _compensate_tile(
            to, old, new, coefficient, scale, gradient_bound, sum_bound, place < numel, REMEMBERS
        )
    if beyond > 0:
        tl.store(marks + 2 * slots, 1)
    if largest == 0:
        first, tiles = tl.load(row + 4), tl.load(row + 5)
        if is_last_without_gradient(marks, slots, tl.load(row + 3), tiles):
            done = first
            while done < first + tiles:
                there = rows + done * 6
                zeros = tl.zeros((TILE,), tl.float32)
                tl.store(working + tl.load(there) + place, zeros, place < tl.load(there + 2))
                done += 1


@triton.jit
def _momentum_tile(
    v_out, u_out, v, u, grad, momentum, scale, gradient_bound, sum_bound, mask, AHEAD: tl.constexpr
):
    """Compensate a tile with momentum; returns its findings, as `_seen` does."""
    new = load(grad, mask)
    added = new * scale
    velocity = load(u, mask) * momentum + added
    before = load(v, mask)
    if AHEAD:
        total = (before + momentum * velocity) + added
    else:
        total = before + velocity
    tl.store(u_out, velocity, mask)
    tl.store(v_out, total, mask)
    return _seen(new, added, total, gradient_bound, sum_bound)


@triton.jit(do_not_specialize=["pieces", "gradient_bound", "sum_bound"])
def _compensate_momentum(
    v_out, u_out, v, u, grad, rows, flags, pieces, momentum, scales, gradient_bound, sum_bound,
    AHEAD: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """u' = momentum · u + scale · grad, v' = v + u' on a tile; with AHEAD Nesterov's v'. Clears flags, as
    `_note` does.
    """
    row = rows + tl.program_id(0).to(tl.int64) * 4
    plane, bucket, numel, piece = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    if ALIGNED:
        plane, bucket = tl.multiple_of(plane, 4), tl.multiple_of(bucket, 4)
    scale, place = tl.load(scales + piece), tl.arange(0, TILE)
    v_out, u_out, grad = v_out + plane + place, u_out + plane + place, grad + bucket + place
    v, u = v + plane + place, u + plane + place
    if numel == TILE:
        largest, beyond = _momentum_tile(
            v_out, u_out, v, u, grad, momentum, scale, gradient_bound, sum_bound, None, AHEAD
        )
    else:
        largest, beyond = _momentum_tile(
            v_out, u_out, v, u, grad, momentum, scale, gradient_bound, sum_bound, place < numel, AHEAD
        )
    _note(flags, piece, pieces, largest, beyond)

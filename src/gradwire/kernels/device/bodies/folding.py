"""Memory plus gradient, tile by tile."""

import triton
import triton.language as tl

from gradwire.kernels.device.bodies.common import load, magnitude


@triton.jit
def seen(grad, added, total, gradient_bound, sum_bound):
    """(largest magnitude of the gradient, 1 where something reaches its bound): integers."""
    beyond = (magnitude(added) >= gradient_bound) | (magnitude(total) >= sum_bound)
    return tl.max(magnitude(grad)), tl.max(beyond.to(tl.int32))


@triton.jit
def note(flags, piece, pieces, largest, beyond):
    """Lower the flag of a piece that is not idle, and the last one where a magnitude is too large."""
    if largest > 0:
        tl.store(flags + piece, 0)
    if beyond > 0:
        tl.store(flags + pieces, 0)


@triton.jit
def fold_tile(
    working, committed, grad, coefficient, scale, gradient_bound, sum_bound, mask, REMEMBERS: tl.constexpr
):
    """A tile of `fold`; returns what `seen` says of it."""
    new = load(grad, mask)
    added = new * scale
    if REMEMBERS:
        total = load(committed, mask) * coefficient + added
    else:
        total = added
    tl.store(working, total, mask)
    return seen(new, added, total, gradient_bound, sum_bound)


@triton.jit(do_not_specialize=["pieces", "gradient_bound", "sum_bound"])
def fold(
    working, committed, grad, rows, flags, pieces, coefficient, scale, gradient_bound, sum_bound,
    REMEMBERS: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """working = coefficient · committed + scale · grad; lowers flags of what is not idle, or not finite."""
    row = rows + tl.program_id(0).to(tl.int64) * 4
    plane, bucket, numel, piece = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    if ALIGNED:
        plane, bucket = tl.multiple_of(plane, 4), tl.multiple_of(bucket, 4)
    # A 64-bit start for the tile, 32 bits within it: addresses take fewer registers.
    place = tl.arange(0, TILE)
    to, old, new = working + plane + place, committed + plane + place, grad + bucket + place
    if numel == TILE:  # without a mask, which would keep loads from being vectors
        largest, beyond = fold_tile(
            to, old, new, coefficient, scale, gradient_bound, sum_bound, None, REMEMBERS
        )
    else:
        largest, beyond = fold_tile(
            to, old, new, coefficient, scale, gradient_bound, sum_bound, place < numel, REMEMBERS
        )
    note(flags, piece, pieces, largest, beyond)


@triton.jit
def momentum_tile(
    v_out, u_out, v, u, grad, momentum, scale, gradient_bound, sum_bound, mask, AHEAD: tl.constexpr
):
    """A tile of `fold_momentum`; returns what `seen` says of it."""
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
    return seen(new, added, total, gradient_bound, sum_bound)


@triton.jit(do_not_specialize=["pieces", "gradient_bound", "sum_bound"])
def fold_momentum(
    v_out, u_out, v, u, grad, rows, flags, pieces, momentum, scales, gradient_bound, sum_bound,
    AHEAD: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """u' = momentum · u + scale · grad, v' = v + u'; AHEAD is Nesterov's; flags as `fold`."""
    row = rows + tl.program_id(0).to(tl.int64) * 4
    plane, bucket, numel, piece = tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)
    if ALIGNED:
        plane, bucket = tl.multiple_of(plane, 4), tl.multiple_of(bucket, 4)
    scale, place = tl.load(scales + piece), tl.arange(0, TILE)
    v_out, u_out, grad = v_out + plane + place, u_out + plane + place, grad + bucket + place
    v, u = v + plane + place, u + plane + place
    if numel == TILE:
        largest, beyond = momentum_tile(
            v_out, u_out, v, u, grad, momentum, scale, gradient_bound, sum_bound, None, AHEAD
        )
    else:
        largest, beyond = momentum_tile(
            v_out, u_out, v, u, grad, momentum, scale, gradient_bound, sum_bound, place < numel, AHEAD
        )
    note(flags, piece, pieces, largest, beyond)

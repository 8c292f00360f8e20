"""Plain torch: slow, obvious, the oracle of the tests and the fallback on every other device or type."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.range import LARGEST_GRADIENT, LARGEST_SUM


def fold(
    working: Tensor, committed: Tensor | None, grad: Tensor, coefficient: float, scale: float
) -> tuple[bool, bool]:
    """working = coefficient · committed + scale · grad; returns (any gradient, all finite).

    With a memory, what is too large for it does not count as finite.
    """
    new = grad.to(working.dtype)
    small = committed is None or _is_below(LARGEST_GRADIENT, new * scale)
    if committed is None:
        torch.mul(new, scale, out=working)
    else:
        torch.mul(committed, coefficient, out=working)
        working.add_(new, alpha=scale)
    bound = torch.inf if committed is None else LARGEST_SUM
    # NaN counts as non-zero: a poisoned gradient is not an idle one.
    return bool((grad != 0).any()), small and _is_below(bound, working)


def _is_below(bound: float, x: Tensor) -> bool:
    return bool((x.abs() < bound).all())


def fold_momentum(
    working: tuple[Tensor, Tensor],
    committed: tuple[Tensor, Tensor],
    grad: Tensor,
    momentum: float,
    scale: float,
    nesterov: bool,
) -> tuple[bool, bool]:
    """u' = momentum · u + scale · grad, v' = v + u', or Nesterov's v + momentum · u' + scale · grad."""
    (v_out, u_out), (v, u) = working, committed
    any_gradient, _ = fold(u_out, u, grad, momentum, scale)
    torch.add(v, u_out, alpha=momentum if nesterov else 1.0, out=v_out)
    if nesterov:
        v_out.add_(grad.to(v_out.dtype), alpha=scale)
    small = _is_below(LARGEST_GRADIENT, grad.to(v_out.dtype) * scale)
    return any_gradient, small and _is_below(LARGEST_SUM, v_out)


def mask_zeros(target: Tensor, like: Tensor) -> None:
    """target = 0 wherever like is 0."""
    target.masked_fill_(like == 0, 0.0)


def topk_indices(x: Tensor, k: int) -> Tensor:
    """Indices (k,) int64, ascending, of the largest magnitudes of x (n,).

    Among equals the lowest index wins; NaN and Inf count as the largest of all.
    """
    magnitude = x.abs().masked_fill(x.isnan(), torch.inf)
    order = torch.sort(magnitude, descending=True, stable=True).indices
    return order[:k].sort().values


def take(x: Tensor, indices: Tensor, weight: float) -> Tensor:
    """weight · x[indices]; zeroes what it took."""
    values = x[indices] * weight
    x[indices] = 0.0
    return values


def take_topk(x: Tensor, k: int, weight: float) -> tuple[Tensor, Tensor]:
    """Indices and weight · values of the k largest magnitudes; zeroes what it took."""
    indices = topk_indices(x, k)
    return indices, take(x, indices, weight)


def feedback_topk(memory: Tensor, grad: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """memory += grad, then indices and values of the k largest magnitudes; zeroes what it took."""
    memory.add_(grad)
    return take_topk(memory, k, 1.0)


def add_at(out: Tensor, indices: Tensor, values: Tensor, weight: float) -> None:
    """out[indices] += weight · values."""
    out.index_add_(0, indices, values.to(out.dtype), alpha=weight)


def pack_bits(indices: Tensor, words: int) -> Tensor:
    """A bitmap (words,) int32 with a one for each index."""
    bits = torch.zeros(words * 32, dtype=torch.int64, device=indices.device)
    bits[indices.long()] = 1
    weights = 1 << torch.arange(32, device=indices.device)
    # The sum of a word's weights is below 2^32: its low 32 bits are the word.
    return (bits.view(words, 32) * weights).sum(1).to(torch.int32)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """Indices of ones, ascending, at most `count` + 1 of them; int64."""
    bits = (packed.view(-1, 1) >> torch.arange(32, device=packed.device)) & 1
    return bits.view(-1).nonzero().view(-1)[: count + 1]


def splitmix64(state: int) -> tuple[int, int]:
    """One step of Vigna's SplitMix64 generator: (next state, 64 random bits)."""
    mask = (1 << 64) - 1
    state = (state + 0x9E3779B97F4A7C15) & mask
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return state, z ^ (z >> 31)


def sample_indices(n: int, k: int, seed: int) -> Tensor:
    """k of n indices, ascending, uniformly without replacement (Floyd's algorithm, O(k) draws).

    The modulo's bias is below n / 2^63.
    """
    chosen: set[int] = set()
    state = seed
    for top in range(n - k, n):
        state, bits = splitmix64(state)
        draw = (bits >> 1) % (top + 1)
        chosen.add(top if draw in chosen else draw)
    return torch.tensor(sorted(chosen), dtype=torch.int64)


def indices_reaching(x: Tensor, threshold: float, capacity: int) -> Tensor:
    """Indices of magnitudes that are not below `threshold`, at most `capacity` + 1 of them."""
    return (~(x.abs() < threshold)).nonzero().view(-1)[: capacity + 1]


def moments_reaching(x: Tensor, threshold: float) -> tuple[int, float, float]:
    """(how many, Σ|x|, Σ|x|²) of what is not below `threshold`, in float64."""
    magnitude = x.abs()
    reaching = magnitude[~(magnitude < threshold)].double()
    return reaching.numel(), float(reaching.sum()), float(reaching.square().sum())


def stratified_indices(n: int, size: int, seed: int) -> Tensor:
    """A random index of each of `size` equal stretches of 0 … n - 1."""
    indices, state = [], seed
    for j in range(size):
        start, stop = j * n // size, (j + 1) * n // size
        state, bits = splitmix64(state)
        indices.append(start + (bits >> 1) % (stop - start))
    return torch.tensor(indices, dtype=torch.int64)


def in_chunks(magnitude: Tensor, chunk: int) -> Tensor:
    """`magnitude` (n,) as (chunks, chunk), the last one padded with -1, which is below everything."""
    return torch.nn.functional.pad(magnitude, (0, -magnitude.numel() % chunk), value=-1.0).view(-1, chunk)


def chunk_topk_indices(x: Tensor, chunk: int, keep: int) -> Tensor:
    """Indices of the largest magnitudes of each chunk, ascending; of the last as many as there are."""
    chunk = min(chunk, max(x.numel(), 1))
    magnitude = in_chunks(x.abs().masked_fill(x.isnan(), torch.inf), chunk)
    places = torch.sort(magnitude, dim=1, descending=True, stable=True).indices[:, :keep].sort(dim=1).values
    starts = torch.arange(0, x.numel(), chunk, device=x.device)
    indices = (starts[:, None] + places).view(-1)
    return indices[indices < x.numel()]


def indices_near_maxima(x: Tensor, ahead: Tensor, chunk: int) -> Tensor:
    """Indices where |ahead| or |x| reaches the chunk's largest |x|, unless x is 0."""
    chunk = min(chunk, max(x.numel(), 1))
    own, tested = (in_chunks(t.abs().masked_fill(t.isnan(), torch.inf), chunk) for t in (x, ahead))
    largest = own.amax(1, keepdim=True)
    return (((own >= largest) | (tested >= largest)) & (own > 0)).view(-1).nonzero().view(-1)


def count_sketch_buckets(n: int, hashes: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """For rows of a table and n elements: column (rows, n) int64 and sign (rows, n), 1 or -1.

    Multiply-shift (Thorup 2015, "High speed hashing for integers and strings", section 3.3): the upper half
    of multiplier · i + addend mod 2^64 is uniform, and independent for any two i below 2^32. Its lowest bit
    is the sign, the 31 above it are the column.
    """
    multipliers, addends = hashes[:, :1], hashes[:, 1:]
    # int64 products wrap; the mask undoes the sign extension of the shift.
    hashed = (multipliers * torch.arange(n, device=hashes.device) + addends) >> 32 & 0xFFFFFFFF
    return (hashed >> 1) * columns >> 31, 1 - 2 * (hashed & 1)


def count_sketch(x: Tensor, hashes: Tensor, columns: int) -> Tensor:
    """x (n,) as a table (rows, columns)."""
    column, sign = count_sketch_buckets(x.numel(), hashes, columns)
    return x.new_zeros(hashes.shape[0], columns).scatter_add_(1, column, sign.to(x.dtype) * x)


def count_sketch_estimates(table: Tensor, hashes: Tensor, n: int) -> Tensor:
    """The median over rows (n,) of what the table says of each element."""
    column, sign = count_sketch_buckets(n, hashes, table.shape[1])
    return (sign.to(table.dtype) * table.gather(1, column)).median(0).values

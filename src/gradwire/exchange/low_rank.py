"""Low-rank exchanges: PowerSGD, and ACP-SGD, whose factors take turns.

A parameter of shape (n, …) is a matrix of n rows. Three things travel raw, in the same all-reduce as the
first factors: matrices that a rank-r factorisation would not make smaller (r·(rows + columns) ≥
rows·columns), vectors, and parameters of which the unit holds a part only. A unit without known parameters
counts as one matrix of ⌊√numel⌋ rows, and the remainder is raw. All matrices of a unit are multiplied by one
kernel call and travel in one buffer.

PowerSGD is one step of power iteration per training step (Vogels, Karimireddy and Jaggi 2019, algorithm 1).
Every matrix M becomes P = M·Q, summed over ranks and orthonormalised to P̂, and Q = Mᵀ·P̂, summed likewise;
the mean is P̂·Qᵀ, and Q is where the next step starts.

ACP-SGD (Zhang, Zhang, Shi, Chu and Li 2023, "Evaluation and optimization of gradient compression for
distributed deep learning") sums one factor a step. In even steps Q from the step before is orthonormal and
P = M·Q is summed over ranks, in odd steps the other way round with Q = Mᵀ·P. The mean is P·Qᵀ. One all-reduce
per step of half of PowerSGD's traffic; nothing waits in between, so the wire of one unit overlaps with the
products of the next. Two steps are one step of power iteration.

In that order a matrix that has gradients in every second step only, as one of two parts that are trained in
turn, would send the same factor for ever, and what its memory has outside of the other one's span would never
travel. So which factor begins is drawn anew every three pairs of steps (`gradwire.exchange.round_robin`). A
matrix may then send the same factor several times running: in one of twelve steps, if it has gradients in
all. The first time keeps the factor. Later ones are projections like any other, but what they would keep is
of new gradients alone, since nothing of the memory is left in their span. `order="paper"` is the paper's.

Other differences from the papers: a rank of PowerSGD leaves its own M − P̂·(its own Q)ᵀ, and not M less the
mean. Over ranks both have the same mean, so the mean of every later step is the same in exact arithmetic. But
the unsent part is then an orthogonal projection of the input, so it is never larger, and an idle rank keeps
its memory. ACP-SGD's paper does the same. Factors are orthonormalised when they are kept, not before their
next use: the span is the same, and numbers stay in range. Zero columns keep their old direction.

A single rank's memory need not shrink: what is orthogonal to all P̂, or cancels in the sum over ranks, waits.
The mean that is sent is the best approximation of M̄ within the span of M̄·Q.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from gradwire.comm.base import Comm, Pending, Round, shortest_sum
from gradwire.exchange.base import Decode
from gradwire.exchange.round_robin import Order, check_order, round_robin
from gradwire.exchange.state import LEFT, RIGHT, TURN
from gradwire.kernels.low_rank import left_products, orthonormalise, outer_products, right_products
from gradwire.kernels.uploads import sent_to
from gradwire.laws import Laws
from gradwire.unit.context import ExchangeContext, Part
from gradwire.unit.parameters import WHOLE

PLACES, SIDES = 5, {"left": (3, 1), "right": (4, 2)}

SIDE = {LEFT: 1, RIGHT: 2}
"""Number of each side, kept per matrix to tell which factor it has sent last; 0 before the first."""


@dataclass(frozen=True)
class Factors:
    """Left (rows) or right (columns) factors of a unit's matrices, one after another in a flat tensor.

    `kind` is the name under which they are kept. `spans` is an argument of
    `gradwire.kernels.low_rank.orthonormalise`.
    """

    kind: str
    names: tuple[str, ...]
    spans: Tensor
    rank: int

    @cached_property
    def numel(self) -> int:
        """Elements of the flat tensor."""
        return self.rank * int(self.spans[:, 1].sum())

    def recall(self, ctx: ExchangeContext, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Recall the kept factors (numel,), orthonormal, in type `dtype` on `device`; read only.

        A factor that is not kept, or is of another rank, is random, and the same on all ranks.
        """
        random: torch.Generator | None = None
        found = []
        for name, (_start, size) in zip(self.names, self.spans.tolist(), strict=True):
            kept = ctx.kept.get(self.kind, name)
            if kept is None or kept.shape != (self.rank, size):
                random = ctx.shared() if random is None else random
                kept = torch.randn(self.rank, size, generator=random, dtype=dtype, device="cpu")
                orthonormalise(kept.view(-1), torch.tensor([[0, size]], device="cpu"), self.rank)
            found.append(sent_to(kept.to(dtype), device).view(-1))
        return torch.cat(found) if found else torch.empty(0, dtype=dtype, device=device)

    def keep(self, flat: Tensor, before: Tensor, ctx: ExchangeContext) -> None:
        """Orthonormalise `flat`, the sum over ranks, in place, and keep it for the next step.

        A zero column (no rank had a gradient, or it was of a lower rank) would stay zero for good, so it is
        replaced by a column of `before`, the factors kept until now.
        """
        ctx.kernels.of(flat.dtype)[orthonormalise](flat, self.spans, self.rank, before)
        for name, factor in zip(self.names, self.each(flat), strict=True):
            ctx.kept.put(self.kind, name, factor)

    def keep_first(self, flat: Tensor, before: Tensor, ctx: ExchangeContext) -> None:
        """Keep the factors `flat` (numel,) as `keep` does; but if a matrix has sent this side last time as
        well, keep those of `before` unchanged.

        A factor that is zero on all ranks does not count as sent. The host reads no number.
        """
        if not self.names:
            return
        came = torch.stack([factor.any() for factor in self.each(flat)])
        last = torch.stack([self._sent_last(name, ctx, flat.device) for name in self.names])
        is_again = last == SIDE[self.kind]
        last = torch.where(came[:, None], SIDE[self.kind], last)
        ctx.kernels.of(flat.dtype)[orthonormalise](flat, self.spans, self.rank, before)
        for number, (name, new, old) in enumerate(
            zip(self.names, self.each(flat), self.each(before), strict=True)
        ):
            ctx.kept.put(self.kind, name, torch.where(is_again[number], old, new))
            ctx.kept.put(TURN, name, last[number])

    def each(self, flat: Tensor) -> list[Tensor]:
        """Views (rank, size) of the matrices' factors."""
        return [
            flat[start : start + self.rank * size].view(self.rank, size)
            for start, size in self.spans.tolist()
        ]

    def _sent_last(self, name: str, ctx: ExchangeContext, device: torch.device) -> Tensor:
        kept = ctx.kept.get(TURN, name)
        if kept is None or kept.shape != (1,):
            kept = torch.zeros(1, dtype=torch.int64, device="cpu")
        return sent_to(kept, device)


@dataclass(frozen=True)
class Arrangement:
    """Layout of a unit: its matrices, the factors of both sides, and the ranges [start, stop) that travel
    raw.

    `places` (matrices, 5) int64, on the host, has for each matrix its first element in the unit, rows,
    columns, and the first elements of its left and right factors.
    """

    places: Tensor
    left: Factors
    right: Factors
    raw: tuple[tuple[int, int], ...]

    @cached_property
    def raw_numel(self) -> int:
        return sum(stop - start for start, stop in self.raw)

    def take_raw(self, x: Tensor, out: Tensor, weight: float) -> None:
        """Move the raw ranges of x, times `weight`, to `out` (raw_numel,); x becomes zero there."""
        if not self.raw:
            return
        ranges = [x[start:stop] for start, stop in self.raw]
        # Not `_foreach_mul`, which rounds 16 bits otherwise.
        torch.mul(torch.cat(ranges), weight, out=out)
        torch._foreach_zero_(ranges)

    def land_raw(self, raw: Tensor, mean: Tensor) -> None:
        """Write `raw` (raw_numel,) to the raw ranges of `mean`."""
        if not self.raw:
            return
        ranges = [mean[start:stop] for start, stop in self.raw]
        torch._foreach_copy_(ranges, raw.split_with_sizes([each.numel() for each in ranges]))


def arrange(numel: int, parts: tuple[Part, ...], rank: int) -> Arrangement:
    """Lay out a unit of `numel` elements for factors of `rank`.

    >>> found = arrange(32, (Part("weight", (4, 2, 3), 0, 24), Part("bias", (8,), 0, 8)), rank=1)
    >>> found.places.tolist(), found.raw, found.left.numel, found.right.numel
    ([[0, 4, 6, 0, 0]], ((24, 32),), 4, 6)
    """
    names, places, raw = [], [], []
    start = at_left = at_right = 0
    for part in parts or _square(numel):
        rows, columns = _matrix(part)
        if rank * (rows + columns) < rows * columns:
            names.append(part.name)
            places.append((start, rows, columns, at_left, at_right))
            at_left += rank * rows
            at_right += rank * columns
        elif part.numel:
            raw.append((start, start + part.numel))
        start += part.numel
    table = torch.tensor(places, dtype=torch.int64, device="cpu").view(-1, PLACES)
    left, right = (
        Factors(kind, tuple(names), table[:, list(SIDES[side])].contiguous(), rank)
        for kind, side in ((LEFT, "left"), (RIGHT, "right"))
    )
    return Arrangement(table, left, right, tuple(raw))


def _arranged(ctx: ExchangeContext, numel: int, rank: int) -> Arrangement:
    """`arrange` for `ExchangeContext.once`, which hashes no parts."""
    return arrange(numel, ctx.parts, rank)


def _matrix(part: Part) -> tuple[int, int]:
    """(rows, columns) of a part that is a whole matrix; (1, numel) for any other, which travels raw."""
    if not part.is_whole or len(part.shape) < 2 or not part.numel:
        return 1, part.numel
    return part.shape[0], math.prod(part.shape[1:])


def _square(numel: int) -> Sequence[Part]:
    rows = math.isqrt(numel)
    columns = numel // max(rows, 1)
    over = numel - rows * columns
    return Part("", (rows, columns), 0, rows * columns), Part("over", (over,), 0, over)


def factor_type(dtype: torch.dtype) -> torch.dtype:
    """Type of factors and raw elements: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@lru_cache(maxsize=1024)
def _sum_of(numel: int, dtype: torch.dtype, world: int) -> Round:
    """All-reduce of `numel` factors and raw elements of type `dtype` among `world` ranks, by the algorithm
    with the lowest latency: later work waits for it.
    """
    return Round("all_reduce", numel, dtype, algorithm=shortest_sum(world, numel * dtype.itemsize))


def _summed(values: Tensor, comm: Comm) -> Pending:
    return comm.issue(_sum_of(values.numel(), values.dtype, comm.world), values, values)


def check_rank(rank: int) -> int:
    """Return `rank`; raises `ValueError` if it is below 1."""
    if rank < 1:
        raise ValueError(f"rank={rank} must be at least 1; published results are of 1 to 4")
    return rank


@dataclass(frozen=True)
class PowerSgd:
    """PowerSGD: every step sums both factors of each matrix over ranks, in two all-reduces.

    The first carries r·rows values per matrix, and the raw elements. The second carries r·columns values per
    matrix.
    """

    rank: int
    laws = Laws(
        contractive=True,
        may_overflow=True,
        grain=WHOLE,
        stays_on_device=True,
        total=True,
        fixed_rounds=True,
        repeats=True,
    )
    memory = None

    def start(self, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> Decode:
        """Begin the exchange: every matrix is read three times and written once."""
        unit = ctx.once(_arranged, x.numel(), self.rank)
        dtype, weight = factor_type(x.dtype), 1.0 / comm.world
        kept = unit.right.recall(ctx, dtype, x.device)
        buffer = x.new_empty(unit.left.numel + unit.raw_numel, dtype=dtype)
        left, raw = buffer[: unit.left.numel], buffer[unit.left.numel :]
        ctx.kernels[left_products](x, unit.places, self.rank, left, kept)
        left *= weight
        unit.take_raw(x, raw, weight)
        pending = _summed(buffer, comm) if buffer.numel() else None
        right = x.new_empty(unit.right.numel, dtype=dtype)
        if right.numel() and pending is not None:
            pending.wait()
            ctx.kernels.of(dtype)[orthonormalise](left, unit.left.spans, self.rank)
            ctx.kernels[right_products](x, unit.places, self.rank, left, right)
            right *= weight
            pending = _summed(right, comm)

        def decode() -> None:
            if pending is not None:
                pending.wait()
            unit.land_raw(raw, mean)
            ctx.kernels[outer_products](mean, unit.places, self.rank, left, right)
            unit.right.keep(right, kept, ctx)

        return decode

    def rounds(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[Round, ...]:
        unit = ctx.once(_arranged, numel, self.rank)
        sizes = (unit.left.numel + unit.raw_numel, unit.right.numel)
        return tuple(_sum_of(size, factor_type(dtype), ctx.world) for size in sizes if size)


def power_sgd(rank: int = 1) -> PowerSgd:
    """The mean's approximation of `rank`, by one step of power iteration from the last step's factors.

    >>> import torch
    >>> from gradwire.unit.context import ExchangeContext, Part
    >>> ctx = ExchangeContext(0, 0, 0, world=2, parts=(Part("weight", (64, 128), 0, 64 * 128),))
    >>> [each.numel for each in power_sgd(2).rounds(64 * 128, torch.float32, ctx)]
    [128, 256]
    """
    return PowerSgd(check_rank(rank))


@dataclass(frozen=True)
class AcpSgd:
    """ACP-SGD: every step sums one of the two factors of each matrix over ranks, in one all-reduce.

    It carries r·rows values per matrix in one step and r·columns in the next. Vectors, and matrices that
    would not become smaller, travel uncompressed in the same all-reduce.
    """

    rank: int
    order: Order = "random"
    laws = Laws(
        contractive=True, may_overflow=True, grain=WHOLE, stays_on_device=True, total=True, repeats=True
    )
    memory = None

    def start(self, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> Decode:
        """Begin the exchange: one pass over x in a step that sends left factors, two with right ones."""
        unit = ctx.once(_arranged, x.numel(), self.rank)
        dtype, weight = factor_type(x.dtype), 1.0 / comm.world
        is_left = self._sends_left(ctx)
        sent, fixed = (unit.left, unit.right) if is_left else (unit.right, unit.left)
        basis, before = fixed.recall(ctx, dtype, x.device), sent.recall(ctx, dtype, x.device)
        buffer = x.new_empty(sent.numel + unit.raw_numel, dtype=dtype)
        factor, raw = buffer[: sent.numel], buffer[sent.numel :]
        left, right = (factor, basis) if is_left else (basis, factor)
        if is_left:
            ctx.kernels[left_products](x, unit.places, self.rank, left, right, subtract=True)
        else:
            ctx.kernels[right_products](x, unit.places, self.rank, left, right)
        factor *= weight
        unit.take_raw(x, raw, weight)
        pending = _summed(buffer, comm) if buffer.numel() else None

        def decode() -> None:
            if pending is not None:
                pending.wait()
            unit.land_raw(raw, mean)
            ctx.kernels[outer_products](mean, unit.places, self.rank, left, right)
            sent.keep_first(factor, before, ctx)

        return decode

    def rounds(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[Round, ...]:
        unit = ctx.once(_arranged, numel, self.rank)
        size = (unit.left if self._sends_left(ctx) else unit.right).numel + unit.raw_numel
        return (_sum_of(size, factor_type(dtype), ctx.world),) if size else ()

    def phase(self, ctx: ExchangeContext) -> Hashable:
        """True if the left factors are sent."""
        return self._sends_left(ctx)

    def _sends_left(self, ctx: ExchangeContext) -> bool:
        return round_robin(ctx, 2, self.order, "factor") == 0


def acp_sgd(rank: int = 1, order: Order = "random") -> AcpSgd:
    """ACP-SGD: a mean of rank `rank` per matrix, by one factor per step.

    >>> import torch
    >>> from gradwire.unit.context import ExchangeContext, Part
    >>> ctx = ExchangeContext(3, 0, 0, world=2, parts=(Part("weight", (64, 128), 0, 64 * 128),))
    >>> [each.numel for each in acp_sgd(2, "paper").rounds(64 * 128, torch.float32, ctx)]
    [256]
    """
    return AcpSgd(check_rank(rank), check_order(order))

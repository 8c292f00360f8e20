"""All-reduce in few bits: every rank sends codes to the owner of each shard, which sends its code to all.

All-to-all, sum in float32, all-gather: the two halves of a ring all-reduce with codes instead of numbers, as
in "1-bit Adam" (Tang et al. 2021, section 4.2, its compressed all-reduce) and in DoubleSqueeze (Tang et al.
2019), whose server is spread over the ranks here. A rank sends 2(N - 1)/N of a payload, whatever the world.

Differences from the papers: the error of the owner's second rounding goes into the owner's own `unsent`, N
times (the owner is one of N addends of the mean). So the second error feedback needs no memory of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from gradwire.codec.base import Codec
from gradwire.comm.base import DONE, Comm, Pending, Round
from gradwire.exchange.base import ExchangeLaws, Finish
from gradwire.step.context import ExchangeContext, Part

_MOST_SEGMENTS = 1 << 12


@dataclass(frozen=True)
class ScatterReduce:
    """Shard r of the unit belongs to rank r, which computes its mean and sends that to all.

    All ranks, the owner too, apply the decoded mean. With `second_stage` the error of the owner's code stays
    in the owner's x, so that nothing is lost; without, it is dropped.

    Let γ be the codec's and S the sum over ranks of ‖x_r‖. The unsent parts sum to at most (2√γ + γ)·S: the
    first stage leaves √γ‖x_r‖ on each rank, and N times the mean's error is at most √γ Σ‖sent_r‖ ≤
    √γ(1 + √γ)S. So error feedback is provably bounded where γ < 0.17 (int8, fp8, truncation to 2^-2 or
    better). int4 blocks reach γ = 0.015 on normal numbers and 0.39 at worst, and are tested.

    A parameter that is idle on its owner keeps its memory; the step's second error is added to it.
    """

    codec: Codec
    second_stage: bool = True
    segment: int | None = None
    """Elements of a segment at most; without it what suits the place."""
    memory = None

    @property
    def laws(self) -> ExchangeLaws:
        """The laws of the codec; it conserves unless the second error is dropped. Then it may be in place, if
        every element travels."""
        laws = self.codec.laws
        return ExchangeLaws(
            conserves=self.second_stage,
            contractive=laws.contractive,
            in_place=laws.covers and not self.second_stage,
            may_overflow=laws.may_overflow,
            total=laws.total,
            stays_on_device=laws.stays_on_device,
        )

    def start(self, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> Finish:
        """An all-to-all for every segment, then an all-gather for each.

        `mean` is scratch until `finish` has been called.
        """
        if x.dtype in (torch.float16, torch.bfloat16):
            return self._start_wide(x, mean, comm, ctx)
        issued: list[Pending] = []
        exchanges = [
            SegmentExchange(self, x[seg.start : seg.stop], mean[seg.start : seg.stop], comm, seg.ctx, issued)
            for seg in segments_of(x.numel(), ctx, self.segment)
        ]
        try:
            for exchange in exchanges:
                exchange.scatter()
            for exchange in exchanges:
                exchange.gather()
        except BaseException:
            # Buffers must outlive collectives in flight; peers issue all of them even if this rank fails.
            for pending in issued:
                pending.wait()
            raise

        def finish() -> None:
            for exchange in exchanges:
                exchange.finish()

        return finish

    def _start_wide(self, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> Finish:
        """Exchange float32 copies, because sums are taken in float32."""
        wide_x, wide_mean = x.float(), mean.float()
        finish_wide = self.start(wide_x, wide_mean, comm, ctx)
        x.copy_(wide_x)

        def finish() -> None:
            finish_wide()
            mean.copy_(wide_mean)

        return finish

    def longest(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[int, torch.dtype]:
        """Elements and type of the longest shard's payload, to which all others of a segment are padded."""
        payloads = []
        for rank in _kinds(numel, ctx):
            start, stop = rank * numel // ctx.world, (rank + 1) * numel // ctx.world
            shard = replace(ctx, parts=parts_within(ctx.parts, start, stop), unsent=None)
            payloads.append(self.codec.payload(stop - start, dtype, shard))
        return max(payloads, key=lambda payload: payload[0])

    def rounds(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[Round, ...]:
        """Segments that have as many elements of the same parameters are alike, wherever these lie."""
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        bounds, known, payloads = _bounds(numel, self.segment or ctx.granularity.segment), {}, []
        for (start, stop), parts in zip(pairwise(bounds), parts_between(ctx.parts, bounds), strict=True):
            kind = (stop - start, *[(part.name, part.numel) for part in parts])
            if kind not in known:
                known[kind] = self.longest(stop - start, wide, replace(ctx, parts=parts, unsent=None))
            payloads.append(known[kind])
        scattered = {each: Round("all_to_all", ctx.world * each[0], each[1]) for each in set(payloads)}
        gathered = {each: Round("all_gather", *each) for each in set(payloads)}
        return (*map(scattered.__getitem__, payloads), *map(gathered.__getitem__, payloads))


class SegmentExchange:
    """One segment on one rank: `x` and `mean` (numel,); its collectives are appended to `issued`."""

    def __init__(
        self,
        how: ScatterReduce,
        x: Tensor,
        mean: Tensor,
        comm: Comm,
        ctx: ExchangeContext,
        issued: list[Pending],
    ) -> None:
        self._how, self._x, self._mean, self._comm, self._issued = how, x, mean, comm, issued
        self._shards = shards_of(x.numel(), ctx)
        size, dtype = how.longest(x.numel(), x.dtype, ctx)
        self._rows = x.new_empty(comm.world, size, dtype=dtype)
        self._others = torch.empty_like(self._rows)
        self._pending: Pending = DONE

    def scatter(self) -> None:
        """Encode every shard of x and send it to its owner. One all-to-all."""
        for shard, row in zip(self._shards, self._rows, strict=True):
            self._fill(row, self._x[shard.start : shard.stop], shard.first)
        self._issue(self._comm.all_to_all(self._others, self._rows))

    def gather(self) -> None:
        """Average what arrived for this rank's shard, and send that to all. One all-gather."""
        self._pending.wait()
        own = self._shards[self._comm.rank]
        partial = self._mean[own.start : own.stop].zero_()
        for row in self._others:
            self._add(row, partial, 1.0 / self._comm.world, own.first)
        payload = self._fill(self._others[self._comm.rank], partial, own.second)
        if self._how.second_stage:
            self._x[own.start : own.stop].add_(partial, alpha=self._comm.world)
        self._issue(self._comm.all_gather(self._rows, payload))

    def finish(self) -> None:
        """Write the mean, as all ranks decode it."""
        self._pending.wait()
        self._mean.zero_()
        for shard, row in zip(self._shards, self._rows, strict=True):
            self._add(row, self._mean[shard.start : shard.stop], 1.0, shard.second)

    def _issue(self, pending: Pending) -> None:
        self._pending = pending
        self._issued.append(pending)

    def _fill(self, row: Tensor, x: Tensor, ctx: ExchangeContext) -> Tensor:
        payload = self._how.codec.take(x, ctx)
        row[: payload.numel()] = payload
        row[payload.numel() :] = 0
        return row

    def _add(self, row: Tensor, out: Tensor, weight: float, ctx: ExchangeContext) -> None:
        count, _dtype = self._how.codec.payload(out.numel(), out.dtype, ctx)
        self._how.codec.add_decoded(row[:count], out, weight, ctx)


@dataclass(frozen=True)
class Segment:
    """Elements [start, stop) of a unit, and the context in which they are exchanged."""

    start: int
    stop: int
    ctx: ExchangeContext


def segments_of(numel: int, ctx: ExchangeContext, segment: int | None = None) -> tuple[Segment, ...]:
    """A unit in pieces of at most `segment` elements, as equal as can be; one, if it is empty.

    Without a `segment` that of the context's granularity counts.

    >>> ctx = ExchangeContext(step=0, unit=0, rank=0, world=2)
    >>> [(seg.start, seg.stop) for seg in segments_of(10, ctx, 4)]
    [(0, 3), (3, 6), (6, 10)]
    """
    bounds, found = _bounds(numel, segment or ctx.granularity.segment), []
    pieces = zip(pairwise(bounds), parts_between(ctx.parts, bounds), strict=True)
    for index, ((start, stop), parts) in enumerate(pieces):
        unsent = None if ctx.unsent is None else ctx.unsent[start:stop]
        here = replace(ctx, unit=ctx.unit * _MOST_SEGMENTS + index, parts=parts, unsent=unsent)
        found.append(Segment(start, stop, here))
    return tuple(found)


def _bounds(numel: int, segment: int) -> list[int]:
    count = min(max(1, -(-numel // segment)), _MOST_SEGMENTS)
    return [numel * index // count for index in range(count + 1)]


@dataclass(frozen=True)
class UnitShard:
    """Elements [start, stop) of a unit, and two contexts for its codes.

    The `first` is for what every rank sends to the owner, the `second` for what the owner sends to all.
    """

    start: int
    stop: int
    first: ExchangeContext
    second: ExchangeContext


def shards_of(numel: int, ctx: ExchangeContext) -> tuple[UnitShard, ...]:
    """One shard per rank, as equal as can be; parts are cut where shards end.

    Codes draw from generators of their own, so that no two have the same random numbers.

    >>> parts = (Part("w", (7,), 0, 7), Part("v", (3,), 0, 3))
    >>> ctx = ExchangeContext(step=0, unit=0, rank=0, world=2, parts=parts)
    >>> [[part.numel for part in shard.first.parts] for shard in shards_of(10, ctx)]
    [[5], [2, 3]]
    """
    bounds = [rank * numel // ctx.world for rank in range(ctx.world + 1)]
    shards = []
    pieces = zip(pairwise(bounds), parts_between(ctx.parts, bounds), strict=True)
    for rank, ((start, stop), parts) in enumerate(pieces):
        unsent = None if ctx.unsent is None else ctx.unsent[start:stop]
        number = 2 * (ctx.unit * ctx.world + rank)
        first = replace(ctx, unit=number, parts=parts, unsent=unsent)
        second = replace(ctx, unit=number + 1, parts=parts, unsent=None)
        shards.append(UnitShard(start, stop, first, second))
    return tuple(shards)


def parts_within(parts: Sequence[Part], start: int, stop: int) -> tuple[Part, ...]:
    """The parts, or pieces of them, in elements [start, stop) of a unit."""
    found, begin = [], 0
    for part in parts:
        low, high = max(start, begin), min(stop, begin + part.numel)
        if low < high:
            inside = part.start - begin
            found.append(Part(part.name, part.shape, inside + low, inside + high))
        begin += part.numel
    return tuple(found)


def parts_between(parts: Sequence[Part], bounds: Sequence[int]) -> Iterator[tuple[Part, ...]]:
    """`parts_within` any two neighbouring `bounds` of a unit, which ascend; in one walk over all parts."""
    ends = list(accumulate(part.numel for part in parts))
    first, begin = 0, 0
    for start, stop in pairwise(bounds):
        while first < len(parts) and ends[first] <= start:
            begin, first = ends[first], first + 1
        last = first
        while last < len(parts) and ends[last] < stop:
            last += 1
        yield parts_within(parts[first : last + 1], start - begin, stop - begin)


def _kinds(numel: int, ctx: ExchangeContext) -> set[int]:
    """Ranks whose shards stand for all: those at the ends of parts, and one of the longest within a part.

    The length of a payload depends on how many elements of which parameters it has, not on where they lie.
    Shards differ by one element at most: that of rank r is the longer where r·numel/world, modulo 1, carries.
    """
    if numel == 0:
        return {0}
    found, world, rest = set(), ctx.world, numel % ctx.world
    for start, stop in pairwise((0, *accumulate(ctx.sizes(numel)))):
        if start == stop:
            continue
        first, last = (((element + 1) * world - 1) // numel for element in (start, stop - 1))
        found |= {first, last}
        inner = first + 1
        if inner < last:
            more = -((inner * rest % world - world) // rest) - 1 if rest else 0
            found.add(min(inner + more, last))
    return found


def scatter_reduce(codec: Codec, second_stage: bool = True, segment: int | None = None) -> ScatterReduce:
    """All-reduce in the codes of any codec.

    Units travel in segments of at most `segment` elements, by default as many as suit the place.
    `second_stage` keeps the error of an owner's code in the owner's own `unsent`.

    >>> from gradwire.codec.blocks import blocks
    >>> ctx = ExchangeContext(0, 0, rank=0, world=4)
    >>> rounds = scatter_reduce(blocks("int8")).rounds(1024, torch.float32, ctx)
    >>> [(each.verb, each.payload_bytes) for each in rounds]
    [('all_to_all', 1040), ('all_gather', 260)]
    """
    return ScatterReduce(codec, second_stage, segment)

"""Coding of Δ for an object store: each payload is made without the others, and decoded with them.

The lines of `gradwire.step.reducer` that a single replica runs: compensate, compress, and much later decode.
Units and the order of sums are those of `outer(replicas=…)`, so that bits are, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import WireError
from gradwire.exchange.base import Exchange
from gradwire.exchange.compose import Scheme
from gradwire.exchange.dense import Dense
from gradwire.exchange.payloads import Gather, Reduce
from gradwire.kernels.dispatch import kernels_for
from gradwire.memory import Gradients
from gradwire.sources.buckets import OwnBucket
from gradwire.step.layout import Layout
from gradwire.unit.context import ExchangeContext
from gradwire.unit.parameters import Slot

_INSTEAD = (
    "take one in which each replica's payload is made without the others: 'sparseloco', 'topk(ratio=0.02)', "
    "\"int4(collective='all_gather')\", \"int8(collective='all_gather')\", 'bf16' or 'dense'"
)


@dataclass(frozen=True)
class _Piece:
    """Elements that are coded together: a unit of a flat buffer, or a parameter without memory."""

    exchange: Exchange
    numel: int
    dtype: torch.dtype
    ctx: ExchangeContext

    def runs(self, round_: int) -> tuple[Exchange | None, ExchangeContext]:
        """The exchange of this round, or `None` if the piece rests; and its context."""
        ctx = self.ctx.at(round_)
        now = self.exchange.now(ctx) if isinstance(self.exchange, Scheme) else self.exchange
        return now, ctx

    def size(self, round_: int) -> int:
        """Bytes of its payload."""
        now, ctx = self.runs(round_)
        if now is None:
            return 0
        if isinstance(now, Gather | Reduce):
            numel, dtype = now.codec.payload(self.numel, self.dtype, ctx)
            return numel * dtype.itemsize
        return self.numel * self.dtype.itemsize

    def encode(self, x: Tensor, round_: int) -> Tensor:
        """The payload of x (numel,), as bytes; x keeps the rest."""
        now, ctx = self.runs(round_)
        if now is None:
            return x.new_empty(0, dtype=torch.uint8)
        if isinstance(now, Gather | Reduce):
            payload = now.codec.take(x, ctx)
        else:
            payload = x.clone()
            x.zero_()
        return payload.contiguous().view(-1).view(torch.uint8)

    def decode(self, rows: Sequence[Tensor], mean: Tensor, round_: int) -> None:
        """Write the mean of payloads, as bytes, to `mean` (numel,). Raises `WireError`."""
        now, ctx = self.runs(round_)
        mean.zero_()
        if now is None:
            return
        share = 1.0 / len(rows)
        if not isinstance(now, Gather | Reduce):
            for row in rows:
                mean += row.view(self.dtype) * share
            return
        kind = now.codec.payload(self.numel, self.dtype, ctx)[1]
        payloads = torch.stack([row.view(kind) for row in rows])
        average = getattr(now.codec, "average_decoded", None)
        if average is not None:
            average(payloads, mean, ctx)
            return
        for payload in payloads:
            now.codec.add_decoded(payload, mean, share, ctx)


class Coder:
    """Encodes the Δ that lies in buckets, and decodes means into them."""

    def __init__(self, layout: Layout, buckets: Sequence[OwnBucket], *, seed: int, number: int) -> None:
        """Prepare everything that rounds have in common.

        Args:
            layout: of the parameters, with memory.
            buckets: of Δ, and of means.
            seed: of random numbers.
            number: of this replica, from which its own random numbers follow.

        Raises `ValueError` for recipes whose payloads depend on other replicas.
        """
        self._layout, self._buckets = layout, buckets
        self._idle: list[list[Slot]] = []
        common = ExchangeContext(0, 0, number, 2, seed)
        self._units = [
            _Piece(
                each.exchange,
                unit.numel,
                each.dtype,
                replace(
                    common,
                    unit=unit.index,
                    flat_buffer=unit.flat_buffer,
                    parts=unit.parts,
                    narrow=each.narrow,
                    kept=each.kept,
                    kernels=each.kernels,
                ).with_constants(constants),
            )
            for each in layout.flat_buffers
            for unit, constants in zip(each.units, each.constants, strict=True)
        ]
        self._places = [(each, unit) for each in layout.flat_buffers for unit in each.units]
        self._direct: list[tuple[_Piece, Tensor]] = []
        entries = [(bucket, entry) for bucket in buckets for entry in bucket.entries]
        for bucket, entry in entries:
            name = entry.spec.name
            if name in layout.direct:
                region = bucket.buffer[entry.start : entry.stop]
                ctx = replace(
                    common,
                    unit=len(self._direct),
                    flat_buffer=-1,
                    kernels=kernels_for(region.device, region.dtype),
                )
                piece = _Piece(layout.direct[name], entry.spec.numel, region.dtype, ctx)
                self._direct.append((piece, region))
        for flat_buffer in layout.flat_buffers:
            if flat_buffer.memory.covers_momentum:
                raise ValueError(f"{layout.main.text} applies momentum to gradients: {_INSTEAD}")
        for piece in self._pieces:
            _require_independent(piece.exchange, layout.main.text)

    @property
    def _pieces(self) -> Iterator[_Piece]:
        yield from self._units
        yield from (piece for piece, _region in self._direct)

    def size(self, round_: int) -> int:
        """Bytes of a payload."""
        return sum(piece.size(round_) for piece in self._pieces)

    @property
    def units(self) -> int:
        """Number of payloads that an offer is made of."""
        return len(self._units) + len(self._direct)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the memory of what is unsent."""
        return self._layout.memory_bytes

    def encode(self, round_: int) -> Tensor:
        """The payload of the Δ in the buckets, on the CPU: uint8 (bytes,). The memory changes by `keep`."""
        self._idle = [[] for _each in self._layout.flat_buffers]
        for bucket in self._buckets:
            plan = self._layout.bucket_plan(bucket.gradient_bucket)
            for share in plan.shares:
                each = share.flat_buffer
                grads = Gradients(bucket.buffer, share.pieces, 1.0, each.kernels)
                numbers, _finite = each.compensate(grads, round_, 2).read()
                idle = [share.slots[number] for number in numbers]
                for slot in idle:  # as in `Step.note`: they send nothing, and keep their memory
                    each.x[slot.start : slot.stop].zero_()
                self._idle[each.number] += idle
        payloads = [
            piece.encode(each.x[unit.start : unit.stop], round_)
            for piece, (each, unit) in zip(self._units, self._places, strict=True)
        ]
        payloads += [piece.encode(region, round_) for piece, region in self._direct]
        return torch.cat([each.cpu() for each in payloads])

    def keep(self) -> None:
        """Make the rest of the last `encode` the memory, because its payload counts."""
        for each, idle in zip(self._layout.flat_buffers, self._idle, strict=True):
            each.begin()
            each.commit(idle)

    def forget(self) -> None:
        """Nothing is unsent any more."""
        for each in self._layout.flat_buffers:
            each.kept.committed.clear()
            each.kept.discard()
            for plane in each.committed.values():
                plane.zero_()

    def decode(self, payloads: Sequence[Tensor], round_: int) -> None:
        """Write the mean of payloads to the buckets. Raises `WireError` if one is none of this round."""
        sizes = [piece.size(round_) for piece in self._pieces]
        if wrong := [each.numel() for each in payloads if each.numel() != sum(sizes)]:
            raise WireError(f"a payload has {wrong[0]} bytes, and {sum(sizes)} are right")
        # Each piece in memory of its own, from where kernels can read words.
        cuts = [slice(*pair) for pair in pairwise(accumulate(sizes, initial=0))]
        place = {entry.spec.name: (b, entry) for b in self._buckets for entry in b.entries}
        numbers = iter(cuts)
        for piece, (each, unit) in zip(self._units, self._places, strict=True):
            cut, mean = next(numbers), torch.empty_like(each.x[unit.start : unit.stop])
            piece.decode([row[cut].clone().to(mean.device) for row in payloads], mean, round_)
            begin = 0
            for part in unit.parts:
                bucket, entry = place[part.name]
                to = bucket.buffer[entry.start + part.start : entry.start + part.stop]
                to.copy_(mean[begin : begin + part.numel])
                begin += part.numel
        for piece, region in self._direct:
            cut = next(numbers)
            piece.decode([row[cut].clone().to(region.device) for row in payloads], region, round_)

    # -- saves

    def save(self) -> list[dict[str, Tensor]]:
        """The memory."""
        return [dict(each.committed) for each in self._layout.flat_buffers]

    def prepared(self, saved: Any) -> Callable[[], None]:
        """A function that takes up a saved memory. Raises `ValueError` if that is of another recipe."""
        here = [each.committed for each in self._layout.flat_buffers]
        shapes = [{name: each.shape for name, each in planes.items()} for planes in here]
        if [{name: each.shape for name, each in planes.items()} for planes in saved] != shapes:
            raise ValueError(
                "the save has another memory than this recipe: it is of another recipe or policy"
            )

        def take_up() -> None:
            for planes, own in zip(saved, here, strict=True):
                for name, each in planes.items():
                    own[name].copy_(each)

        return take_up


def _require_independent(exchange: Exchange, text: str) -> None:
    """Raise `ValueError` if what a replica sends depends on what others have sent."""
    inner = exchange
    while isinstance(inner, Scheme):
        inner = inner.aggregation
    if not isinstance(inner, Gather | Reduce | Dense):
        raise ValueError(f"{text} needs several messages in which replicas answer each other: {_INSTEAD}")

"""Compensation and encoding of gradients in one pass, bucket by bucket, on a device.

No block lies in two parameters, so a bucket can be encoded before all of its unit is there. Codes go to a
room of the whole flat buffer, in which each unit has the rows that its exchange sends. The room lives from
the first bucket of a step to the last one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.exchange.base import RowCoder
from gradwire.granularity import Granularity
from gradwire.kernels.blocks import compensate_blocks, land_shards
from gradwire.kernels.layouts import CodedPieces, ScaledBlocks, ShardedBlocks
from gradwire.kernels.pieces import Pieces
from gradwire.memory import UNSENT, Gradients
from gradwire.step.flat_buffers import FlatBuffer
from gradwire.unit.context import Coded, ExchangeContext
from gradwire.unit.parameters import Unit

_GRAIN = 16
"""Alignment of rows in bytes, so that kernels move whole vectors."""


class _Segment(NamedTuple):
    """A segment of a unit: the start of its rows in the room, its elements in the unit, and its coder."""

    start: int
    here: slice
    coder: RowCoder

    def rows(self, room: Tensor) -> Tensor:
        shape = len(self.coder.table.shards), self.coder.table.row_bytes
        return room[self.start : self.start + shape[0] * shape[1]].view(shape)


class CodedBuffer:
    """Encodes the gradients of a flat buffer as they come, and keeps the codes of the running step."""

    def __init__(self, flat_buffer: FlatBuffer, units: Sequence[Sequence[RowCoder]]) -> None:
        """Lay out a room for the codes. `units` are the coders of each unit's segments, in order."""
        self._flat_buffer = flat_buffer
        self._room: Tensor | None = None
        self._marks: Tensor
        self._runs = defaultdict[int, list[tuple[int, int, int, int]]](list)
        """Runs by slot number: (first element, elements, first scale, first byte of codes)."""
        self._zeros = defaultdict[int, list[tuple[int, int]]](list)
        self._segments: list[list[_Segment]] = []
        self._bytes = 0
        self._starts = [slot.start for slot in flat_buffer.slots]
        first = units[0][0].table.shards[0]
        self._rule = first.block, first.kind
        for unit, coders in zip(flat_buffer.units, units, strict=True):
            self._segments.append([])
            begin = unit.start
            for coder in coders:
                start = self._bytes
                stop = self._lay_out(coder.table, begin, self._slot_at(unit.start))
                here = slice(begin - unit.start, stop - unit.start)
                self._segments[-1].append(_Segment(start, here, coder))
                begin = stop
        self._shares: dict[int, CodedPieces] = {}
        """Pieces of a bucket by the number of their first slot."""

    def _slot_at(self, element: int) -> int:
        return self._flat_buffer.first + bisect_right(self._starts, element) - 1

    def _lay_out(self, table: ShardedBlocks, begin: int, first: int) -> int:
        """Give rows to the shards of a segment.

        Args:
            table: of the segment.
            begin: its first element in the flat buffer.
            first: the number of the slot with which bytes that no code takes become zero.

        Returns:
            The element of the flat buffer after the segment.
        """
        for number, shard in enumerate(table.shards):
            start = self._bytes + number * table.row_bytes
            scale, byte = start // table.dtype.itemsize, start + shard.count * table.dtype.itemsize
            for size in filter(None, shard.sizes):
                self._runs[self._slot_at(begin)].append((begin, size, scale, byte))
                part = ScaledBlocks((size,), shard.block, shard.kind)
                begin, scale, byte = begin + size, scale + part.count, byte + part.code_bytes
            if byte < start + table.row_bytes:
                self._zeros[first].append((byte, start + table.row_bytes - byte))
        self._bytes += -(-len(table.shards) * table.row_bytes // _GRAIN) * _GRAIN
        return begin

    def compensate(self, grads: Gradients, numbers: Sequence[int], step: int, marks: Tensor) -> None:
        """Compensate gradients, and encode them.

        Args:
            grads: of a bucket.
            numbers: of their slots, in the order of the pieces.
            step: counts committed steps.
            marks: those of the step (`gradwire.step.marks`).
        """
        flat_buffer = self._flat_buffer
        if self._room is None:
            self._room = torch.empty(self._bytes, dtype=torch.uint8, device=flat_buffer.x.device)
        coded = self._shares.get(numbers[0])
        if coded is None or coded.pieces is not grads.pieces:  # DDP makes other buckets in its second step
            coded = self._shares[numbers[0]] = self._coded(grads.pieces, numbers)
        self._marks = marks
        flat_buffer.kernels[compensate_blocks](
            flat_buffer.x,
            flat_buffer.committed.get(UNSENT),
            grads.bucket,
            flat_buffer.memory.coefficient(step),
            grads.scale,
            coded,
            self._room,
            marks,
        )

    def _coded(self, pieces: Pieces, numbers: Sequence[int]) -> CodedPieces:
        places = enumerate(zip(numbers, pieces.table.tolist(), strict=True))
        runs = [
            (start, bucket + start - plane, numel, piece, scale, byte)
            for piece, (number, (plane, bucket, _numel)) in places
            for start, numel, scale, byte in self._runs[number]
        ]
        zeros = [each for number in numbers for each in self._zeros[number]]
        return CodedPieces(pieces, numbers, runs, zeros, *self._rule)

    def unit(self, unit: Unit, places: Sequence[Tensor], factor: float) -> Coded | None:
        """The codes of a complete unit, for its exchange; `None` if nothing was encoded in this step.

        Args:
            unit: all of its gradients have been encoded.
            places: stretches of buckets in which its mean lands, in order.
            factor: multiplies the mean.
        """
        room = self._room
        if room is None:
            return None
        marks, land_all = self._marks, self._flat_buffer.kernels[land_shards]
        rows, land = [], []
        for each in self._segments[unit.index]:
            rows.append(each.rows(room))
            here = _within(places, each.here) if len(places) > 1 else [places[0][each.here]]
            land.append(partial(land_all, table=each.coder.table, places=here, factor=factor, marks=marks))
        return Coded(tuple(rows), tuple(land))

    def close(self) -> None:
        """Release the room: all gradients of the step have been encoded, or the step is over."""
        self._room = None


def _within(places: Sequence[Tensor], here: slice) -> list[Tensor]:
    """The parts of `places` that hold the elements `here` of a unit. Together, `places` hold the unit,
    in order.
    """
    found, begin = [], 0
    for place in places:
        low, high = max(here.start - begin, 0), min(here.stop - begin, place.numel())
        if low < high:
            found.append(place[low:high])
        begin += place.numel()
    return found


def coded_buffer(flat_buffer: FlatBuffer, world: int, granularity: Granularity) -> CodedBuffer | None:
    """The encoder of gradients as they come; `None` if the flat buffer's memory or exchange allows none.

    Args:
        flat_buffer: has the units.
        world: the number of ranks.
        granularity: of the device.
    """
    ahead = getattr(flat_buffer.exchange, "ahead", None)
    if (
        ahead is None
        or not flat_buffer.adds
        or flat_buffer.dtype is not torch.float32
        or not flat_buffer.units
    ):
        return None
    units = []
    for unit, constants in zip(flat_buffer.units, flat_buffer.constants, strict=True):
        ctx = ExchangeContext(0, unit.index, 0, world, parts=unit.parts, granularity=granularity)
        coders = ahead(unit.numel, flat_buffer.dtype, ctx.with_constants(constants))
        if coders is None:
            return None
        units.append(coders)
    return CodedBuffer(flat_buffer, units)

"""Reduction inside a node: sums each gradient bucket over its ranks, and gathers the means at the end of a
step.

Every rank of a node gets the node's mean of its own shard of each parameter, in full precision. The reducer
exchanges these over one rank per node: with any recipe, the bytes on a node's link are those of one rank's
gradient. When the outcome of a step is known, the ranks of a node gather each other's means.

The sum is an all-to-all and an addition in rank order, which sends as many bytes as a ring's reduce-scatter.
On a device all of this is enqueued in the reducer's stream, and the host does not wait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gradwire.agreement.agree import damage, require_undamaged
from gradwire.comm import Pending
from gradwire.errors import DAMAGED, TransportError
from gradwire.measure.metered import MeteredComm
from gradwire.placement import Placement
from gradwire.step.gradient_bucket import GradientBucket, InTurn
from gradwire.step.moods import Outcome
from gradwire.step.reducer import Reducer
from gradwire.step.shards import shards_of
from gradwire.step.step import Step
from gradwire.unit.parameters import ParameterSpec, Slot, slots_of

_LOG = logging.getLogger("gradwire")
_ATTEMPTS = 3
"""Number of attempts to gather: a link that damages the same bytes so often is broken."""


class Packing:
    """Layout of a buffer's parameters in `parts` rows: row s has shard s of each parameter, in equal
    order.
    """

    def __init__(self, entries: tuple[Slot, ...], shards: Sequence[ParameterSpec], parts: int) -> None:
        """Lay out the gradients of a bucket as shards.

        Args:
            entries: parameters of the bucket, and their places in it.
            shards: specs of these parameters' shards.
            parts: number of shards of each.
        """
        self.source, self.parts = entries, parts
        self.numel = sum(shard.numel for shard in shards)
        """Elements of a row."""
        self.entries = slots_of(shards)
        """The entries of this rank's row."""
        self._runs = [
            (
                entry.start + number * to.spec.numel,
                to.start,
                min(to.spec.numel, entry.spec.numel - number * to.spec.numel),
                number,
            )
            for entry, to in zip(entries, self.entries, strict=True)
            for number in range(parts)
            if entry.spec.numel > number * to.spec.numel
        ]

    def rows(self, like: Tensor) -> Tensor:
        """Room for all shards (parts, numel)."""
        return like.new_empty(self.parts, self.numel)

    def pack(self, buffer: Tensor) -> Tensor:
        """Copy `buffer` into rows of shards, padded with zeros."""
        filled = sum(size for *_starts, size, _number in self._runs) == self.parts * self.numel
        rows = self.rows(buffer) if filled else self.rows(buffer).zero_()
        self._copy(self._in(rows), self._of(buffer))
        return rows

    def unpack(self, rows: Tensor, buffer: Tensor) -> None:
        self._copy(self._of(buffer), self._in(rows))

    @staticmethod
    def _copy(to: list[Tensor], of: list[Tensor]) -> None:
        if to:  # torch has no copy of nothing
            torch._foreach_copy_(to, of)

    def _of(self, buffer: Tensor) -> list[Tensor]:
        return [buffer[start : start + size] for start, _to, size, _number in self._runs]

    def _in(self, rows: Tensor) -> list[Tensor]:
        return [rows[number, to : to + size] for _start, to, size, number in self._runs]


@dataclass
class _Buffer:
    """A bucket in flight: `rows` has the neighbours' parts of this rank's shard, and later all means."""

    bucket: GradientBucket
    packing: Packing
    rows: Tensor
    under_way: Pending
    shard: Tensor


@dataclass
class _Pass:
    """A step: its placement, its messages inside the node, and the shards that it has brought so far."""

    placement: Placement
    inside: MeteredComm
    in_turn: InTurn = field(default_factory=InTurn)
    buffers: list[_Buffer] = field(default_factory=list)
    outstanding: int = 0
    closed: bool = False


class NodeReducer:
    """Reduction inside a node, between a source and the reducer; it has the reducer's `begin_step`,
    `bucket_ready` and `all_ready`.

    All of it runs on the worker's thread. If the step's placement is on a device, sums and means stay there.
    Buckets are summed in the order of their indices, so that all ranks of a node issue the same collectives
    in the same order.
    """

    def __init__(self, specs: Sequence[ParameterSpec], parts: int) -> None:
        """`specs` are the source's; `parts` ranks are on each node."""
        self.specs, self._parts = shards_of(specs, parts), parts
        self._named = {spec.name: spec for spec in self.specs}
        self._packings: dict[int, Packing] = {}
        self._running: _Pass | None = None
        self._reducer: Reducer | None = None

    @property
    def reducer(self) -> Reducer:
        """The reducer's side, which takes the shards."""
        assert self._reducer is not None, "joined first"
        return self._reducer

    def join(self, reducer: Reducer) -> None:
        """Connect to `reducer`, made with `self.specs`. The reducer ends its steps by `finish`."""
        self._reducer = reducer

    def begin_step(self, at_s: float) -> None:
        """Begin a step."""
        self.reducer.catch_up()  # which may change the placement
        placement = self.reducer.placement
        assert placement.inside is not None, "there are nodes"
        self._running = _Pass(placement, MeteredComm(placement.inside))
        self.reducer.begin_step(at_s)

    @property
    def _pass(self) -> _Pass:
        assert self._running is not None, "opened first"
        return self._running

    def bucket_ready(self, bucket: GradientBucket) -> None:
        """Sum the buckets whose turn it is inside the node."""
        now = self._pass
        now.in_turn.add(bucket)
        for following in now.in_turn.next_turns():
            now.outstanding += 1
            self.reducer.unless_broken(self._scatter, now, following)

    def all_ready(self) -> None:
        """Note that all buckets of the step have come."""
        self._pass.closed = True
        self._close_when_summed(self._pass)

    def _packing(self, bucket: GradientBucket) -> Packing:
        known = self._packings.get(bucket.index)
        if known is None or known.source is not bucket.entries:
            shards = [self._named[entry.spec.name] for entry in bucket.entries]
            known = self._packings[bucket.index] = Packing(bucket.entries, shards, self._parts)
        return known

    def _scatter(self, now: _Pass, bucket: GradientBucket) -> None:
        """Send each neighbour its part; if that fails, send zeros, because the neighbours wait for bytes."""
        rows: Tensor | None = None
        try:
            packing = self._packing(bucket)
            rows = packing.rows(bucket.buffer)
            shard = rows.new_empty(packing.numel)
            under_way = now.inside.all_to_all(rows, packing.pack(bucket.buffer))
        except TransportError:
            raise
        except BaseException as error:  # of memory, for instance
            bucket = replace(bucket, failure=bucket.failure or error)
            packing = self._packing(bucket)
            # Nothing of this step is read any more: what comes may overwrite what is sent, to save memory.
            rows = packing.rows(bucket.buffer) if rows is None else rows
            shard = bucket.buffer[: packing.numel]
            under_way = now.inside.all_to_all(rows, rows.zero_())
        now.buffers.append(buffer := _Buffer(bucket, packing, rows, under_way, shard))
        under_way.then(lambda: now.placement.post(lambda: self._summed(now, buffer)))

    def _summed(self, now: _Pass, buffer: _Buffer) -> None:
        """The neighbours' parts are here, or lost."""
        if now is not self._running:
            return  # the step has ended without them
        now.outstanding -= 1
        try:
            bucket = buffer.bucket
            failure = damage(buffer.under_way) or bucket.failure
            try:
                _mean(buffer.rows, buffer.shard)
            except BaseException as error:  # ranks with the same shard wait for it
                failure = failure or error
            entries = buffer.packing.entries
            self.reducer.bucket_ready(
                GradientBucket(buffer.shard, entries, bucket.index, bucket.at_s, failure)
            )
        except BaseException as error:  # or the step would never be closed
            self.reducer.crash(error)
        self._close_when_summed(now)

    def _close_when_summed(self, now: _Pass) -> None:
        if now.closed and (now.outstanding == 0 or self.reducer.broken is not None):
            now.closed = False
            self.reducer.all_ready()

    def finish(self, step: Step, deliver: Callable[[Step], None]) -> None:
        """Gather the means of a step with an outcome, which is equal on all ranks; then `deliver` it."""
        now, self._running = self._pass, None
        try:
            if step.error is None:
                self._gather_undamaged(now)
        except BaseException as error:  # a step that is not delivered would never end
            self.reducer.crash(error)
            step.outcome, step.error = Outcome.FAILED, error
        if step.error is not None:
            # Half of a mean must not pass for a gradient.
            for bucket in now.in_turn:
                bucket.poison()
        step.sent.inside_bytes = now.inside.wire_bytes
        deliver(step)

    def _gather_undamaged(self, now: _Pass) -> None:
        """Gather means, and again if they come damaged, because the step counts already: all ranks know of
        the damage.
        """
        for left in reversed(range(_ATTEMPTS)):
            try:
                self._gather(now)
                break
            except DAMAGED as error:
                if left == 0:
                    raise
                _LOG.warning("%s; the means are sent again", error)

    def _gather(self, now: _Pass) -> None:
        """Gather all buckets at once: the last one's bytes are in flight while the first is unpacked."""
        under_way = [now.inside.all_gather(each.rows, each.shard) for each in now.buffers]
        failures = []
        for pending, each in zip(under_way, now.buffers, strict=True):
            failures.append(damage(pending))
            each.packing.unpack(each.rows, each.bucket.buffer)
        require_undamaged(failures, now.placement.control)


def _mean(rows: Tensor, out: Tensor) -> None:
    """The mean of `rows` (ranks, numel), added in rank order in at least float32 and rounded once.

    Each addend is divided first, as DDP does it: a mean of finite numbers is finite.

    >>> out = torch.empty(2)
    >>> _mean(torch.tensor([[1.0, 3e38], [3.0, 3e38]]), out)
    >>> out.tolist() == [2.0, float(torch.tensor(3e38))]
    True
    """
    wide = rows if rows.dtype.itemsize >= 4 else rows.float()
    total = wide[0].mul_(1.0 / len(rows))
    for row in wide[1:]:
        total.add_(row, alpha=1.0 / len(rows))
    out.copy_(total)

"""The state of one step, from its first bucket to its status vote; dropped as a whole afterwards.

`Step.fail` keeps the first error on this rank, which still issues all collectives for which its peers wait.
Its row of the status vote reports the error, and all rows together decide the step's outcome on all ranks. A
broken transport is the exception: the step fails without a vote, as do all later ones (`Reducer.broken`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.autograd import profiler

from gradwire.comm import Comm, Pending, Round
from gradwire.errors import DAMAGED, GradwireError
from gradwire.exchange.base import Decode
from gradwire.kernels.compensation import Findings
from gradwire.kernels.compiler import compiled_s
from gradwire.kernels.dispatch import kernels_for
from gradwire.kernels.flagged import mark_not_finite, zero_idle
from gradwire.kernels.range import is_finite
from gradwire.measure.clock import BackwardWatch, Trace, now_s
from gradwire.measure.metered import MeteredComm
from gradwire.planning.facts import Times
from gradwire.step.ahead import CodedBuffer
from gradwire.step.flat_buffers import FlatBuffer, Scaled
from gradwire.step.gradient_bucket import BufferShare, Route
from gradwire.step.intake import Intake
from gradwire.step.marks import Marks
from gradwire.step.moods import Outcome
from gradwire.step.plan import Collectives, ExchangePlan
from gradwire.step.status_vote import SmallReduce, StatusVote, Votes
from gradwire.unit.context import ExchangeContext, refuse
from gradwire.unit.parameters import ParameterSpec, Slot, Unit


class Untimed(Trace):
    """The trace of a step that is not timed."""

    def __init__(self) -> None:
        super().__init__()
        self._nothing = threading.RLock()

    def compressing(self, _what: Literal["encode", "decode"], _unit: str) -> AbstractContextManager[Any]:
        """Measure nothing. A lock that no other thread knows is a context without calls of Python."""
        return self._nothing


class CountedComm(MeteredComm):
    """Counts the rounds that were issued, for `owe_zeros`, and takes no times."""

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
        """Start the round."""
        self.last = pending = self._comm.issue(round_, tensor, out)
        self.rounds.append(round_)
        return pending


UnitObserver: TypeAlias = Callable[[FlatBuffer, Unit, Tensor, ExchangeContext], None]
"""Function called with a compensated unit, before its exchange works in it."""

Compare: TypeAlias = Callable[[Sequence[tuple[float, ...]]], GradwireError | None]
"""Reads numbers of all ranks, by rank. Returns the error with which the step fails on all of them, if any."""


class SideBroadcast(Protocol):
    """Tensors broadcast from one rank to all beside a step's gradients, such as the model's buffers."""

    failure: BaseException | None
    """The error of packing. Peers wait for the collective, so something is sent nevertheless."""

    def is_stale(self, *, deferred: bool) -> bool:
        """True if the packed tensors are out of date on this rank.

        If `deferred`, the answer is that for the previous step, and no device is waited for.
        """

    def send(self, comm: Comm) -> None:
        """Issue the collective over `comm`. Raises `TransportError`."""

    def wait(self) -> None:
        """Block until the collective has ended. Raises `TransportError` when it failed."""


@dataclass(eq=False)
class InFlight:
    """One exchange from its start to its decoded mean: `x` in, `mean` out."""

    plan: ExchangePlan
    agreed: Collectives
    x: Tensor
    mean: Tensor | None
    """Memory for the mean; `None` until the exchange starts, if the mean is not decoded straight into a
    bucket."""
    ctx: ExchangeContext
    comm: MeteredComm
    checks_mean: bool
    """True if the mean is checked for NaN and Inf: no compensation has seen the gradient, or finite gradients
    may overflow."""
    land: Callable[[Tensor], None] | None = None
    """Function that carries the mean to the buckets; `None` if it is decoded there."""
    route: Route = ()
    """Places of the mean in the buckets."""
    decode: Decode | None = None
    """Waits for the last collective and decodes; `None` if the start has failed."""


@dataclass
class Flight:
    """Exchanges, small gradients and the model's buffers that are in flight in a step."""

    received: deque[InFlight] = field(default_factory=deque)
    """Exchanges whose last collective has ended, for the reducer to decode."""
    unannounced: deque[Callable[[], None]] = field(default_factory=deque)
    """Ends of exchanges whose last collective does not announce its end."""
    outstanding: int = 0
    """Exchanges that have begun and are not decoded."""
    fallible: int = 0
    """Number of outstanding exchanges that may still fail on this rank alone."""
    small: list[SmallReduce] = field(default_factory=list)
    """The all-reduces of small gradients."""
    status_vote: StatusVote | None = None
    """The last all-reduce, which carries the vote, once it has been sent. Timelines call it "tail"."""
    carried: list[SideBroadcast] = field(default_factory=list)
    """The model's buffers, such as BatchNorm's, if this step broadcasts them."""
    stale: bool = False
    """True if the model's buffers were out of date on some rank, and are not used."""


@dataclass
class SentBytes:
    """The bytes that a step has sent, as metered, and as predicted."""

    metered_bytes: float = 0.0
    predicted_bytes: float = 0.0
    inside_bytes: float = 0.0
    """Sent within the node; all other bytes go between nodes."""

    def add(self, planned: float | None, comm: MeteredComm, *, is_timed: bool) -> None:
        """Add what went over `comm`, where `planned` bytes were; in a step that is not timed they are the
        metered ones, too.

        For collectives whose size is negotiated at run time, the bytes actually sent count as both.
        """
        metered = comm.wire_bytes if is_timed or planned is None else planned
        self.metered_bytes += metered
        self.predicted_bytes += metered if planned is None else planned


@dataclass
class Step:
    """The running step. Only the worker writes to it; other threads see it once it has ended."""

    number: int
    recipe: str
    """The text of the composition that runs in it."""
    started_s: float = 0.0
    """When its backward pass began."""
    before_s: float = 0.0
    """Seconds from the end of the backward pass before to `started_s`."""
    trace: Trace = field(default_factory=Trace)
    meter: type[MeteredComm] = MeteredComm
    """Type that wraps the comm of each exchange and meters its messages."""
    unit_observers: list[UnitObserver] = field(default_factory=list)
    """Called with every unit of this step."""
    told: tuple[float, ...] = ()
    """Numbers of observers, in front of the facts in this rank's row."""
    come: Intake = field(default_factory=Intake)
    """Its gradients that have come."""
    flight: Flight = field(default_factory=Flight)
    """Exchanges and more that are in flight."""
    sent: SentBytes = field(default_factory=SentBytes)
    """The bytes that it has sent."""
    scaled: Sequence[Scaled] = ()
    """The way of the loss scale through each flat buffer."""
    idle: list[tuple[FlatBuffer, Callable[[], Sequence[Slot]]]] = field(default_factory=list)
    """Functions that return the slots without a gradient, and may wait for a device."""
    coded: Mapping[int, CodedBuffer] = field(default_factory=dict)
    """Flat buffers whose gradients are encoded as they come, by number."""
    votes_last: bool = False
    """True if the vote waits until all means are decoded, even if no rank can fail alone any more."""
    outcome: Outcome = Outcome.RUNNING
    is_over: bool = False
    """True if nothing is left to do on the way to the outcome."""
    error: BaseException | None = None
    """The first error on this rank; once the step has failed, the one that `backward()` raises."""
    computing_by_rank_s: tuple[float, ...] = ()
    """`computing_s` of all ranks; empty without a status vote."""
    compiled_before_s: float = field(default_factory=compiled_s)
    rank: int = 0
    """Number that names this rank in messages."""
    is_timed: bool = True
    """True if work and collectives are timed, and bytes metered."""
    is_serial: bool = False
    """Whether its communication waits for its computation, so that each is timed alone."""
    has_failed_unheard: bool = False
    """True if this rank failed after its vote, in a step that other ranks may have committed."""
    measured_s: Callable[[], float] | None = None
    """Reads `lasted_s` as a device measured it, if the host goes on before the step has ended there."""
    _comparisons: list[tuple[slice, Compare]] = field(default_factory=list)
    """Pairs of a comparison and the slice of a row that it reads."""
    marks: Marks | None = None
    """Findings that stay on a device; `None` where the host reads them."""
    mark: Tensor | None = None
    """The last of these, of the whole step: int32 (1,)."""
    _doubts: list[bool | Tensor] = field(default_factory=list)

    @classmethod
    def begun(
        cls,
        number: int,
        recipe: str,
        watch: BackwardWatch,
        at_s: float,
        *,
        rank: int = 0,
        is_timed: bool = True,
    ) -> Step:
        """Begin a step.

        Args:
            number: of committed steps before it.
            recipe: the text of the composition that runs.
            watch: times the backward pass.
            at_s: since when its first gradients are there.
            rank: the number that names this rank in messages.
            is_timed: work and collectives are timed.
        """
        step = cls(number, recipe, rank=rank, is_timed=is_timed)
        if profiler._is_profiler_enabled:
            from gradwire.measure.ranges import RangedTrace  # loaded by those who profile

            step.trace = RangedTrace(recipe=recipe.partition("(")[0])
        elif not is_timed:
            step.trace, step.meter = Untimed(), CountedComm
        step.started_s = min(watch.take_begun_s(), at_s)
        step.before_s = watch.before_s(step.started_s)
        return step

    def tell(self, numbers: tuple[float, ...], compare: Compare) -> None:
        """Put `numbers` into this rank's row, and let `compare` read what all ranks have put there.

        Call it before the first gradient is taken in, with as many numbers on all ranks.
        """
        begin = len(self.told)
        self.told += numbers
        self._comparisons.append((slice(begin, len(self.told)), compare))

    def compare(self, votes: Votes) -> GradwireError | None:
        """Run the comparisons that `tell` registered; returns the first error, with which the step fails on
        all ranks.
        """
        for place, compare in self._comparisons:
            if (error := compare([row.facts[place] for row in votes.rows])) is not None:
                return error
        return None

    def times(self, specs: Sequence[ParameterSpec], watch: BackwardWatch) -> Times:
        """The times that this rank has measured, with parameters in the order of `specs`.

        A parameter that was not watched was ready with its bucket, or, in no bucket, at the end.
        """
        bucket_ready_s = {
            entry.spec.name: each.at_s - self.started_s
            for each in self.come.in_turn
            for entry in each.entries
        }
        backward_s = self.come.last_s - self.started_s
        known = {**bucket_ready_s, **watch.ready_s()}
        ready = tuple(min(known.get(spec.name, backward_s), backward_s) for spec in specs)
        durations_s = tuple(round_.seconds for round_ in self.trace.rounds)
        return Times(backward_s, durations_s, self.before_s, ready, watch.busy(), watch.spent_since_s())

    def lasted_s(self) -> float:
        """Seconds from the start of its backward pass until its end, or until now."""
        return now_s() - self.started_s if self.measured_s is None else self.measured_s()

    @property
    def computing_s(self) -> float:
        """Seconds from the end of the step before to the last gradient: all that this rank did by itself."""
        return self.before_s + self.come.last_s - self.started_s

    def exposed(self, took_s: float) -> float:
        """The share of the time since the step before in which this rank had nothing left to compute.

        `took_s` is how long it `lasted_s`. On the rank that computes longest, that is what communication adds
        to the step; others wait for that rank, too.
        """
        return 1.0 - self.computing_s / max(self.before_s + took_s, 1e-12)

    def land(self, route: Route, mean: Tensor, factor: float) -> None:
        """Write the mean of a unit to the buckets.

        Args:
            route: of the unit.
            mean: (unit.numel,), changed in place.
            factor: the loss scale, if compensation divided it out.
        """
        if factor != 1.0:
            mean *= factor
        done = 0
        for place in self.come.places(route):
            place.copy_(mean[done : done + place.numel()])
            if torch.finfo(place.dtype).max < torch.finfo(mean.dtype).max:
                # What has gathered over several steps may be too large for a single gradient's type.
                self.check_finite(place)
            done += place.numel()

    def fail(self, error: BaseException, where: str) -> None:
        """Keep the first error, with step, rank and place as a note."""
        if self.error is None and not self.is_over:
            error.add_note(f"gradwire: step {self.number}, rank {self.rank}, {where}")
            self.error = error

    def note_finite(self, finite: bool | Tensor) -> None:
        """Note whether values are finite: a bool, or a tensor of no dimension that is not read yet."""
        if finite is not True:
            self._doubts.append(finite)

    def note(
        self, share: BufferShare, seen: Findings, fetch: Callable[[Tensor], Callable[[], Tensor]]
    ) -> None:
        """Note the findings of a compensation. Idle slots send nothing, and keep their memory.

        DDP discards the mean of unused parameters, and join() sends zeros from finished ranks: no memory may
        be spent on them.

        Args:
            share: the compensated gradients.
            seen: the findings.
            fetch: copies a tensor to the host without waiting, and returns a function that waits for it.
        """
        flat_buffer, slots = share.flat_buffer, share.slots
        numbers, finite = seen.read()
        self.note_finite(finite)
        found = [slots[number] for number in numbers]
        for slot in found:
            flat_buffer.x[slot.start : slot.stop].zero_()
        self.idle.append((flat_buffer, lambda: found))

    def note_valid(self, sound: Tensor, complaint: str) -> None:
        """The `see` of exchanges: raises at once on the CPU; notes a device's finding for the status vote."""
        if sound.is_cpu:
            refuse(sound, complaint)
        else:
            self.note_finite(sound)

    def check_finite(self, values: Tensor) -> None:
        """Note whether `values` are finite."""
        self.note_finite(is_finite(values))

    def is_finite(self) -> bool:
        """True if all noted values are finite; waits for a device if necessary."""
        return all(self._doubts)

    def sound(self) -> bool:
        """Whether this rank's row calls its gradients finite; waits for a device if necessary."""
        return self.is_finite()

    def told_later(self) -> Tensor | None:
        """The mark that travels with the vote if the row cannot tell whether gradients are finite."""
        return None

    def counts(self, votes: Votes) -> bool:
        """Whether all gradients and means are finite; the same on all ranks. May wait for a device.

        Args:
            votes: all ranks' rows.
        """
        return votes.finite and self.is_finite() and all(small.is_finite() for small in self.flight.small)

    def is_stale(self) -> bool:
        """Whether the model's buffers have changed on this rank since they were packed."""
        return any(each.is_stale(deferred=False) for each in self.flight.carried)

    @property
    def committed(self) -> bool:
        """True if the step counts."""
        return self.outcome is Outcome.COMMITTED

    def receive_small(self) -> None:
        """Block until all small means are here. Damaged ones fail the step on all ranks."""
        for small in self.flight.small:
            try:
                small.wait()
            except DAMAGED as error:
                self.fail(error, "small gradients")

    def end(self, outcome: Outcome, error: BaseException | None = None) -> None:
        """Take the final outcome. After a failure the means are NaN: half of a step is no gradient."""
        self.outcome, self.error, self.is_over = outcome, error, True
        if error is not None:
            self.come.poison()
            if not hasattr(error, "__notes__"):
                error.add_note(f"gradwire: step {self.number}, rank {self.rank}, {self.recipe}")


class ShardedStep(Step):
    """A step of ranks that hold different shards, and so see different means: a rank's row tells of them."""

    def sound(self) -> bool:
        """Whether this rank's row calls its gradients and its small means finite."""
        self.receive_small()
        return all(small.is_finite() for small in self.flight.small) and self.is_finite()


class DeferredStep(Step):
    """A step that is committed when the next one begins: the host reads nothing that a device computes."""

    def note(
        self, share: BufferShare, seen: Findings, fetch: Callable[[Tensor], Callable[[], Tensor]]
    ) -> None:
        """As `Step.note`. The device that knows the idle slots is asked for them at the commit."""
        idle = seen.idle
        if not isinstance(idle, Tensor):
            super().note(share, seen, fetch)
            return
        flat_buffer, slots = share.flat_buffer, share.slots
        self.note_finite(seen.finite)
        zero_idle(flat_buffer.x, share.pieces, idle)
        flags = fetch(idle)
        self.idle.append(
            (flat_buffer, lambda: [slots[n] for n, is_idle in enumerate(flags().tolist()) if is_idle])
        )

    def check_finite(self, values: Tensor) -> None:
        """As `Step.check_finite`, by the mark of the step."""
        assert self.mark is not None, "the step has begun"
        kernels_for(values.device, values.dtype)[mark_not_finite](values, self.mark)

    def sound(self) -> bool:
        """True: `told_later` tells whether gradients are finite."""
        return True

    def told_later(self) -> Tensor:
        """The mark of the step, with all that was noted."""
        assert self.mark is not None, "the step has begun"
        if self._doubts:
            flags = [each for each in self._doubts if isinstance(each, Tensor)]
            if len(flags) < len(self._doubts):
                self.mark.fill_(1)
            else:
                self.mark.bitwise_or_(~torch.stack(flags).all())
            self._doubts.clear()
        return self.mark

    def receive_small(self) -> None:
        """As `Step.receive_small`. Small means land at once, as the host does not look at them first."""
        super().receive_small()
        mark = self.told_later()
        for small in self.flight.small:
            small.land(mark)

    def counts(self, votes: Votes) -> bool:
        return not self.told_later()

    def is_stale(self) -> bool:
        """As `Step.is_stale`, by the answer of the step before."""
        return any(each.is_stale(deferred=True) for each in self.flight.carried)

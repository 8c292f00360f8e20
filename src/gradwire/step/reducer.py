"""The reducer: the one state machine between a gradient bucket that is ready and a step that is finished.

A step of compression with error feedback (Seide et al. 2014; Stich et al. 2018). `Reducer._advance` has these
lines as code. Line 1 is for each gradient bucket, 5 and 6 are for the step. 2 to 4 are for each *unit*, a run
of elements that are exchanged together:

1. *compensate*: x = c · unsent + gradient, as soon as a gradient bucket is ready;
2. *compress*: payload = C(x), and x keeps the rest, as soon as all of the unit's gradients are there;
3. *aggregate*: the collectives of all ranks' payloads;
4. *decode*: the mean of what the ranks have sent, written into the bucket;
5. *status vote*: one row per rank in the last all-reduce. Finite? Failed? Which step and plan?
6. *finish*: unsent = x on all ranks, or on none, and the means go to the model.

The recipe determines c, C and the collectives. 2 and 3 are its exchange's `start`, and 4 is the function that
`start` returns. Gradients without a memory begin with 2. A *round* is one collective of a unit. (Rounds of
local steps, in `sources/outer.py`, are another matter.)

There are two threads, and a class for the side of each. `Backward` is the side of the *training thread*:
autograd's hooks hand it gradient buckets, and at the end of the backward pass it waits for the step.
`Reducer` is the side of the *worker*, and runs the six lines. `Placement.post` queues jobs from one to the
other.

An exception in 1, 2 or 4 must not change which collectives this rank issues, or its peers would hang. It pays
the rest of the agreed rounds with zeros, and the vote tells all ranks. A broken transport is different:
nothing can be issued any more, and this step and all later ones end with its error (`Reducer.broken`).
`SystemExit` is an exception like any other here: on the worker it would end nothing but the thread.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.autograd import Variable, profiler

from gradwire.agreement.calls import Calls
from gradwire.comm import Comm, Pending, owe_zeros
from gradwire.errors import DAMAGED, GradwireError, RanksDisagree, TransportError
from gradwire.measure.clock import clock_of, now_s
from gradwire.measure.link import votes_alone
from gradwire.measure.metered import MeteredComm
from gradwire.memory import Gradients
from gradwire.placement import HostDevice, Placement
from gradwire.recipes import Recipe
from gradwire.step.environment import Controller, ReducerEnvironment
from gradwire.step.event_log import EventLog
from gradwire.step.flat_buffers import UNSCALED, FlatBuffer
from gradwire.step.gradient_bucket import BufferShare, DirectShare, GradientBucket
from gradwire.step.history import History
from gradwire.step.installed import InstalledRecipe, RecipeSnapshot
from gradwire.step.intake import Intake
from gradwire.step.marks import Marks
from gradwire.step.moods import Mood, Outcome
from gradwire.step.optimizer_log import NONE_WRITTEN, OptimizerLog, Written
from gradwire.step.plan import ExchangePlan, UnitCaptures
from gradwire.step.status_vote import RankReport, SmallReduce, StatusVote, VoteApart, Votes, riding_bytes
from gradwire.step.step import DeferredStep, InFlight, ShardedStep, SideBroadcast, Step
from gradwire.step.worker import Job, Worker
from gradwire.unit.context import ExchangeContext, Fates
from gradwire.unit.parameters import ParameterSpec, Unit

T = TypeVar("T")

Started: TypeAlias = Callable[[Step, InFlight, Pending], None]
"""Called with an exchange that has started, and with its last collective, which is in flight."""


class GradientSource(Protocol):
    """The calls that a source gets for each step: see `gradwire.sources.source.Source`."""

    @property
    def is_exchanging(self) -> bool:
        """Training thread: whether a backward pass exchanges gradients now."""

    def step_ended(self, step: Step) -> None:
        """Worker: take the outcome of a step, while the backward pass still waits."""

    def release(self) -> None:
        """Worker: let autograd go on. The step has ended, and the next one may have begun."""

    def complete(self) -> None:
        """Training thread: write the results of a step to the model, once the backward pass is over."""

    def note_changes(self) -> None:
        """Training thread: bring the model up to date, before a call that reads it."""


class Stage(Protocol):
    """Takes gradient buckets on the worker: the reducer, or the sum inside a node that comes before it."""

    def begin_step(self, at_s: float) -> None:
        """Worker: begin a step whose first gradients are there since `at_s`."""

    def bucket_ready(self, bucket: GradientBucket, /) -> None:
        """Worker: take in a gradient bucket of the running step."""

    def all_ready(self) -> None:
        """Worker: go on after the last gradient bucket of the running step."""


_LEFT_OUT = "a backward pass after a step that was left out"
_BEFORE_THE_STEP = "another backward pass before the optimizer's step"
_AFTER_A_FAILURE = "a backward pass after a step that failed when its vote was out"
_AFTER_NOTHING = "a backward pass after one that broke off before its first gradient"
_AFTER_A_PART = "a backward pass after one that broke off"

_BROKE_OFF = (
    "a backward pass broke off before all gradients were there: its step can get no vote, and other ranks "
    "may wait for it. Start all ranks again, from their last checkpoint"
)


class Backward:
    """The training thread's side: one backward pass at a time.

    A source calls `begin` when the first gradients of a pass are there, `submit` for each gradient bucket,
    and `close`, on autograd's thread. `close` queues a callback that waits for the step at the very end of
    the pass and raises its error there, so that errors keep their type. Outside a backward pass, where no
    callback can be queued, an error waits for the next `begin`. `deliver` and `note` run on the worker.

    This is the whole of it where gradients are on the CPU. `gradwire.step.on_device.DeviceBackward` adds what
    a device needs: copies, waits and the order of streams.
    """

    def __init__(
        self,
        source: GradientSource,
        worker: Worker,
        reducer: Reducer,
        calls: Calls | None = None,
        optimizer_log: OptimizerLog | None = None,
        stage: Stage | None = None,
    ) -> None:
        """Connect the two threads.

        Args:
            source: brings the gradients, and takes the means back.
            worker: the thread of `reducer`.
            reducer: the reducer. Its environment calls `deliver` when a step has ended, and `note` when it is
                known whether the step counts.
            calls: of other ranks. Without them a step that waits in vain waits until the group's timeout.
            optimizer_log: follows the optimizers. Without it every exchange is a step.
            stage: gets the gradient buckets in the place of `reducer`.
        """
        self.reducer, self.calls = reducer, calls or Calls(None)
        self.optimizer_log = optimizer_log or OptimizerLog({}, (), HostDevice())
        self.overlap = True
        self.history, self.event_log = History(), EventLog(reducer)
        self.listeners: list[weakref.ref[Callable[[], None]]] = []
        """Called at the end of each backward pass that raises nothing, on its thread. The model holds them:
        they are the user's, and the worker's thread, which refers to this object, ends with the model."""
        self._source, self._worker, self._stage = source, worker, stage or reducer
        self._waiting: list[Job] = []
        """Jobs for the worker that are still to be posted."""
        self._posts_at_end = False
        """Whether jobs of this pass are posted only when all gradients are there."""
        self._ended = threading.Event()
        """Set while no step runs."""
        self._ended.set()
        self.mood = Mood.IDLE
        """Written by the training thread alone."""
        self._error: BaseException | None = None
        """Error of the last step, until it is raised."""
        self._unheard = ""
        """Name of a call that the next `begin` makes, so that the other ranks hear of it: this rank rolled an
        exchange back, or goes on to another before the optimizer's step, or failed when its vote was out."""
        self._broke_off = ""
        """Likewise a pass that broke off before its first gradient."""
        self._placement = self.placement
        """The placement with which the last step began."""

    @property
    def placement(self) -> Placement:
        """Placement of the running step, or else of the next one. On any thread."""
        return self.reducer.placement

    # -- a backward pass, in the order of its events

    def before_forward(self) -> None:
        """Training thread: after an interrupt that the user caught, complete the pass before."""
        if self.mood is Mood.GIVEN:
            self._complete()

    def entered(self, written: Written = NONE_WRITTEN) -> None:
        """Training thread: note that a backward pass has begun. Only parameters in `written` have their
        gradient.

        May be called again in the same pass, and has no effect while its step runs.
        """
        if self.mood in (Mood.IDLE, Mood.GIVEN):
            self.optimizer_log.backward_begins(exchanges=self._source.is_exchanging, written=written)

    def begin(self) -> None:
        """Training thread: begin a step, whose first gradients are there.

        Raises the error of the step before, if nothing has raised it yet, and `GradwireError` if that step
        cannot end, since not all of its gradients came.
        """
        self._raise_pending()
        if self.mood is Mood.BROKEN_OFF or not self._ended.is_set():
            self._refuse_what_broke_off()
        self.calls.require_order()
        self._catch_up()
        self.calls.steps += 1
        self._ended.clear()
        self.mood = Mood.BEGUN
        self._placement = self.placement
        # In a serial step communication would slow the computation that shares its cores.
        self._posts_at_end = self.reducer.is_serial or not self.overlap
        self._line_up(partial(self._stage.begin_step, now_s()))

    def _catch_up(self) -> None:
        """Training thread: roll the exchange before back if no optimizer has used it, tell the other ranks,
        and install the recipe that follows.
        """
        fates = self.roll_back_unused()
        # Over a broken transport this step fails like all that follow, and the others may be gone.
        if (self._broke_off or self._unheard) and self.reducer.broken is None:
            unheard = ", ".join(filter(None, (self._broke_off, self._unheard)))
            # Schedules and random numbers go by steps: ranks that count differently must not exchange.
            self._broke_off = self._unheard = ""
            self.calls.begin(unheard, self.reducer.step)
        if not self.reducer.is_caught_up:
            self.call(self.reducer.catch_up)
            if self.reducer.running != self.event_log.running:
                self.event_log.changed()
        self.optimizer_log.exchange_begins(fates, compresses=not self.reducer.layout.is_plain)

    def submit(self, bucket: GradientBucket) -> None:
        """Training thread: hand a gradient bucket to the worker, who owns it until the step has ended."""
        self._line_up(partial(self._stage.bucket_ready, bucket))
        if not self._posts_at_end:
            self._post_waiting()

    def _line_up(self, job: Job) -> None:
        """Training thread: keep a job for the worker until it is posted, after those that wait already."""
        self._waiting.append(job)

    def _post_waiting(self) -> None:
        """Training thread: post all jobs that wait."""
        jobs, self._waiting = self._waiting, []
        for job in jobs:
            self._placement.post(job)

    def close(self) -> None:
        """Training thread: end the intake of gradients; the pass will wait for its step at its end."""
        self.all_brought()
        # Not before everything is there: a reentrant checkpoint nests backward passes, and at the end of an
        # inner one there may be gradients that only the outer one will deliver.
        try:
            Variable._execution_engine.queue_callback(self._wait)
        except RuntimeError:  # "can only be installed during backward pass": see the class
            self._outside_backward()

    def _outside_backward(self) -> None:
        """Training thread: go on. Nothing waits for the step here: its error waits for the next `begin`."""

    def all_brought(self) -> None:
        """Training thread: end the intake. Outside a backward pass, `wait_for_outcome` comes next."""
        self._line_up(self._stage.all_ready)
        self._post_waiting()
        self.mood = Mood.GIVEN

    def _wait(self) -> None:
        """Training thread: wait for the step, at the end of the backward pass."""
        self._wait_and_complete()
        # After the wrapper's own callbacks. An error would keep them from running, and its next pass needs
        # them; once they have run, `p.grad` holds the mean.
        last = self._tell if self._error is None else self._raise_pending
        Variable._execution_engine.queue_callback(last)

    def wait_for_outcome(self) -> None:
        """Training thread: wait outside a backward pass until the step's outcome is known. Raises its
        error."""
        self._wait_and_complete()
        self._raise_pending()
        self.commit_deferred()
        self._tell()

    def _wait_and_complete(self) -> None:
        """Training thread: wait for the step, time that, and complete the pass."""
        start_s = now_s()
        if profiler._is_profiler_enabled:
            with profiler.record_function("gradwire/wait"):
                self._await_end()
        else:
            self._await_end()
        self.history.waited(start_s, now_s())
        self.reducer.watch.end()
        self._complete()

    def _await_end(self) -> None:
        """Training thread: block until the step has ended."""
        self._worker.wait(self._ended, self.calls.look)
        self.calls.ended()

    def _complete(self) -> None:
        """Training thread: once the last step has ended, let the source write its results to the model."""
        if not self._ended.is_set():
            self._await_end()
        self._source.complete()
        self.mood = Mood.IDLE

    def _raise_pending(self) -> None:
        """Training thread: raise the error of the last step, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _tell(self) -> None:
        """Training thread: tell those that want to know that means are in `p.grad`."""
        self.optimizer_log.exchange_ended()
        for each in self.listeners:
            if (listener := each()) is not None:
                listener()

    def deliver(self, step: Step) -> None:
        """Worker: hand a step that has ended to the training thread, whatever its outcome."""
        self._error = step.error
        if step.has_failed_unheard:
            self._unheard = _AFTER_A_FAILURE
        try:
            self._step_ended(step)
        except BaseException as error:  # of the device, for instance: this rank cannot go on
            self._error = self._error or error
            raise
        finally:
            self._release()

    def _step_ended(self, step: Step) -> None:
        """Worker: tell of a step that has its outcome, while the backward pass still waits."""
        self._source.step_ended(step)
        self.history.add(step)

    def _release(self) -> None:
        """Worker: let the backward pass go on; the next step may begin at once."""
        self._ended.set()
        self._source.release()

    def note(self, step: Step) -> None:
        """Worker: log that a step counts or not, and the news that came with it."""
        self.history.outcome_known(step)
        if not step.committed:
            self.event_log.skipped(step.number, self.history.skipped)
        if len(self.reducer.health.complaints) != self.reducer.health.told:
            self.event_log.unhealthy()
        if self.reducer.running != self.event_log.running:
            self.event_log.changed()

    # -- a pass that breaks off

    def broke_off(self) -> None:
        """Training thread: note that a pass has ended before its first gradient. Nothing of its step was
        sent.

        If that happened on all ranks, they go on. If not, the next pass of this rank must not complete the
        others' step.
        """
        self._broke_off = _AFTER_NOTHING

    def _refuse_what_broke_off(self) -> NoReturn:
        """Training thread: raise for a pass that broke off between its first gradient and its last. Tell the
        ranks that wait in its step that this one left it.

        Likewise for a pass while the step before still runs: it adds to gradients that are being exchanged.
        """
        if self.mood is not Mood.BROKEN_OFF:
            self.mood = Mood.BROKEN_OFF
            self.calls.steps -= 1
            self.calls.give_up_step(_AFTER_A_PART)
        raise GradwireError(_BROKE_OFF)

    # -- between steps

    @property
    def is_sound(self) -> bool:
        """True if every step has ended, and the collectives of all ranks are paired. On any thread."""
        return self.mood in (Mood.IDLE, Mood.GIVEN) and self._ended.is_set() and self.reducer.broken is None

    def let_go(self) -> None:
        """End the worker; a round that was sent, or a step whose wait was interrupted, ends before, as other
        ranks wait for this one in it. On any thread, when the model has gone.
        """
        if self.mood is Mood.GIVEN and not self._ended.is_set():
            self._worker.stop_after(self._ended)
        else:
            self._worker.stop()

    def roll_back_unused(self) -> Fates | None:
        """Training thread: undo exchanges whose gradients no optimizer has used.

        Other ranks hear of that when the next exchange or call begins. Returns the fates by which memory was
        rolled back, and `None` if all is final.
        """
        fates = self.optimizer_log.fates()
        if fates is None:
            return None
        self.commit_deferred()
        was_counted = self.reducer.is_counted
        is_dropped = self.call(partial(self.reducer.roll_back, fates))
        self.optimizer_log.rolled_back(fates, is_dropped=is_dropped)
        if is_dropped:
            self._unheard = _LEFT_OUT
            if self.reducer.broken is None:  # or `backward()` has raised, and the user knows why
                self.event_log.dropped(
                    self.reducer.step, self.optimizer_log.dropped, self.optimizer_log.in_a_row
                )
        elif was_counted and not fates.made:
            self._unheard = _BEFORE_THE_STEP
        return fates

    def commit_deferred(self) -> None:
        """Training thread: let the worker commit the last step, if that is still to be done."""
        if not self.reducer.is_caught_up:
            self.call(self.reducer.commit_deferred)

    def up_to_date(self) -> None:
        """Training thread: count the steps that optimizers have made so far, on this rank alone."""
        self._source.note_changes()
        self.commit_deferred()
        self.optimizer_log.note_cleared()
        if self.roll_back_unused() is None:
            self.call(lambda: self.reducer.roll_back(Fates()))

    def settle(self) -> None:
        """Training thread: wait until no step is running, before anything else is asked of other ranks.

        If the user caught an interrupt inside `backward()`, that step is still running; it ends on all ranks.
        Raises `GradwireError` where it cannot end, since not all of its gradients came.
        """
        if self.mood in (Mood.BEGUN, Mood.BROKEN_OFF):
            self._refuse_what_broke_off()
        if self.mood is Mood.GIVEN:
            self._complete()
        self.up_to_date()

    def together(self, what: str, function: Callable[[], T]) -> T:
        """Training thread: run `function` as `call` does, once all ranks are in the same call.

        Args:
            what: the name of the call, the same on all ranks.
            function: runs on the worker.

        Raises the errors of `settle` and of `Calls.begin`, and `GradwireError` inside a backward pass.
        """
        self.calls.require_between_steps(what)
        self.settle()
        self._broke_off = self._unheard = ""  # `calls.begin` compares steps, too
        self.calls.begin(what, self.reducer.step)
        return self.call(function)

    def call(self, function: Callable[[], T]) -> T:
        """Training thread: run `function` between steps, on the worker.

        Returns its result, or raises its error.
        """
        return self._worker.call(function)


_MOMENTUM_TWICE = (
    "several backward passes are exchanged before one optimizer step, and the recipe applies momentum: the "
    "first pass would enter the momentum twice. Wrap all passes but the last in wire.no_sync()"
)


class Reducer(InstalledRecipe):
    """The worker's side: one step after the other.

    All of it runs on one thread at a time, so that every rank issues the same collectives in the same order:
    on the worker, or on the training thread where collectives are work in a stream. `begin_step`,
    `bucket_ready` and `all_ready` do not raise the errors of a step: `ReducerEnvironment.finished` gets the
    step with its outcome.
    """

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        recipe: Recipe,
        env: ReducerEnvironment,
        before: Controller | None = None,
    ) -> None:
        self.broken: TransportError | None = None
        """The error of a broken transport, which ends this step and all later ones."""
        self._now: Step | None = None
        """The running step."""
        self._deferred: Callable[[], None] | None = None
        """Commits or forgets the last step, if it is deferred."""
        super().__init__(specs, recipe, env, before)

    def restore(self, saved: RecipeSnapshot) -> None:
        """Install a recipe, and work out everything that its steps have in common.

        Gradients on the CPU, over gloo and without shards, have the plain variant of all that is chosen here:
        `Step`, `_decide_now`, `_when_announced` and `_vote_with_gradients`.
        """
        super().restore(saved)
        flat_buffers = self.layout.flat_buffers
        is_deferred = self.placement.commits_late and not self.measuring
        self._step_type = DeferredStep if is_deferred else ShardedStep if self._is_sharded else Step
        self._decide = self._defer if is_deferred else self._decide_now
        """Ends a step after its vote, unless it has failed."""
        started = self._when_announced if self.comm.announces else self._in_order
        self._started: Started = partial(self._at_once_if_serial, started) if self.measuring else started
        """Goes on with an exchange once it has started."""
        self._vote_of = self._vote_with_gradients if self._control is self.comm else self._vote_apart
        """Makes the status vote of a step."""
        self._post_later = self.placement.post_later or self.placement.post
        holds_shards = self._is_sharded or self.shard is not None  # one rank may hold all of a replica
        self._poisons = holds_shards or not self.layout.is_plain
        """Whether means become NaN in a step that does not count. The sum of a plain step spreads NaN by
        itself, as DDP's does; but in one shard only."""
        tells_means = self._step_type is ShardedStep
        self._riding_bytes = -1.0 if tells_means else riding_bytes(self.comm.world, self.layout.tuning)
        """The most bytes of small gradients that go out with the status vote."""
        self._marks = Marks(flat_buffers, self.placement.memory.where) if is_deferred else None
        """Findings of a device that the host reads when the next step begins."""
        coded = [
            (flat_buffer.number, self.layout.coded(flat_buffer, self.comm.world, self._granularity))
            for flat_buffer in (flat_buffers if is_deferred else ())
        ]
        self._coded = {number: each for number, each in coded if each is not None}
        """Flat buffers whose gradients are encoded as they come, by number."""
        common = ExchangeContext(
            step=0,
            unit=0,
            rank=self.comm.rank,
            world=self.comm.world,
            seed=self.env.seed,
            granularity=self._granularity,
        )
        captures_for, graphs = self.env.captures_for, self.placement.memory.graphs()
        self._captures = None if captures_for is None or graphs is None else captures_for(graphs)
        """Captures stretches of kernels, in graphs that go with the recipe."""
        self._plans = [self._plans_of(flat_buffer, common) for flat_buffer in flat_buffers]
        """Plans of units, by flat buffer and unit."""
        self._direct_context = replace(common, flat_buffer=-1)
        """The context that exchanges have in common that bypass the flat buffers."""
        self._unscaled = [UNSCALED] * len(flat_buffers)
        self._begins = tuple(self._features())
        """Features that a step calls when it begins."""
        self._after_buckets = [self._send_early] if self.layout.early else []
        """Features that a step calls with the names in each bucket that it has taken."""
        self._after_means = [Intake.copy_back_early] if self.placement.copies else []
        """Features that take the route of each mean that lies in the buckets of an intake."""
        self._small_bytes = 0 if self.layout.is_plain else self.layout.tuning.small_bytes
        """Direct gradients of fewer bytes wait for the vote; none, if no parameter has a memory."""

    @property
    def graph_bytes(self) -> int:
        """Bytes of the device's memory that captured graphs keep, with the means that they write to."""
        rooms = sum(plan.room_bytes for plans in self._plans for plan in plans)
        return 0 if self._captures is None else self._captures.memory_bytes() + rooms

    def _plans_of(self, flat_buffer: FlatBuffer, common: ExchangeContext) -> list[ExchangePlan]:
        """The plans of a flat buffer's units. `common` is the context that all exchanges have in common."""
        plans = []
        for unit, constants in zip(flat_buffer.units, flat_buffer.constants, strict=True):
            ctx = replace(
                common,
                unit=unit.index,
                flat_buffer=unit.flat_buffer,
                parts=unit.parts,
                narrow=flat_buffer.narrow,
                kept=flat_buffer.kept,
                replicas=self.env.replicas,
                kernels=flat_buffer.kernels,
            ).with_constants(constants)
            given = flat_buffer.exchange, unit.numel, flat_buffer.dtype
            plans.append(ExchangePlan(str(unit), *given, ctx, self.comm.verifies, self._captures))
        return plans

    def _features(self) -> Iterator[Callable[[Step], None]]:
        """Yield the features of the installed recipe, each of which a step calls when it begins."""
        if self.measuring:  # first, or what others send would begin by another clock than it ends by
            yield self._begin_serially
        if self._is_sharded:
            yield self._vote_last
        elif not self.layout.is_dense:
            yield self._time_the_vote
        if any(flat_buffer.memory.covers_momentum for flat_buffer in self.layout.flat_buffers):
            yield self._refuse_momentum_twice
        if (loss_scale := self.env.loss_scale) is not None:
            yield partial(self._ask_loss_scale, loss_scale)
        if self._controller.looks_on:
            yield lambda step: self._controller.before(step, self.env)
        if (buffers := self.env.buffers) is not None:
            # Over more ranks than gradients take, what passes says nothing of their link.
            everyone = self.placement.everyone or self._control if self._is_sharded else None
            yield partial(self._send_buffers, buffers, everyone)
        if self._marks is not None:
            yield partial(self._begin_marks, self._marks)
        if self._captures is not None:  # last, as it asks what the others have asked for
            yield partial(self._allow_captures, self._captures)

    # -- what comes from the training thread: the beginning of a step, its gradient buckets, the end of them

    def begin_step(self, at_s: float) -> None:
        """Worker: begin a step whose first gradients are there since `at_s`."""
        if not self.is_caught_up:
            self.catch_up()
        self._is_counted = False
        for flat_buffer in self.layout.flat_buffers:
            flat_buffer.begin()
        step = self._now = self._step_type.begun(
            self.step,
            self.layout.main.text,
            self.watch,
            at_s,
            rank=self.rank,
            is_timed=self.times(self.step),
        )
        step.scaled = self._unscaled
        for observer in self.env.observers:
            observer.before(step, self.env)
        for feature in self._begins:
            feature(step)

    def _allow_captures(self, captures: UnitCaptures, step: Step) -> None:
        """Worker: let the step use graphs, unless somebody looks at it: then it runs as others could follow
        it."""
        looks = step.is_timed or self.is_serial or step.unit_observers or self.env.observers
        captures.are_allowed = not (looks or profiler._is_profiler_enabled)

    def _refuse_momentum_twice(self, step: Step) -> None:
        """Worker: fail the step if a momentum already has gradients in it that no optimizer has used yet."""
        if any(
            flat_buffer.open_names
            for flat_buffer in self.layout.flat_buffers
            if flat_buffer.memory.covers_momentum
        ):
            step.fail(GradwireError(_MOMENTUM_TWICE), "begin")

    def _ask_loss_scale(self, loss_scale: Callable[[], float], step: Step) -> None:
        """Worker: get the loss scale that the gradients carry. If it cannot be read, the step fails."""
        try:
            carried = loss_scale()
        except BaseException as error:  # the scaler may be gone, with the model
            step.fail(error, "read the loss scale")
            return
        step.scaled = [flat_buffer.scaled(carried) for flat_buffer in self.layout.flat_buffers]

    def _begin_serially(self, step: Step) -> None:
        """Worker: begin a serial step, if it is one: each of its collectives is timed alone, by a clock that
        waits for the device."""
        if self.is_serial:
            step.is_serial = step.votes_last = True
            step.trace.exact = clock_of(self.placement.memory)

    def _vote_last(self, step: Step) -> None:
        """Worker: let the vote wait for all means. Ranks that share a replica wait for each other after the
        vote, so none may run out of memory while it still decodes.
        """
        step.votes_last = True

    def _time_the_vote(self, step: Step) -> None:
        """Worker: let the vote go alone now and then: its time is all that tells the latency of the link."""
        step.votes_last |= step.is_timed and votes_alone(step.number)

    def _send_buffers(
        self, buffers: Callable[[], SideBroadcast | None], everyone: Comm | None, step: Step
    ) -> None:
        """Worker: broadcast the model's buffers, if the step has any, over `everyone`, or as gradients go."""
        carried = buffers()
        if carried is not None:
            step.flight.carried.append(carried)
            beside = step.meter(self.comm, step.trace, "buffers") if everyone is None else everyone
            self.unless_broken(carried.send, beside)
            if carried.failure is not None:
                step.fail(carried.failure, "pack of buffers")

    def _begin_marks(self, marks: Marks, step: Step) -> None:
        """Worker: clear marks; encode gradients as they come, unless observers want units."""
        step.marks, step.mark = marks, marks.begin()
        for coded in self._coded.values():
            coded.close()
        # Where the host reads which of them are zero, to leave these out, it does so before they are encoded.
        step.coded = {} if step.unit_observers else self._coded

    def bucket_ready(self, bucket: GradientBucket) -> None:
        """Worker: take in a gradient bucket of the running step.

        Buckets have their turn by index, and one that comes too early waits: so all ranks issue the same
        collectives in the same order, whatever the order of arrival on each of them.
        """
        step = self._now
        assert step is not None, "begin the step first"
        if bucket.failure is not None:
            step.fail(bucket.failure, f"intake of bucket {bucket.index}")
        step.come.add(bucket)
        self._advance(step)

    def all_ready(self) -> None:
        """Worker: go on after the last gradient bucket of the running step."""
        step = self._now
        assert step is not None, "begin the step first"
        step.come.all_ready = True
        for coded in step.coded.values():
            coded.close()
        while step.flight.unannounced:
            self.placement.post(step.flight.unannounced.popleft())
        if step.come.left_bytes > self._riding_bytes:
            self._send_small(step, step.come.small_regions.keys())
        self._advance(step)

    # -- the algorithm, and its six lines in order

    def _advance(self, step: Step) -> None:
        """Worker: the algorithm. Does everything that is possible by now.

        Called after each event: a bucket, the last bucket, the end of a unit's last collective, and the end
        of the status vote.
        """
        come, flight = step.come, step.flight
        while come.turns and self.broken is None:
            bucket = come.turns.popleft()
            plan = self.layout.bucket_plan(bucket)
            for direct in plan.direct:  # nothing is remembered of them: x is the gradient
                self._compress_direct(step, bucket, direct)
            for share in plan.shares:
                self._compensate(step, bucket, share)  # 1. x = c · unsent + gradient
            for unit in come.completed(plan.units):
                self._compress_unit(step, unit)  # 2. payload = C(x), x keeps the rest; 3. aggregate payloads
            for feature in self._after_buckets:
                feature(step, plan.names)
        while flight.received:
            self.unless_broken(self._decode, step, flight.received.popleft())  # 4. mean of the payloads
        if step.is_over or not come.all_ready:
            return
        try:
            if self.broken is not None:
                raise self.broken
            left = flight.outstanding if step.votes_last else flight.fallible
            if left == 0 and step.outcome is Outcome.RUNNING:
                self._vote(step)  # 5. does the step count, on all ranks?
            if flight.outstanding == 0 and step.outcome is Outcome.VOTED:
                self._finish(step)  # 6. unsent = x; of a deferred step in `commit_deferred`
        except TransportError as error:
            self.broken = error
            self._finish_running(step, Outcome.FAILED, error)
        except DAMAGED as error:  # in the vote itself or beside it, on all ranks
            self._finish_running(step, Outcome.FAILED, error)

    def _compensate(self, step: Step, bucket: GradientBucket, share: BufferShare) -> None:
        """Worker, 1: add the gradients of a bucket to the unsent gradient of a flat buffer.

        On the CPU that is `FlatBuffer.compensate`. Where a step is deferred, the findings stay on the
        device, and gradients may be encoded in the same pass (`Step.coded`).
        """
        flat_buffer, seen = share.flat_buffer, None
        scale = 1.0 / step.scaled[flat_buffer.number].divided_out
        grads = Gradients(bucket.buffer, share.pieces, scale, flat_buffer.kernels)
        try:
            with step.trace.compressing("encode", share.label):
                if step.marks is not None and flat_buffer.number in step.coded:
                    coded = step.coded[flat_buffer.number]
                    coded.compensate(grads, share.numbers, step.number, step.marks.values)
                elif step.marks is not None and flat_buffer.adds:
                    flat_buffer.compensate_marked(grads, share.numbers, step.number, step.marks.values)
                else:
                    seen = flat_buffer.compensate(grads, step.number, self.comm.world)
        except BaseException as error:
            step.fail(error, f"compensation of {share.label}")
        if seen is not None:
            step.note(share, seen, self.placement.fetch)

    def _compress_unit(self, step: Step, unit: Unit) -> None:
        """Worker, 2 and 3: start the exchange of a compensated unit, or let it rest.

        Here the way of its mean is chosen, too. Where the unit is one stretch of a bucket, of the same type
        and loss scale, line 4 decodes straight into that (`Intake.place_of`). Elsewhere a tensor of its own
        takes the mean, and `Step.land` copies it to the buckets. Where a device has encoded the unit as it
        came (`ExchangeContext.coded`), a kernel decodes into the buckets. Where buckets are copies on the
        host, the mean is then copied back to the model, while other units are still on the wire
        (`Intake.copy_back_early`, one of `_after_means`).
        """
        flat_buffer = self.layout.flat_buffers[unit.flat_buffer]
        plan = self._plans[unit.flat_buffer][unit.index]
        come = step.come
        (x, unsent), route = flat_buffer.of(unit), self.layout.route(unit, come.in_turn.taken)
        scale, factor = step.scaled[unit.flat_buffer]
        coded = step.coded.get(unit.flat_buffer)
        ctx = plan.ctx.at(
            step.number,
            scale=scale,
            unsent=unsent,
            see=step.note_valid,
            mark=step.mark,
            coded=None if coded is None else coded.unit(unit, come.places(route), factor),
        )
        if step.unit_observers:
            self._show(step, flat_buffer, unit, x, ctx)
        agreed = plan.collectives(ctx)
        if not agreed.rounds:
            for each in come.places(route):  # it rests: all of its gradient stays unsent
                each.zero_()
            for feature in self._after_means:
                feature(come, route)
            return
        place = come.place_of(route, x, factor)
        lands_itself = place is not None or ctx.coded is not None
        exchange = InFlight(
            plan,
            agreed,
            x,
            mean=place,
            ctx=ctx,
            comm=step.meter(self.comm, step.trace, plan.label),
            checks_mean=plan.may_overflow,
            land=None if lands_itself else partial(step.land, route, factor=factor),
            route=route,
        )
        self.unless_broken(self._start, step, exchange)

    def _show(self, step: Step, flat_buffer: FlatBuffer, unit: Unit, x: Tensor, ctx: ExchangeContext) -> None:
        """Worker: show a unit to the observers of this step. An error of theirs fails the step.

        Args:
            step: the running one.
            flat_buffer: has the unit.
            unit: all of it is compensated.
            x: its error-fed gradient (unit.numel,), read only.
            ctx: of its exchange.
        """
        try:
            with step.trace.compressing("encode", f"look at {unit}"):
                for observe in step.unit_observers:
                    observe(flat_buffer, unit, x, ctx)
        except BaseException as error:
            step.fail(error, f"look at {unit}")

    def _compress_direct(self, step: Step, bucket: GradientBucket, share: DirectShare) -> None:
        """Worker, 2 and 3: start the exchange of a direct `share` of `bucket` in place; a small one waits for
        the vote.

        It belongs to no flat buffer: the flat buffer of its context is -1.
        """
        region, come = bucket.buffer[share.region], step.come
        if region.nbytes < self._small_bytes and region.dtype != torch.float64:
            come.small_regions.update(zip(share.names, region.split_with_sizes(share.sizes), strict=True))
            return
        unit = len(come.direct)
        plan = share.plan(region, unit, self._direct_context, checked=self.comm.verifies)
        ctx = plan.ctx.at(step.number)
        come.direct.append(region.numel())
        exchange = InFlight(
            plan,
            plan.collectives(ctx),
            region,
            mean=region,
            ctx=ctx,
            comm=step.meter(self.comm, step.trace, plan.label),
            checks_mean=True,
            route=((bucket.index, share.region.start, region.numel()),),
        )
        self.unless_broken(self._start, step, exchange)

    def unless_broken(self, do: Callable[..., None], *arguments: Any) -> None:
        """Worker: call `do`, which issues collectives or waits for one, unless the transport is broken.

        If it breaks now, that is noted in `broken`.
        """
        if self.broken is None:
            try:
                do(*arguments)
            except TransportError as error:
                self.broken = error

    def _start(self, step: Step, exchange: InFlight) -> None:
        """Worker, 2 and 3: compress and issue; the last collective stays in flight."""
        plan, comm, agreed = exchange.plan, exchange.comm, exchange.agreed
        step.flight.outstanding += 1
        step.flight.fallible += agreed.may_fail
        try:
            with step.trace.compressing("encode", plan.label):
                if exchange.mean is None:
                    exchange.mean = plan.room(exchange.x, agreed)
                exchange.decode = agreed.start(exchange.x, exchange.mean, comm, exchange.ctx)
        except TransportError:
            raise
        except BaseException as error:
            step.fail(error, f"encode of {plan.label}")
            owe_zeros(comm, agreed.rounds[len(comm.rounds) :], exchange.x.device)
        if exchange.decode is None or comm.last is None:
            self._decode(step, exchange)
        else:
            self._started(step, exchange, comm.last)

    def _when_announced(self, step: Step, exchange: InFlight, last: Pending) -> None:
        """Worker: decode `exchange` once the transport announces the end of its `last` collective."""
        last.then(partial(self.placement.post, partial(self._received, step, exchange)))

    def _in_order(self, step: Step, exchange: InFlight, _last: Pending) -> None:
        """Worker: decode `exchange` after the start of the next ones, as many as the granularity says.

        The transport announces no end: decoding makes a stream wait for the bytes.
        """
        unannounced = step.flight.unannounced
        unannounced.append(partial(self._received, step, exchange))
        while len(unannounced) >= self._granularity.under_way:
            self.placement.post(unannounced.popleft())

    def _at_once_if_serial(self, otherwise: Started, step: Step, exchange: InFlight, last: Pending) -> None:
        """Worker: end each exchange of a serial step before the next begins, so that the duration of its
        collective is the wire's own. In other steps, do as `otherwise`.
        """
        if step.is_serial:
            self._decode(step, exchange)
        else:
            otherwise(step, exchange, last)

    def _received(self, step: Step, exchange: InFlight) -> None:
        """Worker: go on after the last collective of an exchange, or after the wait for it in a stream."""
        step.flight.received.append(exchange)
        self._advance(step)

    def _decode(self, step: Step, exchange: InFlight) -> None:
        """Worker, 4: decode the mean, and count the bytes."""
        label = exchange.plan.label
        try:
            with step.trace.compressing("decode", label):
                if exchange.decode is not None and exchange.mean is not None:
                    exchange.decode()
                    if exchange.land is not None:
                        exchange.land(exchange.mean)
                    if exchange.checks_mean:
                        step.check_finite(exchange.mean)
                    for feature in self._after_means:
                        feature(step.come, exchange.route)
        except TransportError:
            raise
        except BaseException as error:
            step.fail(error, f"decode of {label}")
        step.flight.outstanding -= 1
        step.flight.fallible -= exchange.agreed.may_fail
        step.sent.add(exchange.agreed.wire_bytes, exchange.comm, is_timed=step.is_timed)

    def _send_early(self, step: Step, names: Set[str]) -> None:
        """Worker: send the early small gradients (`Layout.early`), once all of them are there.

        Args:
            step: the running one.
            names: the parameters of a bucket that has been taken.
        """
        step.come.names |= names
        if step.come.names >= self.layout.early:
            self._send_small(step, self.layout.early)

    def _send_small(self, step: Step, names: Set[str]) -> None:
        """Worker: send small gradients in an all-reduce of their own."""
        if regions := step.come.take_small(self.specs, names):
            comm, latency = step.meter(self.comm, step.trace, "small"), self.layout.tuning.latency
            small = SmallReduce(regions, comm, step.come.device, latency=latency)
            step.flight.small.append(small)
            self.unless_broken(small.send)

    def _vote(self, step: Step) -> None:
        """Worker, 5: send this rank's row, and the small gradients that are left."""
        facts = (*step.told, *self._controller.row(step, self.traffic.row))
        try:
            step.come.require_all_units(self.layout.flat_buffers)
        except GradwireError as error:
            step.fail(error, "end of the step")
        sound, failed, stale = step.sound(), step.error is not None, step.is_stale()
        row = RankReport(sound, failed, self.fingerprint, facts, stale, step.computing_s)
        step.flight.status_vote = vote = self._vote_of(step, row)
        step.flight.small.append(vote)
        step.outcome = Outcome.VOTING

        def voted() -> None:
            if not step.is_over:
                step.outcome = Outcome.VOTED
            self._advance(step)

        vote.send(partial(self._post_later, voted))

    def _vote_with_gradients(self, step: Step, row: RankReport) -> StatusVote:
        """Worker: make the vote where all ranks that agree on a step also exchange gradients."""
        regions = step.come.take_small(self.specs, step.come.small_regions.keys())
        comm = step.meter(self.comm, step.trace, "tail")
        return StatusVote(regions, row, comm, step.come.device, step.told_later())

    def _vote_apart(self, step: Step, row: RankReport) -> StatusVote:
        """Worker: make the vote where ranks agree over another comm."""
        regions = step.come.take_small(self.specs, step.come.small_regions.keys())
        comm = step.meter(self.comm, step.trace, "tail")
        control = MeteredComm(self._control, step.trace, "tail")
        return VoteApart(regions, row, comm, step.come.device, step.told_later(), control=control)

    def _finish(self, step: Step) -> None:
        """Worker, 6: read all ranks' rows, and commit the step on all ranks, or on none."""
        assert step.flight.status_vote is not None, "voted first"
        votes = step.flight.status_vote.votes()
        for each in step.flight.carried:
            each.wait()
        step.flight.stale = votes.stale
        if votes.stale:  # on any rank: then none uses the buffers
            step.flight.carried.clear()
        step.receive_small()
        step.computing_by_rank_s = tuple(row.computing_s for row in votes.rows)
        for small in step.flight.small:
            step.sent.add(small.wire_bytes, small.comm, is_timed=step.is_timed)
        error: BaseException | None = votes.error() or step.compare(votes)
        if step.error is not None and not isinstance(error, RanksDisagree):
            # The others have gone on: with one step more, unless they have found something not finite, too.
            step.has_failed_unheard = error is None and step.counts(votes)
            error = step.error  # a rank that disagrees may well fail, but that is not why
        if error is not None:
            self._finish_running(step, Outcome.FAILED, error)
        else:
            self._decide(step, votes)

    def _decide_now(self, step: Step, votes: Votes) -> None:
        """Worker: write the small means to the buckets, commit the step or forget it, and finish it."""
        finite = step.counts(votes)
        if finite:
            for small in step.flight.small:
                small.land()
        elif self._poisons:
            step.come.poison()
        outcome = self._commit(step, votes, finite)
        if self._following is not None and self.layout.is_plain:  # a memory has to be final first
            self.follow(self._following)
        self._finish_running(step, outcome)

    def _defer(self, step: Step, votes: Votes) -> None:
        """Worker: finish a deferred step for the model, before the host knows whether it counts.

        A device is asked for that and not waited for: `commit_deferred` reads its answer when the next step
        begins.
        """
        mark, marks = step.told_later(), step.marks
        assert mark is not None
        assert marks is not None
        if self.shard is not None:
            mark.copy_(self.shard.any(mark != 0))
        if self._poisons:
            step.come.poison_if(mark)
        step.measured_s = self.watch.mark_end()
        step.outcome, step.is_over, told = Outcome.DEFERRED, True, self.placement.fetch(marks.values)
        self._now = None
        self._deferred = lambda: self._end_deferred(step, votes, marks, told)
        self.env.finished(step)

    def _end_deferred(self, step: Step, votes: Votes, marks: Marks, told: Callable[[], Tensor]) -> None:
        """Worker: commit a deferred step, or forget it. If it has failed since, it stays failed.

        Args:
            step: the deferred one.
            votes: all ranks' rows.
            marks: of the step.
            told: returns their values on the host; may wait for a device.
        """
        if step.outcome is Outcome.DEFERRED:
            values = told()
            step.idle += [(each, partial(list, slots)) for each, slots in marks.idle(values)]
            self._end(step, self._commit(step, votes, not values[-1]))

    def _commit(self, step: Step, votes: Votes, finite: bool) -> Outcome:
        """Worker: make the working memory the committed one, if the step was `finite`, and hand its facts to
        the controller.

        Args:
            step: has all its means.
            votes: all ranks' rows.
            finite: the same on all ranks, because means and rows are.
        """
        if finite:
            for flat_buffer in self.layout.flat_buffers:
                flat_buffer.commit(
                    slot for owner, slots in step.idle if owner is flat_buffer for slot in slots()
                )
            self.step += 1
            self._is_counted = True
        # The controller may name the recipe that follows.
        rows = [row.facts[len(step.told) :] for row in votes.rows]
        self._following = self._controller.observe(step, rows, committed=finite)
        self.facts = self._controller.facts or self.facts
        self.is_serial = self._controller.is_serial
        return Outcome.COMMITTED if finite else Outcome.NOT_FINITE

    def _finish_running(self, step: Step, outcome: Outcome, error: BaseException | None = None) -> None:
        """Worker: give the running step its outcome, and finish it for the model."""
        self._now = None
        self._end(step, outcome, error)
        self.env.finished(step)

    def _end(self, step: Step, outcome: Outcome, error: BaseException | None = None) -> None:
        """Worker: give a step its final outcome. Unless the step has failed, tell that it is known."""
        step.end(outcome, error)
        if outcome is not Outcome.FAILED and step.is_timed:
            self.traffic.note(step.trace.rounds)
        else:
            self.traffic.forget()
        for flat_buffer in self.layout.flat_buffers:
            flat_buffer.kept.discard()
        if outcome is not Outcome.FAILED:
            self.env.outcome_known(step)

    # -- between steps

    @property
    def is_caught_up(self) -> bool:
        """True if `catch_up` has nothing to do: no step is deferred, and no other recipe follows. On any
        thread."""
        return self._deferred is None and self._following is None

    def commit_deferred(self) -> None:
        """Worker: commit the last step, or forget it; needs no other rank, and may wait for the device."""
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            deferred()

    def catch_up(self, fates: Fates | None = None) -> bool:
        """Worker: `commit_deferred`, `roll_back`, and change what runs, on all ranks. An error ends all later
        steps.

        Without `fates` all is final, as after most steps. Returns whether a step was dropped.
        """
        is_dropped = False
        try:
            self.commit_deferred()
            is_dropped = fates is not None and self.roll_back(fates)
            self.follow(self._following) if self._following is not None else None
        except BaseException as error:  # of the device, for instance
            self.crash(error)
        return is_dropped

    def crash(self, error: BaseException) -> None:
        """Worker: end this step, once all of its gradients are there, and all later ones with a
        `TransportError`.

        For a broken transport, and for an error outside any exchange, which loses the order of collectives.
        A collective of buffers that is in flight is not waited for: what it would bring is not used.
        """
        if not isinstance(error, TransportError):
            broken = TransportError(f"internal error: {error!r}")
            broken.__cause__ = error
            error = broken
        self.broken = self.broken or error
        if self._now is not None:
            self._advance(self._now)

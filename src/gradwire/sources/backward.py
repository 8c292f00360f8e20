"""One backward pass at a time: gradients go to the engine's thread, and errors come back to the caller's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NoReturn, TypeAlias, TypeVar

from torch.autograd import Variable, profiler

from gradwire.agreement.calls import Calls
from gradwire.errors import GradwireError
from gradwire.measure.clock import now_s
from gradwire.placement import HostDevice, Placement, TransferredBuffer, Waited
from gradwire.sources.nodes.level import NodeReducer
from gradwire.sources.source import Source
from gradwire.step.arrival import Arrival
from gradwire.step.context import Fates
from gradwire.step.event_log import EventLog
from gradwire.step.fates import NOTHING_CAME, Came, Steps
from gradwire.step.history import History
from gradwire.step.reducer import Reducer
from gradwire.step.step import Step
from gradwire.step.worker import Job, Worker, wait_until

_LEFT_OUT = "a backward pass after a step that was left out"
_BEFORE_THE_STEP = "another backward pass before the optimizer's step"
_AFTER_A_FAILURE = "a backward pass after a step that failed when its verdict was out"
_AFTER_NOTHING = "a backward pass after one that broke off before its first gradient"
_AFTER_A_PART = "a backward pass after one that broke off"

T = TypeVar("T")
Hear: TypeAlias = Callable[[Step], None]

_CAPTURED = (
    "this backward pass is captured into a graph, in which gradients cannot travel: a graph replays the same "
    "launches, while steps differ in number, seed and plan. Capture the forward pass alone, or train without "
    "graphs"
)
_BROKE_OFF = (
    "a backward pass broke off before all gradients were there: its step can get no verdict, and other ranks "
    "may wait for it. Start all ranks again, from their last checkpoint"
)


def _at_once() -> None:
    """There is nothing to wait for."""


class Backward:
    """The link between a source and the engine: `open`, `submit` every flat buffer, `close`.

    These three run on autograd's thread. `close` queues a callback that waits for the verdict at the very end
    of the backward pass and raises there, so that errors keep their type. Outside a backward pass, where no
    callback can be queued, an error waits for the next `open`. `deliver` runs on the engine's thread.
    """

    def __init__(
        self,
        source: Source,
        worker: Worker,
        engine: Callable[[Hear, Hear], Reducer],
        calls: Calls | None = None,
        level: NodeReducer | None = None,
        steps: Steps | None = None,
    ) -> None:
        """`engine` makes one that calls two functions: when a step has ended, and when it is resolved.

        `calls` tells of other ranks' calls; without it none is looked for. A `level` adds up inside the node
        before the engine gets shards, and hears of a step's end before this does. `steps` follow the
        optimizers; without them every exchange is a step.
        """
        self.calls = calls or Calls(None)
        self.steps = steps or Steps({}, (), HostDevice())
        self.overlap = True
        self.history = History()
        self.listeners: list[Callable[[], None]] = []
        """Called at the end of each backward pass that raises nothing, on its thread."""
        self._source, self._worker = source, worker
        self._held: list[tuple[Job, Callable[[Waited], None]]] = []
        """A wait, and a function for the engine's thread that follows it."""
        self._transferred: list[TransferredBuffer] = []
        self._ended = threading.Event()
        self._ended.set()
        self._all_given = True
        self._error: BaseException | None = None
        self._unheard = ""
        """Things that this rank has settled otherwise than as one step, and the others have not heard of."""
        self._broke_off = ""
        """Likewise of a pass that broke off before it began a step."""
        self._has_left = False
        if level is None:
            self.engine = engine(self.deliver, self.note)
        else:
            self.engine = engine(partial(level.conclude, deliver=self.deliver), self.note)
            level.join(self.engine)
        self._taker = level or self.engine
        """On the worker: the level, if there is one."""
        self.event_log = EventLog(self.engine)
        self._placement = self.placement

    @property
    def placement(self) -> Placement:
        """The placement of the step that is running, or else of the next one."""
        return self.engine.placement

    def open(self) -> None:
        """The first gradients of a step are there.

        Raises what the step before has not raised yet, and `GradwireError` where that cannot end, since not
        all of its gradients came, or where this pass is captured into a graph.
        """
        self._raise_pending()
        # Before anything is asked of the device: while CUDA captures, it refuses waits, in its own words.
        if self._is_captured:
            self.calls.leave("a backward pass that is captured into a graph")
            raise GradwireError(_CAPTURED)
        if not self._ended.is_set():
            self._refuse_what_broke_off()
        self.calls.require_order()
        self._begin_exchange()
        self.calls.steps += 1
        self._ended.clear()
        self._all_given = False
        self._placement = self.placement
        # What the engine reads as the step opens, such as parameters, may still be written.
        self._placement.transfer.follow()
        self._held, self._transferred = [], []
        opened_s = now_s()
        self._held.append((_at_once, lambda _: self._taker.begin_step(opened_s)))

    def entered(self, came: Came = NOTHING_CAME) -> None:
        """A backward pass has begun, on the thread of that pass; only those that `came` have their gradient.

        May be called again in the same pass. While its step runs that says nothing.
        """
        if self._all_given:
            self.steps.backward_begins(exchanges=self._source.is_exchanging, came=came)

    def broke_off(self) -> None:
        """A pass has ended before its first gradient, and nothing of its step has been sent.

        Where the same has happened on all ranks they go on. If it has not, the next pass of this rank must
        not complete the others' step.
        """
        self._broke_off = _AFTER_NOTHING

    def _refuse_what_broke_off(self) -> NoReturn:
        """Raise, and let ranks know that wait in the step: as if this rank had not begun it."""
        if not self._has_left:
            self._has_left = True
            self.calls.steps -= 1
            self.calls.leave(_AFTER_A_PART)
        raise GradwireError(_BROKE_OFF)

    def _begin_exchange(self) -> None:
        """Let the engine know what became of the exchange before; then something else may run, elsewhere."""
        fates = self.settle()
        unheard = ", ".join(each for each in (self._broke_off, self._unheard) if each)
        # Over a broken transport this step fails like all that follow, and the others may be gone.
        if unheard and self.engine.broken is None:
            # Schedules and random numbers go by steps: ranks that count differently must not exchange.
            self._broke_off = self._unheard = ""
            self.calls.begin(unheard, self.engine.step)
        if not self.engine.is_resolved:
            self.call(self.engine.catch_up)
            if self.engine.plan != self.event_log.plan:
                self.event_log.changed()
        self.steps.exchange_begins(fates, compresses=not self.engine.layout.is_plain)

    def up_to_date(self) -> None:
        """Count what optimizers have made so far, and nothing of what they have not; on this rank alone."""
        self._source.settle()
        self.resolve()
        self.steps.look()
        if self.settle() is None:
            self.call(lambda: self.engine.settle(Fates()))

    def settle(self) -> Fates | None:
        """Undo in the memory what optimizers have left out since the last exchange.

        Nothing is asked of other ranks: they hear of it when the next exchange begins, or the next call.
        """
        fates = self.steps.fates()
        if fates is None:
            return None
        self.resolve()
        was_counted = self.engine.is_counted
        is_dropped = self.call(partial(self.engine.settle, fates))
        self.steps.settled(fates, is_dropped=is_dropped)
        if is_dropped:
            self._unheard = _LEFT_OUT
            if self.engine.broken is None:  # or `backward()` has raised, and the user knows why
                self.event_log.dropped(self.engine.step, self.steps.dropped, self.steps.in_a_row)
        elif was_counted and not fates.made:
            self._unheard = _BEFORE_THE_STEP
        return fates

    def submit(self, arrival: Arrival) -> None:
        """Hand over a flat buffer, which is the engine's until the step has ended."""
        if self.engine.is_serial and not self._placement.memory.is_host:
            # The host runs ahead of a device, and elsewhere a copy tells when the gradient was there.
            arrival = replace(arrival, at_s=self.engine.watch.exact())
        transferred = self._placement.transfer.start(arrival.index, arrival.buffer)
        self._transferred.append(transferred)
        self._held.append((transferred.ready, partial(self._arrive, arrival, transferred)))
        # In a step taken apart, communication would slow the computation that shares its cores.
        if self.overlap and not self.engine.is_serial:
            self._post_held()

    def all_brought(self) -> None:
        """All gradients of the step have been brought, outside a backward pass: `finish` waits for it."""
        self._held.append((_at_once, lambda _: self._taker.all_ready()))
        self._post_held()
        self._all_given = True

    def finish(self) -> None:
        """Outside a backward pass: return once the step has ended, and is resolved. Raises its error."""
        self._wait_and_land()
        self._raise_pending()
        self.resolve()
        self._tell()

    def close(self) -> None:
        """All gradients of the step have been brought, in a backward pass that waits at its end."""
        self.all_brought()
        # Not before everything is there: a reentrant checkpoint nests backward passes, and at the end of an
        # inner one there may be gradients that only the outer one will deliver.
        try:
            Variable._execution_engine.queue_callback(self._wait)
        except RuntimeError:  # "can only be installed during backward pass": see the class
            if self._placement.wait is not None:  # or what is left to do would be done in the next pass
                self._await_end()

    def _arrive(self, arrival: Arrival, transferred: TransferredBuffer, waited: Waited) -> None:
        """On the engine's thread: the gradients are there, or could not be copied."""
        failure = arrival.failure or waited.error
        # Where nothing is waited for, or in a step taken apart, it is known better when they were there.
        was_awaited = self._placement.post_after is not None and not self.engine.is_serial
        if transferred.buffer is not arrival.buffer or failure is not arrival.failure or was_awaited:
            arrival = replace(arrival, buffer=transferred.buffer, at_s=waited.at_s, failure=failure)
        self._taker.bucket_ready(arrival)

    def _post_held(self) -> None:
        """Post all that was brought, each once it is there. The engine goes on meanwhile."""
        held, self._held = self._held, []
        for ready, job in held:
            (self._placement.post_after or self._post_in_turn)(ready, job)

    def _post_in_turn(self, ready: Job, job: Callable[[Waited], None]) -> None:
        self._placement.post(lambda: job(wait_until(ready)))

    @property
    def is_sound(self) -> bool:
        """Whether every step has ended, and the collectives of all ranks are paired."""
        return self._all_given and self._ended.is_set() and self.engine.broken is None

    def rest(self) -> None:
        """Return when no step is running, because nothing else may be asked of the ranks meanwhile.

        If the user caught an interrupt inside `backward()`, that step is still running; it ends on all ranks.
        Raises `GradwireError` where it cannot end, since not all of its gradients came.
        """
        self._end()
        self.up_to_date()

    def resolve(self) -> None:
        """Let the engine commit the last step, if that is still to be done."""
        if not self.engine.is_resolved:
            self.call(self.engine.resolve)

    def together(self, what: str, function: Callable[[], T]) -> T:
        """Run `function` as `call` does, once all ranks have come to the same call, named `what`.

        With the errors of `rest` and of `Calls.begin`. Raises `GradwireError` inside a backward pass.
        """
        self.calls.require_between_steps(what)
        self.rest()
        self._broke_off = self._unheard = ""  # this tells the step, too
        self.calls.begin(what, self.engine.step)
        return self.call(function)

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` between steps, where the engine works, and return its result, or raise its error.

        It comes after all that the caller has enqueued on a device, and before all that it will.
        """
        placement = self.placement
        placement.transfer.follow()
        try:
            return self._worker.call(partial(placement.at_work, function))
        finally:
            placement.transfer.join()

    def before_forward(self) -> None:
        """After an interrupt that the user caught, land what is still to come; see `open` for a graph."""
        if self._all_given and not self._is_captured:
            self._end()

    @property
    def _is_captured(self) -> bool:
        return self._placement.device.is_capturing()

    def _end(self) -> None:
        if not self._all_given:
            self._refuse_what_broke_off()
        self._await_end()
        self._placement.transfer.join()
        self._source.land()

    def _wait(self) -> None:
        self._wait_and_land()
        if self._error is not None:
            # After the wrapper's own callbacks, which it could not do without in the next step.
            Variable._execution_engine.queue_callback(self._raise_pending)
        else:  # after them too: by then `p.grad` holds the mean
            Variable._execution_engine.queue_callback(self._tell)

    def _wait_and_land(self) -> None:
        start_s = now_s()
        if profiler._is_profiler_enabled:
            with profiler.record_function("gradwire/wait"):
                self._await_end()
        else:
            self._await_end()
        self.history.waited(start_s, now_s())
        self.engine.watch.end()
        self._placement.transfer.join()
        self._source.land()

    def _tell(self) -> None:
        self.steps.exchange_ended()
        for listener in self.listeners:
            listener()

    def _await_end(self) -> None:
        (self._placement.wait or self._worker.wait)(self._ended, self.calls.look)
        self.calls.ended()

    def _raise_pending(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def deliver(self, step: Step) -> None:
        """End a step, whatever happened, and let `backward()` go on."""
        self._error = step.error
        if step.has_failed_unheard:
            self._unheard = _AFTER_A_FAILURE
        try:
            self._source.step_ended(step)
            self.history.add(step)
            for transferred in self._transferred:
                transferred.copy_back()
        except BaseException as error:  # of the device, for instance: this rank cannot go on
            self._error = self._error or error
            raise
        finally:
            placement = self._placement  # the next step may have one of its own, once this one has ended
            self._ended.set()
            with placement.transfer.landing():
                self._source.release()

    def note(self, step: Step) -> None:
        """A step counts, or does not. On the engine's thread."""
        self.history.resolved(step)
        if not step.committed:
            self.event_log.skipped(step.number, self.history.skipped)
        if len(self.engine.health.complaints) != self.event_log.complaints:
            self.event_log.unhealthy()
        if self.engine.plan != self.event_log.plan:
            self.event_log.changed()

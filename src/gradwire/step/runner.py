"""Runs exchanges in the agreed order, whatever goes wrong inside them.

An exception in encode or decode must not change which collectives this rank issues, or its peers would
hang: it pays the rest of the agreed rounds with zeros, and the verdict tells all ranks. A broken
transport is different: nothing can be issued any more, and every later task is dropped. `SystemExit` is an
exception like any other here: on this thread it would end nothing but the thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from gradwire.comm import owe_zeros
from gradwire.errors import TransportError
from gradwire.placement import Placement
from gradwire.step.step import ExchangeTask, Step


class ExchangeRunner:
    """Starts and finishes tasks on the engine's thread. `landed` is called after each one that ended.

    In a serial step each task ends before the next begins, so that the duration of its collective is the
    wire's own. Where the end of a task is not announced, its finish would make a stream wait for its bytes.
    So it is enqueued after the start of the next ones: as many as the granularity of `placement()` says.
    """

    def __init__(
        self,
        placement: Callable[[], Placement],
        landed: Callable[[Step], None],
        rank: int,
    ) -> None:
        """`rank` is what errors call this one."""
        self._placement, self._landed, self._rank = placement, landed, rank
        self._under_way: deque[Callable[[], None]] = deque()
        self.broken: TransportError | None = None
        """Why nothing can be issued any more; it ends this step and all later ones."""

    def issue(self, send: Callable[[], None]) -> None:
        """Run `send`, which issues what needs no decoding, unless the transport is broken."""
        if self.broken is None:
            try:
                send()
            except TransportError as error:
                self.broken = error

    def launch(self, step: Step, task: ExchangeTask) -> None:
        """Encode and issue `task`; its last round stays in flight."""
        self.issue(partial(self._start, step, task))

    def _start(self, step: Step, task: ExchangeTask) -> None:
        step.outstanding += 1
        step.decoding += task.agreed.may_fail
        try:
            with step.trace.compressing("encode", task.plan.label):
                task.finish = task.plan.exchange.start(task.x, task.mean, task.comm, task.ctx)
        except TransportError:
            raise
        except BaseException as error:
            step.fail(error, f"encode of {task.plan.label}", self._rank)
            owe_zeros(task.comm, task.agreed.rounds[len(task.comm.rounds) :], task.x.device)
        if step.is_serial or task.finish is None or task.comm.last is None:
            self._finish(step, task)
        elif task.comm.announces:
            task.comm.last.then(lambda: self._placement().post(lambda: self._ended(step, task)))
        else:
            self._under_way.append(partial(self._ended, step, task))
            self._finish_all_but(self._placement().granularity.under_way - 1)

    def finish_all(self) -> None:
        """All tasks of the step have started: finish those whose end is not announced, too."""
        self._finish_all_but(0)

    def _finish_all_but(self, few: int) -> None:
        while len(self._under_way) > few:
            self._placement().post(self._under_way.popleft())

    def _ended(self, step: Step, task: ExchangeTask) -> None:
        self.issue(partial(self._finish, step, task))
        self._landed(step)

    def _finish(self, step: Step, task: ExchangeTask) -> None:
        try:
            with step.trace.compressing("decode", task.plan.label):
                if task.finish is not None:
                    task.finish()
                    if task.land is not None:
                        task.land()
                if task.is_unseen:
                    step.look(task.mean)
        except TransportError:
            raise
        except BaseException as error:
            step.fail(error, f"decode of {task.plan.label}", self._rank)
        step.record(task)

"""Steps of plain all-reduce without a verdict: what DDP does, and little more.

Where nothing is remembered, nothing can be lost; and all ranks see the same means, so that each knows by
itself whether they are finite. Should a rank fail all the same, it sends NaN: the step counts on no rank.
"""

from __future__ import annotations

import math
import threading
from functools import partial
from typing import TYPE_CHECKING

import torch

from gradwire.comm.base import drain, issue_alone
from gradwire.engine.arrival import Arrival
from gradwire.engine.step import Committed, Failed, Outcome, Poisoned, Step, Task
from gradwire.errors import TransportError

if TYPE_CHECKING:
    from gradwire.engine.engine import Engine
    from gradwire.recipes import Recipe

LOOKS = 16
"""Where an adaptive recipe has come to dense, every so many steps have a verdict: it tells of the link."""


class PlainSteps:
    """Takes gradients as an engine does, but on the thread that brings them.

    The engine's thread has its only turn when all bytes are here, and ends the step. The thread that brings
    gradients could not: DDP may wait for its futures before that thread comes to anything of ours.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: Recipe | None = None
        self._adapts = False
        self._step: Step | None = None
        self._tasks: list[Task] = []
        self._lock = threading.Lock()
        self._awaited = 0

    @property
    def suits(self) -> bool:
        """Whether ranks have nothing to agree on in the next step: the same answer on all of them."""
        engine, around = self._engine, self._engine.around
        if not engine.layout.is_dense or engine.measuring or engine.layout.main.watch is not None:
            return False
        if engine.comm.verifies:  # then a rank may find damage
            return False
        on_cpu = around.placement.device.where.type == "cpu"
        due = around.guard.is_due(engine.step) or (engine.step % LOOKS == 0 and self._is_adaptive)
        return on_cpu and not around.sharded and not due

    @property
    def _is_adaptive(self) -> bool:
        """Whether the recipe decides by what is measured. The user may switch to another one."""
        recipe = self._engine.recipe
        if recipe is not self._known:
            first = recipe.build()
            self._known, self._adapts = recipe, first.next is not None or first.watch is not None
        return self._adapts

    def open(self, at_s: float) -> None:
        """As `Engine.open`."""
        engine = self._engine
        self._step = Step.begun(engine.step, engine.layout.main.text, engine.watch, at_s)
        self._tasks = []
        self._awaited = 1  # for `close`

    def arrive(self, arrival: Arrival) -> None:
        """As `Engine.arrive`: issue its all-reduce."""
        engine, step = self._engine, self._step
        assert step is not None, "open the step first"
        if arrival.failure is not None:
            step.fail(arrival.failure, f"bringing of buffer {arrival.index}", engine.rank)
            arrival.buffer.fill_(math.nan)
        step.arrive(arrival)
        for each in step.next_turns():
            for run in engine.layout.intake(each.entries).runs:
                engine.runner.issue(partial(self._start, step, engine.direct(step, each, run)))

    def _start(self, step: Step, task: Task) -> None:
        try:
            task.finish = task.exchange.start(task.x, task.mean, task.comm, task.at)
        except TransportError:
            raise
        except BaseException as error:
            step.fail(error, f"encode of {task.label}", self._engine.rank)
            for owed in task.agreed[len(task.comm.rounds) :]:
                nothing = torch.full((owed.numel,), math.nan, dtype=owed.dtype, device=task.x.device)
                drain(issue_alone(task.comm, owed, nothing))
        self._tasks.append(task)
        if task.comm.last is not None:
            with self._lock:
                self._awaited += 1
            task.comm.last.then(self._one_less)

    def close(self) -> None:
        """As `Engine.close`."""
        self._one_less()

    def _one_less(self) -> None:
        with self._lock:
            self._awaited -= 1
            is_last = self._awaited == 0
        if is_last:
            self._engine.around.placement.post(self._conclude)

    def _conclude(self) -> None:
        """Give the step its outcome, and tell of it."""
        engine, step = self._engine, self._step
        assert step is not None, "open the step first"
        self._step = None
        try:
            if engine.runner.broken is not None:
                raise engine.runner.broken
            for task in self._tasks:
                if task.finish is not None:
                    task.finish()
                    step.look(task.mean)
                step.record(task)
            outcome: Outcome = Committed() if step.is_finite() else Poisoned()
            if step.failure is not None:
                outcome = Failed(step.failure)
        except BaseException as error:
            if isinstance(error, TransportError):
                engine.lose(error)
            else:  # our own: futures would wait for ever
                engine.crash(error)
            assert engine.runner.broken is not None, "lost"
            outcome = Failed(engine.runner.broken)
        step.end(outcome, engine.rank)
        engine.step += step.committed
        if step.error is None:
            engine.around.resolved(step)
        engine.around.concluded(step)

"""The values that an engine is built with: placement, the model's optimizer and buffers, reporting.

Environment variables are another matter: `gradwire.environment` has those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from gradwire.comm import Comm
from gradwire.measure.clock import BackwardWatch
from gradwire.placement import Device, Placement
from gradwire.planning.costs import Link
from gradwire.planning.facts import Facts
from gradwire.planning.health import Health
from gradwire.planning.tuning import USUAL, Tuning
from gradwire.recipes import Composition
from gradwire.step.context import Replicas
from gradwire.step.layout import Layout, Policy
from gradwire.step.step import Passenger, Step


class StepObserver(Protocol):
    """Looks on at steps: checks, figures and copies that no step needs. One that is off is not in the list.

    All that it does runs on the engine's thread. It changes neither gradients nor memory, and issues no
    collective, but for what it hands to `Step.tell`, which all ranks call in the same step.
    """

    def before(self, step: Step, env: EngineEnvironment) -> None:
        """A step begins, and none of its gradients has been taken in.

        There an observer asks the step for what else it wants, which is gone with the step: to be called with
        each unit (`Step.unit_observers`), or to tell the other ranks numbers and to compare theirs (`tell`).
        An observer of units that raises fails the step on all ranks. An error here ends this step and all
        later ones, because rows of other ranks may have other lengths.
        """


Rows = Sequence[Sequence[float]]
"""The facts in a verdict, by rank."""

Heard: TypeAlias = tuple[Link | None, tuple[Link, Link] | None]
"""The assumed link, and its change, before and after, if it has just changed."""


class Controller(StepObserver, Protocol):
    """One rank's side of a decision. All calls are on the engine's thread.

    The facts of a rank ride in its row of the verdict; how many there are depends on agreed numbers alone.
    """

    @property
    def measuring(self) -> bool:
        """Whether dense steps still find out what to do."""

    @property
    def is_serial(self) -> bool:
        """Whether communication of this step waits for its computation, so that each is timed alone."""

    @property
    def facts(self) -> Facts | None:
        """The measured facts, once they are known."""

    @property
    def late(self) -> float | None:
        """Steps' worth of gradient that wait; `None` before that is known, 0 where nothing is remembered."""

    @property
    def looks_on(self) -> bool:
        """Whether `before` has something to do in any step."""

    def row(self, step: Step, link: tuple[float, ...]) -> tuple[float, ...]:
        """This rank's facts. `link` is what the previous step's rounds say of the link."""

    def observe(self, step: Step, rows: Rows, *, committed: bool) -> Composition | None:
        """Take all ranks' facts of a step that had a verdict; what is to run from now on, if that changes."""


class ControllerFor(Protocol):
    """Makes the controllers of an engine: `gradwire.control.controller.controller_for`."""

    def __call__(
        self,
        layout: Layout,
        env: EngineEnvironment,
        placement: Placement,
        watch: BackwardWatch,
        hear: Callable[[int, Rows], Heard],
        layout_of: Callable[[Composition, torch.device], Layout],
        health: Health,
        /,
    ) -> Controller:
        """The controller while `layout` runs. `hear(step, rows)` takes what all ranks said of the link, and
        `layout_of` lays parameters out for another composition."""


class SourceState(Protocol):
    """State that checkpoints hold beside the engine's. Called between steps, on the engine's thread."""

    def save(self) -> dict[str, Any]:
        """This rank's state: tensors and plain values, which the caller copies."""

    def save_mean(self) -> dict[str, Any]:
        """State that is the same on all ranks. Raises `ValueError` when that is not enough to go on from."""

    def prepared(self, saved: Mapping[str, Any], *, own: bool) -> tuple[str, Callable[[], None]]:
        """A text about `saved`, the same on all ranks, and a function that takes it up; this changes nothing.

        `own` says whether it is this rank's, and not another one's or a mean. Raises `ValueError` where it
        has no place here.
        """


@dataclass(frozen=True)
class EngineEnvironment:
    """Built before the engine and passed to its constructor. The functions are called on the engine's thread.

    `usual` is the placement of most layouts, and of all if there is no `on_host`; see `placed`. Both have the
    same `control` comm, and comms over the same ranks. Where several ranks share a replica, each with a shard
    of it, gradients travel between the ranks with the same shard, and `control` is over all.

    `alone` is for a single rank, which has nothing to send: it compresses nothing (`uncompressed`).
    """

    usual: Placement
    controller_for: ControllerFor = field(kw_only=True)
    concluded: Callable[[Step], None] = lambda _step: None
    """Called once per step, when its means are on their way into the buffers, or with its error."""
    resolved: Callable[[Step], None] = lambda _step: None
    """Called once per step that has no error, when it is known whether it counts: at most one step later."""
    on_host: Placement | None = None
    """The placement of layouts that read numbers on the host, where `usual` is one on a device."""
    policy: Policy | None = None
    seed: int = 0
    memory_dtype: torch.dtype | None = None
    tuning: Tuning = USUAL
    alone: bool = False
    timed_every: int = 1
    """One step in this many is timed where nothing runs by times (`Engine.times`)."""
    loss_scale: Callable[[], float] | None = None
    """Of the current step; read in the stream in which means land. `None` where gradients carry none."""
    begun: Callable[[], None] = lambda: None
    """Called on the thread that trains when a backward pass begins. More than once: the last call counts."""
    replicas: Replicas = lambda _name: None
    """Parameters and optimizer state that all ranks hold alike, by name."""
    uses: Callable[[], Mapping[str, float]] = dict
    """Multiply-adds per weight, by parameter name, as far as they have been counted."""
    buffers: Callable[[], Passenger | None] | None = None
    """The model's buffers that the current step broadcasts. `None` where there are none in any step."""
    check: Callable[[Layout], None] = lambda _layout: None
    """Raises `ValueError` for a layout that does not suit the optimizer."""
    prepare: Callable[[Layout, Device], None] = lambda _layout, _memory: None
    """Compiles the kernels of a layout that will run with its memory on that device."""
    on_link: Callable[[float], None] = lambda _byte_s: None
    """Hears after each step how many seconds a byte takes on the link, once that is known."""
    observers: list[StepObserver] = field(default_factory=list)
    """Those that are on. The thread that trains changes the list, between steps."""
    source_state: SourceState | None = None
    """State of the source, for checkpoints."""
    replica: dist.ProcessGroup | None = None
    """The group of ranks that hold the shards of a replica, where they are processes and hold shards."""

    def placed(self, layout: Layout) -> Placement:
        """Where `layout` runs: on the host, if it reads numbers there, and gradients may be carried there.

        It follows from the layout alone, and so is the same on all ranks.
        """
        return self.usual if self.on_host is None or layout.stays_on_device else self.on_host

    def compile_for(self, layout: Layout) -> None:
        """Compile the kernels of a layout that will run, for where that will be."""
        self.prepare(layout, self.placed(layout).memory)

    @property
    def control(self) -> Comm:
        """The comm of the verdict, and of everything else that ranks agree on, in tensors on the CPU."""
        return self.usual.control

    @property
    def world(self) -> int:
        """How many ranks exchange gradients."""
        return self.usual.comm.world

    @property
    def sharded(self) -> bool:
        """Whether a step is agreed on by more ranks than exchange gradients."""
        return self.control.world > self.world

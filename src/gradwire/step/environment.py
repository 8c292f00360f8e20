"""The environment of a reducer: placement, the model's optimizer and buffers, features, reporting.

Environment variables are another matter: `gradwire.environment` has those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from gradwire.comm import Comm
from gradwire.kernels.graphs import Graphs
from gradwire.measure.clock import BackwardWatch
from gradwire.placement import Device, Placement
from gradwire.planning.costs import Link
from gradwire.planning.facts import Facts
from gradwire.planning.health import Condition, Health
from gradwire.planning.tuning import USUAL, Tuning
from gradwire.recipes import Composition
from gradwire.step.layout import Layout, Policy
from gradwire.step.plan import UnitCaptures
from gradwire.step.step import SideBroadcast, Step
from gradwire.unit.context import Replicas


class StepObserver(Protocol):
    """A feature that observes steps, such as a guard. It is in a list while it is on.

    It runs on the worker's thread, changes neither gradients nor memory, and issues no collective. It may
    call `Step.tell`, if all ranks do so in the same step.
    """

    def before(self, step: Step, env: ReducerEnvironment) -> None:
        """Observe a step that begins; none of its gradients has been taken in.

        There an observer asks the step for what else it wants, which is gone with the step: to be called with
        each unit (`Step.unit_observers`), or to tell the other ranks numbers and to compare theirs (`tell`).
        An observer of units that raises fails the step on all ranks. An error here ends this step and all
        later ones, because rows of other ranks may have other lengths.
        """


Rows = Sequence[Sequence[float]]
"""Numbers of a status vote, by rank."""

Heard: TypeAlias = tuple[Link | None, tuple[Link, Link] | None]
"""Pair of the assumed link, and its change (before, after) if it has just changed."""


class Controller(StepObserver, Protocol):
    """Feature that decides which recipe follows. All calls are on the worker's thread.

    A rank's numbers travel in its row of the status vote. Their number depends on agreed numbers alone, so
    that all ranks decide the same.
    """

    @property
    def measuring(self) -> bool:
        """True while dense steps are measured, before a decision."""

    @property
    def is_serial(self) -> bool:
        """True if communication waits for computation in this step, so that each is timed alone."""

    @property
    def facts(self) -> Facts | None:
        """The measured facts, once they are known."""

    @property
    def late(self) -> float | None:
        """Lateness: steps' worth of gradient that wait; `None` before it is known, 0 without a memory."""

    @property
    def condition(self) -> Condition | None:
        """Signs and lateness of the composition that runs; `None` while dense steps are measured."""

    @property
    def looks_on(self) -> bool:
        """True if `before` has something to do in any step."""

    def row(self, step: Step, link: tuple[float, ...]) -> tuple[float, ...]:
        """Numbers for this rank's row: first those of the `link`, which follow from the rounds of the
        previous step.
        """

    def observe(self, step: Step, rows: Rows, *, committed: bool) -> Composition | None:
        """Observe a step that had a status vote.

        Args:
            step: the one that has ended.
            rows: all ranks' numbers.
            committed: whether it counts.

        Returns:
            The composition that follows, or `None` if the present one goes on.
        """


class ControllerFor(Protocol):
    """Makes the controllers of a reducer: `gradwire.control.controller.controller_for`."""

    def __call__(
        self,
        layout: Layout,
        env: ReducerEnvironment,
        placement: Placement,
        watch: BackwardWatch,
        hear: Callable[[int, Rows], Heard],
        layout_of: Callable[[Composition, torch.device], Layout],
        health: Health,
        /,
    ) -> Controller:
        """The controller while `layout` runs.

        Args:
            layout: of the parameters.
            env: of the reducer.
            placement: where `layout` runs.
            watch: times backward passes.
            hear: called with a step's number and all ranks' numbers of the link; returns the link, and its
                change.
            layout_of: lays parameters out for another composition.
            health: collects signs that training suffers.
        """


class SourceState(Protocol):
    """State of a source, for checkpoints. Called between steps, on the worker's thread."""

    def save(self) -> dict[str, Any]:
        """This rank's state, in tensors and plain values, which the caller copies."""

    def save_mean(self) -> dict[str, Any]:
        """The state that is the same on all ranks. Raises `ValueError` if it is not enough to go on from."""

    def prepared(self, saved: Mapping[str, Any], *, own: bool) -> tuple[str, Callable[[], None]]:
        """Validate `saved`, without a change.

        `own` says whether it is this rank's state, and not another one's or a mean. Returns a text to compare
        across ranks, and a function that applies the state. Raises `ValueError` if the state does not fit.
        """


@dataclass(frozen=True)
class ReducerEnvironment:
    """Everything that a reducer gets from outside. Functions are called on the worker's thread, unless their
    description says otherwise.

    - `usual`: placement of most layouts; of all, if there is no `on_host`. See `placed`. Both have the same
      `control` comm, and comms over the same ranks.
    - `control`: comm over all ranks. If several ranks share a replica, each with a shard, gradients travel
      only among ranks with the same shard.
    - `alone`: for a single rank, which has nothing to send: it does not compress (`uncompressed`).
    """

    usual: Placement
    controller_for: ControllerFor = field(kw_only=True)
    finished: Callable[[Step], None] = lambda _step: None
    """Called once per step, when its means are on their way to the model, or with its error."""
    outcome_known: Callable[[Step], None] = lambda _step: None
    """Function called once per step without an error, when its outcome is known: at most one step later."""
    on_host: Placement | None = None
    """Placement of layouts that read numbers on the host, if `usual` is on a device."""
    policy: Policy | None = None
    seed: int = 0
    memory_dtype: torch.dtype | None = None
    tuning: Tuning = USUAL
    alone: bool = False
    timed_every: int = 1
    """One step in this many is timed where nothing runs by times (`InstalledRecipe.times`)."""
    loss_scale: Callable[[], float] | None = None
    """Function that returns the current step's loss scale; called in the stream in which means land. `None`
    if there is none."""
    begun: Callable[[], None] = lambda: None
    """Called on the thread that trains when a backward pass begins. More than once: the last call counts."""
    replicas: Replicas = lambda _name: None
    """Parameters and optimizer state that all ranks hold alike, by name."""
    uses: Callable[[], Mapping[str, float]] = dict
    """Multiply-adds per weight, by parameter name, as far as they have been counted."""
    buffers: Callable[[], SideBroadcast | None] | None = None
    """Function that returns the model's buffers to broadcast in this step. `None` if no step has any."""
    check: Callable[[Layout], None] = lambda _layout: None
    """Raises `ValueError` for a layout that does not suit the optimizer."""
    prepare: Callable[[Layout, Device], None] = lambda _layout, _memory: None
    """Function that compiles the kernels of a layout whose memory will be on that device."""
    await_kernels: Callable[[], None] = lambda: None
    """Called on the thread that trains before a round: returns when kernels that `prepare` has left to
    another process are there."""
    on_link: Callable[[float], None] = lambda _byte_s: None
    """Called after each step with the seconds per byte of the link, once they are known."""
    captures_for: Callable[[Graphs], UnitCaptures] | None = None
    """Makes what captures stretches of kernels, where memory is on a device with graphs; `None` if that is
    off."""
    observers: list[StepObserver] = field(default_factory=list)
    """Features that are on. The training thread changes the list, between steps."""
    stepped: set[str] = field(default_factory=set)
    """Names of the parameters of all optimizers that have ever stepped, for checkpoints. The log of
    optimizers adds to it when one steps."""
    source_state: SourceState | None = None
    """State of the source, for checkpoints."""
    replica: dist.ProcessGroup | None = None
    """Process group of the ranks that hold the shards of a replica; `None` if ranks are threads, or hold no
    shards."""

    def placed(self, layout: Layout) -> Placement:
        """The placement of `layout`: on the host, if it reads numbers there, and gradients may be carried
        there.

        It follows from the layout alone, so it is the same on all ranks.
        """
        return self.usual if self.on_host is None or layout.stays_on_device else self.on_host

    def compile_for(self, layout: Layout) -> None:
        """Compile the kernels of a layout, for the device where it will run."""
        self.prepare(layout, self.placed(layout).memory)

    @property
    def control(self) -> Comm:
        """The comm of status votes and other agreements, for tensors on the CPU."""
        return self.usual.control

    @property
    def world(self) -> int:
        """The number of ranks that exchange gradients."""
        return self.usual.comm.world

    @property
    def sharded(self) -> bool:
        """True if more ranks take part in the status vote than in an exchange of gradients."""
        return self.control.world > self.world

"""The installed recipe of one rank and its memory. A reducer runs it; a checkpoint stores it.

All of it changes between steps only, and in the same step on all ranks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gradwire.measure.clock import BackwardWatch, clock_of, stopwatch_for
from gradwire.measure.link import Change, LinkTraffic
from gradwire.measure.probe import slowest
from gradwire.memory import UNSENT
from gradwire.placement import Placement
from gradwire.planning.change_detection import THRESHOLD
from gradwire.planning.costs import Link
from gradwire.planning.facts import Facts
from gradwire.planning.health import Condition, Health
from gradwire.recipes import Composition, Recipe
from gradwire.recipes.dense import dense
from gradwire.step.environment import Controller, Heard, ReducerEnvironment, Rows
from gradwire.step.layout import Layout, build, only_compresses, uncompressed
from gradwire.step.shards import Shard
from gradwire.step.status_vote import fingerprint
from gradwire.unit.context import Fates
from gradwire.unit.parameters import ParameterSpec

META = torch.device("meta")

KERNELS_MISSING = "kernels are being compiled by another process, so gradients travel dense"

_FIRST = 64
"""Steps that are timed in any case once a recipe is installed: enough to know the link."""


@dataclass(frozen=True)
class RecipeSnapshot:
    """A layout with its memory, and everything else that `InstalledRecipe.restore` installs."""

    layout: Layout
    step: int
    running: str | None
    controller: Controller
    env: ReducerEnvironment
    placement: Placement
    facts: Facts | None


class InstalledRecipe:
    """The installed recipe of one attached model, built with `env`.

    A `Controller` changes the recipe, in the same step on all ranks, because it sees only numbers of
    status votes. `running` is the text of the recipe that runs, `None` while dense steps are measured or
    kernels are compiled.
    """

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        recipe: Recipe,
        env: ReducerEnvironment,
        before: Controller | None = None,
    ) -> None:
        """Install `recipe`, or dense steps under the controller `before`, which names what follows."""
        self.specs, self.recipe, self.env = tuple(specs), recipe, env
        self.policy = env.policy
        """The user's; `env` has another one once it is `retired`."""
        self.rank = env.control.rank
        """The number that names this rank in messages."""
        device, self.health = env.usual.device, Health()
        self.watch = BackwardWatch(stopwatch_for(device), exact=clock_of(device))
        self.link_changes: deque[tuple[int, Change]] = deque(maxlen=16)
        self._following: Composition | None = None
        self._link: Link | None = None
        self.begin_anew()
        if before is None:
            self.restore(self.prepared(self.layout_to_run(self.layout_of(recipe.build())), step=0))
        else:
            layout, placement = self._dense_layout(KERNELS_MISSING), env.usual
            self.restore(RecipeSnapshot(layout, 0, None, before, env, placement, None))

    # -- the layout and its memory: changed between steps only, on all ranks in the same one

    def prepared(self, layout: Layout, step: int | None = None) -> RecipeSnapshot:
        """A snapshot of `layout` with its memory, for `restore`; from `step` on, by default the present one.

        Everything that can fail is done here, and nothing changes: so ranks can agree before any of them goes
        on.
        """
        decision, env, placement = layout.main.next, self.env, self.env.placed(layout)
        env.compile_for(layout)
        if decision is not None and decision.about is not None:
            # Whatever the facts will be, its codec is timed and then used.
            foreseen = self.layout_of(decision.about, META)
            env.compile_for(foreseen)
        controller = env.controller_for(
            layout, env, placement, self.watch, self._hear, self.layout_of, self.health
        )
        running = layout.main.text if decision is None else None
        step, facts = (self.step, self.facts) if step is None else (step, None)
        return RecipeSnapshot(layout, step, running, controller, env, placement, facts)

    def layout_of(self, composition: Composition, device: torch.device | None = None) -> Layout:
        """The layout of parameters under another composition, by default where that would run."""
        env = self.env
        if device is None:
            where = env.usual if env.on_host is None else env.placed(self.layout_of(composition, META))
            device = where.memory.where
        given = env.world, env.memory_dtype, env.tuning
        return build(self.specs, composition, env.policy, device, *given)

    def layout_to_run(self, asked: Layout, *, owing: bool = False) -> Layout:
        """The layout `asked`, or the dense one that a single rank runs instead; `owing` as for
        `uncompressed`.

        For dense steps that measure, the composition that they decide about counts.
        """
        following = asked.main.next
        aim = asked if following is None or following.about is None else self.layout_of(following.about, META)
        if self.env.alone and only_compresses(aim):
            device = self.env.usual.memory.where
            return uncompressed(asked, device, self.env.memory_dtype, owing=owing)
        return asked

    def install(self, composition: Composition) -> None:
        """Run another composition. Memory moves along by name; unsent gradient may not be dropped."""
        self.restore(self.successor(composition))

    def follow(self, following: Composition) -> None:
        """Run `first_of(following)`. A collective."""
        self._following, first = None, self.first_of(following)
        self.install(first) if first is not None else None

    def first_of(self, following: Composition) -> Composition | None:
        """Composition to run first so that `following` can run: `following` itself, or one that flushes
        unsent gradient.

        Returns `None` if it is running already. A collective if some unsent gradient would lose its place.
        """
        now, asked = self.layout, self.layout_of(following, META)
        homeless = now.homeless_in(asked)
        left = any(bool(now.memory(name).any() or now.final(name).any()) for name in homeless)
        if not homeless or slowest(self.env.control, [float(left)]) == [0.0]:
            return asked.main
        from gradwire.recipes.flush import flushing  # few runs need it

        first = flushing(asked.main)
        return None if first == now.main else first

    def successor(self, composition: Composition) -> RecipeSnapshot:
        """A snapshot of `composition`, with the present memory."""
        layout = self.layout_of(composition)
        layout.take_over(self.layout)
        return self.prepared(self.remembering(layout))

    def remembering(self, asked: Layout) -> Layout:
        """`layout_to_run`, with the memory of `asked`. On a single rank the next step sends all of it."""
        owing = any(
            bool(flat_buffer.committed[UNSENT].any())
            for flat_buffer in asked.flat_buffers
            if UNSENT in flat_buffer.committed
        )
        here = self.layout_to_run(asked, owing=owing)
        if here is not asked:
            here.take_over(asked)
        return here

    def retired(self) -> RecipeSnapshot:
        """A snapshot of the plain all-reduce, whatever the policy, without memory."""
        made = self.prepared(self._dense_layout())
        return replace(made, env=replace(made.env, policy=None))

    def _dense_layout(self, why: str = "as configured") -> Layout:
        """The layout of a plain all-reduce, whatever the policy."""
        env = self.env
        device, given = env.usual.memory.where, (env.memory_dtype, env.tuning)
        return build(self.specs, replace(dense(), why=why), None, device, env.world, *given)

    def snapshot(self) -> RecipeSnapshot:
        """The present state, for `restore`. A layout that is installed in between has planes of its own."""
        return RecipeSnapshot(
            self.layout, self.step, self.running, self._controller, self.env, self.placement, self.facts
        )

    def restore(self, saved: RecipeSnapshot) -> None:
        """Install a snapshot, from `prepared` or `snapshot`."""
        self._following = None
        self.layout, self.step = saved.layout, saved.step
        self.running, self.facts = saved.running, saved.facts
        self._controller, self.env, self.placement = saved.controller, saved.env, saved.placement
        self.is_serial = self._controller.is_serial
        """Whether communication waits for computation in the step that runs, or the next one, so that each is
        timed alone. Only steps that measure may be serial."""
        self.comm, self._control, self._is_sharded = self.placement.comm, self.env.control, self.env.sharded
        inside = self.placement.inside
        self.shard = None if inside is None else Shard(inside, self.env.replica)
        """This rank's share of every parameter; `None` where parameters are whole."""
        self._granularity = self.placement.granularity
        self.measuring = self._controller.measuring
        """True while dense steps are measured, before a decision."""
        self._recipe_number = fingerprint(self.layout.main.text, self.layout.boundaries, self.measuring)
        watch = self.layout.main.watch
        goes_by_times = self.measuring or watch is not None
        self._timed_until = math.inf if goes_by_times else self.step + _FIRST
        # Anew for each layout: under another one, messages had other sizes.
        self.traffic = LinkTraffic(
            self.env.world, self.env.control.world, THRESHOLD if watch is None else watch.link_change
        )
        self._link = None

    # -- what becomes of a step, once optimizers have stepped or not

    def begin_anew(self) -> None:
        """Forget exchanges that wait for an optimizer."""
        self._is_counted = self._is_open = False

    def roll_back(self, fates: Fates) -> bool:
        """Make commits final, undo them, or keep them open. Returns whether a whole step was undone.

        `step` counts optimizer steps. An exchange is taken to make one until this says that it has not.
        Several exchanges before an optimizer steps have one number, and go back together.
        """
        for flat_buffer in self.layout.flat_buffers:
            flat_buffer.roll_back(fates)
        is_dropped = not (fates.made or fates.open) and (self._is_counted or self._is_open)
        if fates.made:
            self.step += self._is_open and not self._is_counted
        else:
            self.step -= self._is_counted
        self._is_open = not fates.made and bool(fates.open) and (self._is_counted or self._is_open)
        self._is_counted = False
        return is_dropped

    @property
    def is_counted(self) -> bool:
        """True if an exchange counts as a step, and no optimizer has stepped since."""
        return self._is_counted

    @property
    def late(self) -> float | None:
        """Lateness: steps' worth of gradient that wait in memory; `None` before it is known."""
        return self._controller.late

    @property
    def condition(self) -> Condition | None:
        """Signs and lateness of the composition that runs; `None` while dense steps are measured."""
        return self._controller.condition

    @property
    def following(self) -> Composition | None:
        """The composition that was decided, and runs from the next step on; `None` if the present one goes
        on.
        """
        return self._following

    def go_on_with(self, following: Composition) -> None:
        """Run `following` from the next step on, as if it had been decided in the last one."""
        self._following = following

    def times(self, step: int) -> bool:
        """True if this step is timed, and its bytes metered; the same on all ranks.

        Every step is, while dense steps are measured, or if a judge needs times. Otherwise the first steps
        under a recipe are, and then one in `ReducerEnvironment.timed_every`.
        """
        every = self.env.timed_every
        return step < self._timed_until or step % every == every - 1

    @property
    def fingerprint(self) -> int:
        """24 bits over step, recipe and boundaries, which must agree between ranks before a step counts."""
        return fingerprint(self.step, self._recipe_number)

    @property
    def awaits_kernels(self) -> bool:
        """True while gradients travel dense because some rank has no kernels yet for what was asked for."""
        return self.running is None and not self.measuring and not self.layout.alone

    @property
    def may_remember(self) -> bool:
        """True if some parameter has a memory, or may get one without a request of the user's."""
        if self.measuring or not self.awaits_kernels:
            return self.measuring or not self.layout.is_plain
        asked = self.recipe.build()
        return asked.next is not None or not self.layout_of(asked, META).is_plain

    def _hear(self, step: int, rows: Rows) -> Heard:
        """Update the estimate of the link by the rows of all ranks. Returns it, and its change, if any."""
        if not any(map(any, rows)):  # the step before was not timed
            return self._link, None
        changes = self.traffic.hear(rows)
        self.link_changes.extend((step, change) for change in changes)
        self._link = link = self.traffic.link
        if link is not None:
            self.env.on_link(link.beta_s)
        return link, next(((change.before, change.after) for change in changes), None)

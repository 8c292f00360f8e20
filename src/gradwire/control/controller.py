"""Controllers of the next composition: one measures (`control.warmup`), the other one watches.

Both use only numbers on which all ranks have agreed. So all ranks decide alike, in the same step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from gradwire.control.warmup import WarmupController
from gradwire.measure.clock import BackwardWatch
from gradwire.measure.norms import Weighing
from gradwire.memory import UNSENT
from gradwire.placement import Placement
from gradwire.planning.change_detection import THRESHOLD, StepWatch
from gradwire.planning.costs import Link
from gradwire.planning.facts import Facts, StepObservation, Watched
from gradwire.planning.health import EVERY, Condition, Health, Losses, pooled
from gradwire.planning.lateness import Layers, Weighed, is_weighed
from gradwire.recipes import Composition, Decision
from gradwire.step.environment import Controller, Heard, ReducerEnvironment, Rows
from gradwire.step.flat_buffers import FlatBuffer
from gradwire.step.layout import Layout
from gradwire.step.step import Step
from gradwire.unit.context import ExchangeContext
from gradwire.unit.parameters import ParameterSpec, Unit


def measuring(
    decision: Decision,
    specs: Sequence[ParameterSpec],
    env: ReducerEnvironment,
    placement: Placement,
    watch: BackwardWatch,
    layout_of: Callable[[Composition, torch.device], Layout],
) -> WarmupController:
    """The controller that measures what `decision` needs, and then decides: an `AutoController` if it has
    candidates.

    Args:
        decision: which measurements are needed, and what follows from them.
        specs: the parameters that are exchanged.
        env: where the reducer runs.
        placement: where memory and codecs are, with the comms.
        watch: ready times of gradients.
        layout_of: lays parameters out for a composition, on a device.
    """
    if not decision.candidates:
        return WarmupController(decision, specs, env, placement, watch)
    # Loaded by what chooses among recipes.
    from gradwire.control.auto import AutoController

    return AutoController(decision, specs, env, placement, watch, layout_of)


class RunningController:
    """Watches the running composition: by its judge, if it has one, and by its lateness.

    The judge sees the duration of the last step and of its codec. In steps with a measurement, it also sees
    the result and the energy of the unsent gradient. Lateness and health come from norms that ranks measured
    one step earlier (`planning.lateness`), and from the losses noted since. Under a composition on trial,
    every step is measured. `hear(step, rows)` receives all ranks' measurements of the link.
    """

    measuring, is_serial = False, False
    facts: Facts | None = None

    def __init__(
        self, layout: Layout, placement: Placement, hear: Callable[[int, Rows], Heard], health: Health
    ) -> None:
        self._hear, self._watch, self._health = hear, layout.main.watch, health
        self._judge = (
            None if self._watch is None else self._watch.judge(watched_in(layout, placement.comm.world))
        )
        self._flat_buffers = [
            flat_buffer for flat_buffer in layout.flat_buffers if flat_buffer.exchange is layout.main.exchange
        ]
        remembering = [flat_buffer for flat_buffer in self._flat_buffers if UNSENT in flat_buffer.committed]
        self._remembers = bool(remembering)
        cycle = max((flat_buffer.exchange.laws.cycle for flat_buffer in remembering), default=1)
        self.condition, self._layers = Condition(cycle), Layers(cycle)
        self._scales = Scales(remembering, placement.fetch, self.condition)
        is_on_trial = self._watch is not None and self._watch.ends
        self._cycle, self._every = cycle, cycle if is_on_trial else max(EVERY, cycle)
        table = layout.main.table
        self._late_on_trial = next((row.late for row in table if row.verdict == "runs"), None)
        self._link_change: tuple[Link, Link] | None = None
        self._looked = self._nothing
        self._previous_s = (0.0, 0.0)
        self._steps = StepWatch(THRESHOLD if self._watch is None else self._watch.link_change)
        self._link_numbers = 0
        self.looks_on = self._remembers or (self._watch is not None and self._watch.look is not None)

    @property
    def _nothing(self) -> list[float]:
        return [0.0] * (0 if self._watch is None else self._watch.looks)

    @property
    def late(self) -> float | None:
        """Lateness, as defined by `Controller`; until it is measured here, the trial's."""
        measured = self._late
        return self._late_on_trial if measured is None else measured

    @property
    def _late(self) -> float | None:
        """Lateness as measured under this composition."""
        return self.condition.lateness.late if self._remembers else 0.0

    def before(self, step: Step, _env: ReducerEnvironment) -> None:
        """Look at units if the judge wants to, or if it is the step to weigh."""
        if self._judge_looks(step.number) or self._is_weighed(step.number):
            step.unit_observers.append(self._look)

    def _judge_looks(self, step: int) -> bool:
        watch = self._watch
        return watch is not None and watch.look is not None and step % watch.every == 0

    def _is_weighed(self, step: int) -> bool:
        return self._remembers and is_weighed(step, self._every, self._cycle)

    def _look(self, flat_buffer: FlatBuffer, unit: Unit, x: Tensor, ctx: ExchangeContext) -> None:
        """Measure a unit before its exchange, in steps in which this is due: run the judge's measurement on
        x, and take the norms of its new and unsent gradient.
        """
        if flat_buffer not in self._flat_buffers:
            return
        if self._judge_looks(ctx.step) and self._watch is not None and self._watch.look is not None:
            seen = self._watch.look(x)
            self._looked = [total + more for total, more in zip(self._looked, seen, strict=True)]
        if self._is_weighed(ctx.step) and ctx.unsent is not None:
            self._scales.weigh(ctx.step, unit, x, ctx.unsent)

    def row(self, step: Step, link: tuple[float, ...]) -> tuple[float, ...]:
        """Numbers of link, weight, health and judge. Looks begin anew: a step that fails is tried again."""
        self._link_numbers = len(link)
        told = self._told(step.number) if self._remembers else ()
        if self._judge is None:
            return (*link, *told)
        looked = [*self._looked, _energy(self._flat_buffers)] if self._judge_looks(step.number) else []
        self._looked = self._nothing
        return (*link, *told, *self._previous_s, *looked)

    def _told(self, step: int) -> tuple[float, ...]:
        """Numbers for this rank's row: norms of the previous step, which a device has computed by now; and at
        times losses.

        They are zeros if nothing was measured, because rows of ranks at different steps must be equally long.
        """
        weighed = self._scales.told(step, self._layers)
        losses = self._health.drain() if self._tells_losses(step) else Losses(0.0, 0.0, 0.0)
        return (*weighed, *losses)

    def _tells_losses(self, step: int) -> bool:
        return step > 0 and step % EVERY == 0

    def observe(self, step: Step, rows: Rows, *, committed: bool) -> Composition | None:
        """Hand the numbers of all ranks to the judge. It gets none of a step that was not committed."""
        link, link_change = self._hear(step.number, [row[: self._link_numbers] for row in rows])
        rows = [row[self._link_numbers :] for row in rows]
        if self._remembers:
            self._examine(step.number, [row[:TOLD] for row in rows])
            rows = [row[TOLD:] for row in rows]
        if self._judge is None:
            return None
        took, compressed, *looked = zip(*rows, strict=True)
        self._previous_s = step.lasted_s(), step.trace.compress_s
        self._link_change = link_change or self._link_change
        if not committed:
            return None
        link_change, self._link_change = self._link_change, None
        unhealthy, self.condition.sign = self.condition.sign, ""
        step_change_s = self._steps.change_s(max(took), link_has_changed=link_change is not None)
        shown = StepObservation(
            step.number,
            max(took),
            max(compressed),
            link=link,
            link_change=link_change,
            step_change_s=step_change_s,
            unhealthy=unhealthy,
            late=self._late,
            late_is_known=not self._remembers or self.condition.lateness.is_known,
        )
        if self._judge_looks(step.number):
            *sums, left = map(sum, looked)
            shown = replace(shown, looked=tuple(sums), left=left)
        return self._judge(shown)

    def _examine(self, step: int, rows: Rows) -> None:
        """Take the norms of all ranks, and look for signs that training suffers; each composition is reported
        once.
        """
        weighed = [Weighed(*row[: len(Weighed._fields)]) for row in rows]
        condition = self.condition
        condition.lateness.add(weighed)
        if not self._tells_losses(step):
            return
        fresh, unsent = (math.hypot(*each) for each in list(zip(*weighed, strict=True))[:2])
        losses = pooled([Losses(*row[len(Weighed._fields) :]) for row in rows])
        signs = [each for each in (condition.lag.add(fresh, unsent), self._health.trend.add(losses)) if each]
        if signs and not condition.has_complained:
            condition.has_complained, condition.sign = True, " and ".join(signs)
            self._health.complaints.append((step, condition.sign))


class Scales:
    """Norms of the units of `flat_buffers` in one step, reported in a later one. `fetch` copies from a
    device. Until they are reported, they wait in `condition`."""

    def __init__(
        self,
        flat_buffers: Sequence[FlatBuffer],
        fetch: Callable[[Tensor], Callable[[], Tensor]],
        condition: Condition,
    ) -> None:
        self._flat_buffers, self._fetch = (
            {flat_buffer.number: flat_buffer for flat_buffer in flat_buffers},
            fetch,
        )
        self._places = {
            flat_buffer.number: {slot.spec.name: place for place, slot in enumerate(flat_buffer.slots)}
            for flat_buffer in flat_buffers
        }
        self._now: dict[int, Weighing] = {}
        self._condition = condition

    def weigh(self, step: int, unit: Unit, x: Tensor, unsent: Tensor) -> None:
        """Add the norms of `unit`, before its exchange in `step`. x and `unsent` are as in `Weighing.add`."""
        flat_buffer, places = self._flat_buffers[unit.flat_buffer], self._places[unit.flat_buffer]
        weighing = self._now.get(unit.flat_buffer)
        if weighing is None:
            weighing = self._now[unit.flat_buffer] = Weighing(
                len(places), x.device, flat_buffer.memory.weight
            )
        coefficient = flat_buffer.memory.coefficient(step)
        first, sizes = (
            places[unit.parts[0].name],
            [part.numel for part in unit.parts],
        )
        weighing.add(x, unsent, coefficient=coefficient, first=first, sizes=sizes)

    def told(self, step: int, layers: Layers) -> Weighed:
        """Norms measured before this step; zeros if there are none. Those of this step are copied for the
        next call.

        A step number that repeats belongs to a step that did not count, or to one with several exchanges. In
        both cases, only the last norms are reported.
        """
        before, self._condition.waiting = self._condition.waiting, None
        if self._now:
            norms = torch.cat([self._now[number].norms() for number in sorted(self._now)], dim=1)
            fetched, self._now = self._fetch(norms), {}
            # Once: a checkpoint may ask for them, too.
            self._condition.waiting = step, cache(partial(self._weighed, fetched, layers))
        if before is None or before[0] == step:
            return Weighed()
        return before[1]()

    def _weighed(self, fetched: Callable[[], Tensor], layers: Layers) -> Weighed:
        fresh, unsent = fetched().tolist()
        return layers.weighed(fresh, unsent)


TOLD = len(Weighed._fields) + len(Losses._fields)
"""Numbers of a rank about lateness and losses."""


def _energy(flat_buffers: Sequence[FlatBuffer]) -> float:
    """Sum of squares, in float64, of the present contents of the current step's units."""
    return sum(
        float(torch.linalg.vector_norm(flat_buffer.x, dtype=torch.float64)) ** 2
        for flat_buffer in flat_buffers
    )


def controller_for(
    layout: Layout,
    env: ReducerEnvironment,
    placement: Placement,
    watch: BackwardWatch,
    hear: Callable[[int, Rows], Heard],
    layout_of: Callable[[Composition, torch.device], Layout],
    health: Health,
) -> Controller:
    """The controller while `layout` runs: one that measures if a decision is to be made, else one that only
    observes.

    A rank alone has nothing to decide. The arguments are those of `measuring`, and:

    Args:
        hear: takes the ranks' numbers of a step.
        health: signs that training suffers.
    """
    decision = layout.main.next
    if decision is None or layout.alone:
        return RunningController(layout, placement, hear, health)
    return measuring(decision, layout.specs, env, placement, watch, layout_of)


def watched_in(layout: Layout, world: int) -> Watched:
    """Sizes of the largest flat buffer with the main exchange of `layout`, for its judge."""
    mine = [
        flat_buffer for flat_buffer in layout.flat_buffers if flat_buffer.exchange is layout.main.exchange
    ]
    largest = max(mine, key=lambda flat_buffer: flat_buffer.numel, default=None)
    sizes = () if largest is None else tuple(slot.spec.numel for slot in largest.slots)
    return Watched(world, sizes, layout.tuning)

"""Controllers of the next composition: a recipe's decision once dense steps are measured, then its watch.

Both see only numbers that all ranks have agreed on, so that all decide the same in the same step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from gradwire.comm import Comm, Round
from gradwire.control.health import EVERY, Health, Lag, Losses, pooled
from gradwire.control.lateness import Lateness, Layers, Weighed, is_weighed
from gradwire.control.profiler import ORDINARY, WarmupProfiler
from gradwire.environment import cores_per_rank
from gradwire.exchange.base import steady_rounds
from gradwire.measure.clock import BackwardWatch, clock_of
from gradwire.measure.codec import codec_cost, payloads
from gradwire.measure.link import Traffic
from gradwire.measure.norms import Weighing
from gradwire.measure.probe import BUDGET_S, name_of, network_of, probe, slowest, table_of
from gradwire.memory import UNSENT
from gradwire.placement import Device, Placement
from gradwire.planning.change_detection import THRESHOLD, StepWatch
from gradwire.planning.collectives import serial_bytes
from gradwire.planning.costs import ENOUGH, CodecCost, Line, Link
from gradwire.planning.facts import Facts, StepObservation, Watched
from gradwire.planning.links import calibrated
from gradwire.planning.step_time import overhead_factor
from gradwire.recipes import Composition, Decision
from gradwire.recipes.parse import short
from gradwire.step.arena import Lane, ParameterSpec, Unit
from gradwire.step.context import ExchangeContext
from gradwire.step.environment import EngineEnvironment, StepObserver
from gradwire.step.layout import Layout
from gradwire.step.step import Step

_LOG = logging.getLogger("gradwire")

Rows = Sequence[Sequence[float]]
"""The facts in a verdict, by rank."""


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

    def row(self, step: Step, link: tuple[float, ...]) -> tuple[float, ...]:
        """This rank's facts. `link` is what the previous step's rounds say of the link."""

    def observe(self, step: Step, rows: Rows, *, committed: bool) -> Composition | None:
        """Take all ranks' facts of a step that had a verdict; what is to run from now on, if that changes."""


class WarmupController:
    """Dense steps are measured until `decision` has what it needs; then it decides, once.

    `watch` times the backward pass of the current step.
    """

    measuring = True
    late = 0.0

    def __init__(
        self,
        decision: Decision,
        specs: Sequence[ParameterSpec],
        env: EngineEnvironment,
        placement: Placement,
        watch: BackwardWatch,
    ) -> None:
        self.facts: Facts | None = None
        self.profiler = WarmupProfiler(
            [spec.numel for spec in specs], ORDINARY if decision.whole_steps else 0
        )
        self.decision, self.specs, self.env = decision, specs, env
        self.may_follow: tuple[Composition, ...] = () if decision.about is None else (decision.about,)
        """Compositions that the decision may make, whose links are probed."""
        self._placement, self._watch = placement, watch

    @property
    def is_serial(self) -> bool:
        """Whether the current step takes computation and communication apart."""
        return self.profiler.is_serial

    def before(self, step: Step, _env: EngineEnvironment) -> None:
        """Times are all that is needed of gradients."""

    def row(self, step: Step, link: tuple[float, ...]) -> tuple[float, ...]:
        """The profiler's row. Nothing is said of the link, which is probed in the end."""
        return self.profiler.row(lambda: step.times(self.specs, self._watch))

    def observe(self, step: Step, rows: Rows, *, committed: bool) -> Composition | None:
        """Once there are enough facts, survey the rest of them, a collective, and decide.

        Where communication hides in ordinary steps, none is taken apart, and nothing is surveyed.
        """
        took_s = step.lasted_s()
        facts = self.profiler.observe(rows, took_s, step.exposed(took_s))
        if facts is None:
            exposed = self.profiler.exposed
            return self.decision.hidden(exposed) if exposed else None
        # Verdicts have more rows where ranks hold shards.
        facts = replace(facts, buckets=tuple(step.direct), world=self.env.world)
        return self.decide(
            surveyed(facts, self.decision, self.env, self._placement, self.specs, self.may_follow)
        )

    def decide(self, facts: Facts) -> Composition | None:
        """The composition to run, or `None` if more has to be measured first."""
        self.facts = facts
        return self.decision.decide(facts)


def measuring(
    decision: Decision,
    specs: Sequence[ParameterSpec],
    env: EngineEnvironment,
    placement: Placement,
    watch: BackwardWatch,
    layout_of: Callable[[Composition, torch.device], Layout],
) -> WarmupController:
    """The controller that measures for `decision`; `layout_of` lays parameters out for a composition."""
    if not decision.candidates:
        return WarmupController(decision, specs, env, placement, watch)
    # Loaded by what chooses among recipes.
    from gradwire.control.auto import AutoController

    return AutoController(decision, specs, env, placement, watch, layout_of)


Heard: TypeAlias = tuple[Link | None, tuple[Link, Link] | None]
"""The assumed link, and its change, before and after, if it has just changed."""


class RunningController:
    """Watches the running composition: by its judge, if it has one, and for how late the gradient is.

    The judge's numbers are how long the last step took and its codec, and, where units were looked at, the
    result and the energy of what their exchanges have left. Those of lateness and health are what ranks have
    weighed (`control.lateness`), one step later, and the losses noted since. A composition on trial is
    weighed in each step. `hear(step, rows)` takes what all ranks said of the link.
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
        self._lanes = [lane for lane in layout.lanes if lane.exchange is layout.main.exchange]
        remembering = [lane for lane in self._lanes if UNSENT in lane.committed]
        self._remembers = bool(remembering)
        self._scales = Scales(remembering, placement.fetch)
        cycle = max((lane.exchange.laws.cycle for lane in remembering), default=1)
        is_on_trial = self._watch is not None and self._watch.ends
        self._cycle, self._every = cycle, cycle if is_on_trial else max(EVERY, cycle)
        self.lateness, self._layers = Lateness(cycle), Layers(cycle)
        self._lag = Lag()
        table = layout.main.table
        self._late_on_trial = next((row.late for row in table if row.verdict == "runs"), None)
        self._link_change: tuple[Link, Link] | None = None
        self._unhealthy, self._has_complained = "", False
        self._looked = self._nothing
        self._previous_s = (0.0, 0.0)
        self._steps = StepWatch(THRESHOLD if self._watch is None else self._watch.link_change)
        self._link_numbers = 0

    @property
    def _nothing(self) -> list[float]:
        return [0.0] * (0 if self._watch is None else self._watch.looks)

    @property
    def late(self) -> float | None:
        """As the `Controller` says. Until it has been measured here, it is that of the trial before."""
        measured = self._late
        return self._late_on_trial if measured is None else measured

    @property
    def _late(self) -> float | None:
        """Lateness as measured under this composition."""
        return self.lateness.late if self._remembers else 0.0

    def before(self, step: Step, _env: EngineEnvironment) -> None:
        """Look at units if the judge wants to, or if it is the step to weigh."""
        if self._judge_looks(step.number) or self._is_weighed(step.number):
            step.looks.append(self._look)

    def _judge_looks(self, step: int) -> bool:
        watch = self._watch
        return watch is not None and watch.look is not None and step % watch.every == 0

    def _is_weighed(self, step: int) -> bool:
        return self._remembers and is_weighed(step, self._every, self._cycle)

    def _look(self, lane: Lane, unit: Unit, x: Tensor, ctx: ExchangeContext) -> None:
        """Look as the judge does, and weigh what is fresh and what was unsent, if it is the step for it."""
        if lane not in self._lanes:
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
        looked = [*self._looked, _energy(self._lanes)] if self._judge_looks(step.number) else []
        self._looked = self._nothing
        return (*link, *told, *self._previous_s, *looked)

    def _told(self, step: int) -> tuple[float, ...]:
        """Norms weighed one step ago: by then a device has done it. Zeros where nothing was, because rows
        of ranks at different steps must be alike in length; and losses, now and then."""
        weighed = self._scales.told(step, self._layers)
        losses = self._health.drain() if self._tells_losses(step) else Losses(0.0, 0.0, 0.0)
        return (*weighed, *losses)

    def _tells_losses(self, step: int) -> bool:
        return step > 0 and step % EVERY == 0

    def observe(self, step: Step, rows: Rows, *, committed: bool) -> Composition | None:
        """Hand what all ranks said to the judge. A step that was not committed says nothing to it."""
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
        unhealthy, self._unhealthy = self._unhealthy, ""
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
            late_is_known=not self._remembers or self.lateness.is_known,
        )
        if self._judge_looks(step.number):
            *sums, left = map(sum, looked)
            shown = replace(shown, looked=tuple(sums), left=left)
        return self._judge(shown)

    def _examine(self, step: int, rows: Rows) -> None:
        """Take what all ranks have weighed, and look for bad signs; a composition complains once."""
        weighed = [Weighed(*row[: len(Weighed._fields)]) for row in rows]
        self.lateness.add(weighed)
        if not self._tells_losses(step):
            return
        fresh, unsent = (math.hypot(*each) for each in list(zip(*weighed, strict=True))[:2])
        losses = pooled([Losses(*row[len(Weighed._fields) :]) for row in rows])
        signs = [each for each in (self._lag.add(fresh, unsent), self._health.trend.add(losses)) if each]
        if signs and not self._has_complained:
            self._has_complained, self._unhealthy = True, " and ".join(signs)
            self._health.complaints.append((step, self._unhealthy))


class Scales:
    """Weighs the units of `lanes` in a step, for a later one to tell; `fetch` copies from a device."""

    def __init__(self, lanes: Sequence[Lane], fetch: Callable[[Tensor], Callable[[], Tensor]]) -> None:
        self._lanes, self._fetch = {lane.number: lane for lane in lanes}, fetch
        self._places = {
            lane.number: {slot.spec.name: place for place, slot in enumerate(lane.slots)} for lane in lanes
        }
        self._now: dict[int, Weighing] = {}
        self._thrown_away = 0.0
        self._fetched: tuple[int, Callable[[], Tensor]] | None = None

    def weigh(self, step: int, unit: Unit, x: Tensor, unsent: Tensor) -> None:
        """Weigh a unit before its exchange."""
        lane, places = self._lanes[unit.lane], self._places[unit.lane]
        weighing = self._now.get(unit.lane)
        if weighing is None:
            weighing = self._now[unit.lane] = Weighing(len(places), x.device, lane.memory.weight)
        coefficient = lane.memory.coefficient(step)
        self._thrown_away = 1.0 - coefficient
        first, sizes = (
            places[unit.pieces[0].slot.spec.name],
            [piece.stop - piece.start for piece in unit.pieces],
        )
        weighing.add(x, unsent, coefficient=coefficient, first=first, sizes=sizes)

    def told(self, step: int, layers: Layers) -> Weighed:
        """Norms that were weighed before this step; zeros if none were. Those of this step come next.

        A number that comes again is of a step that did not count, or of one with several exchanges, of which
        the last is told.
        """
        before, self._fetched = self._fetched, None
        if self._now:
            norms = torch.cat([self._now[number].norms() for number in sorted(self._now)], dim=1)
            self._fetched, self._now = (step, self._fetch(norms)), {}
        if before is None or before[0] == step:
            return Weighed()
        fresh, unsent = before[1]().tolist()
        return layers.weighed(fresh, unsent, self._thrown_away * math.hypot(*unsent))


TOLD = len(Weighed._fields) + len(Losses._fields)
"""Numbers of a rank about lateness and losses."""


def _energy(lanes: Sequence[Lane]) -> float:
    """The sum of squares of what is in the current step's units now, in float64."""
    return sum(float(torch.linalg.vector_norm(lane.x, dtype=torch.float64)) ** 2 for lane in lanes)


def controller_for(
    layout: Layout,
    env: EngineEnvironment,
    placement: Placement,
    watch: BackwardWatch,
    hear: Callable[[int, Rows], Heard],
    layout_of: Callable[[Composition, torch.device], Layout],
    health: Health,
) -> Controller:
    """The controller while `layout` runs; a rank alone has nothing to decide."""
    decision = layout.main.next
    if decision is None or layout.alone:
        return RunningController(layout, placement, hear, health)
    return measuring(decision, layout.specs, env, placement, watch, layout_of)


def watched_in(layout: Layout, world: int) -> Watched:
    """Sizes of the largest lane in which the exchange of `layout` works, for its judge."""
    mine = [lane for lane in layout.lanes if lane.exchange is layout.main.exchange]
    largest = max(mine, key=lambda lane: lane.numel, default=None)
    sizes = () if largest is None else tuple(slot.spec.numel for slot in largest.slots)
    return Watched(world, sizes, layout.tuning)


def may_follow(now: Layout, following: Layout, comm: Comm) -> bool:
    """Whether no rank's unsent gradient would lose its place. A collective where a place is lost."""
    homeless = now.homeless_in(following)
    left = any(bool(now.memory(name).any() or now.final(name).any()) for name in homeless)
    return not homeless or slowest(comm, [float(left)]) == [0.0]


def handed_over(now: Layout, asked: Layout, comm: Comm) -> Composition | None:
    """The composition after `now` where `asked` shall run: that, or first one that sends all that is unsent.

    `None` where that is running already. A collective where a place is lost.
    """
    if may_follow(now, asked, comm):
        return asked.main
    from gradwire.recipes.drain import sending_unsent  # few runs need it

    first = sending_unsent(asked.main)
    return None if first == now.main else first


def traffic_for(layout: Layout, env: EngineEnvironment) -> Traffic:
    """The record of the link while `layout` runs: under another layout, messages had other sizes."""
    threshold = THRESHOLD if layout.main.watch is None else layout.main.watch.link_change
    return Traffic(env.world, env.control.world, threshold)


PROBED = ("all_reduce", "all_gather")
"""Verbs that most recipes use. One that is not probed is taken to have the first one's link."""

_TYPICAL = 1 << 20
"""Elements of the unit whose payloads are counted."""


def surveyed(
    facts: Facts,
    decision: Decision,
    env: EngineEnvironment,
    placement: Placement,
    specs: Sequence[ParameterSpec],
    may_follow: Sequence[Composition] = (),
) -> Facts:
    """`facts` with what is found out now. A collective, in the same step on all ranks, which all get the
    same numbers. The links are those that `may_follow` would use; their bandwidth follows from what the dense
    steps sent."""
    comm, control = placement.comm, placement.control
    gradient_bytes = float(sum(spec.numel * spec.dtype.itemsize for spec in specs))
    facts = replace(facts, gradient_bytes=gradient_bytes)
    if comm.world > 1:
        memory, verbs = placement.memory, links_for(may_follow, comm.world)
        # Training waits, so sizes grow only as far as all probes together take no longer than a step. The
        # smallest tell the latency, and dense steps have told the bandwidth.
        budget_s = min(BUDGET_S, (facts.dense_s or math.inf) / len(verbs))
        where, clock = memory.where, clock_of(memory)
        byte_s = facts.allreduce_s / max(serial_bytes("all_reduce", gradient_bytes, comm.world), 1.0)
        found = probe(
            comm, verbs, budget_s=budget_s, control=control, where=where, clock=clock, byte_s=byte_s
        )
        probed = network_of(found)
        number = len(facts.collectives_s)
        network = calibrated(probed, facts.allreduce_s, facts.gradient_bytes, number, comm.world)
        sent_bytes = Round("all_reduce", int(gradient_bytes), torch.uint8).wire_bytes(comm.world)
        # A thread that waits for a device spins, and its processor time is that of no collective.
        spent_s = facts.sending_s if placement.device.is_host else 0.0
        dear = overhead_factor(spent_s, number, sent_bytes)
        mine = replace(facts.cores, share=fewest_cores(control), overhead_factor=dear)
        cores = mine if memory.is_host else ENOUGH  # a codec on a device takes no core
        facts = replace(facts, network=network, cores=cores)
    if (about := decision.about) is not None:
        codec = agreed_cost(about, control, placement.memory)
        facts = replace(facts, codec=codec, payloads=payloads(about.exchange, _TYPICAL, comm.world))
    if decision.uses:
        names = [spec.name for spec in specs if len(spec.whole.shape) > 1]
        uses = env.uses()
        most = slowest(control, [uses.get(name, 0.0) for name in names])
        facts = replace(facts, uses=dict(zip(names, most, strict=True)))
    return facts


def fewest_cores(control: Comm) -> float | None:
    """The share of cores of the rank that has least; `None` where a rank does not know its own."""
    mine = cores_per_rank()
    least = min(row[0] for row in table_of(control, [0.0 if mine is None else mine]))
    return least or None


def links_for(may_follow: Sequence[Composition], world: int) -> tuple[str, ...]:
    """The verbs to probe: `PROBED`, and the others that the recipes use, as far as they can be probed.

    A function of the recipes alone, so that all ranks probe the same.
    """
    rounds = (each for one in may_follow for each in steady_rounds(one.exchange, _TYPICAL, world))
    names = (name_of(each) for each in rounds)
    return tuple(dict.fromkeys((*PROBED, *(name for name in names if name is not None))))


def agreed_cost(composition: Composition, comm: Comm, memory: Device) -> CodecCost | None:
    """The codec's cost on the slowest rank, for which all wait; `None` if some rank cannot measure it."""
    failure: BaseException | None = None
    try:
        cost = codec_cost(composition.exchange, composition.text, memory)
        mine = [cost.encode.base_s, cost.encode.slope_s, cost.decode.base_s, cost.decode.slope_s]
    except BaseException as error:
        # Peers wait for this rank's numbers, whatever happens here.
        failure, mine = error, [math.inf] * 4
    numbers = slowest(comm, mine)
    if failure is not None:
        # Not a warning, which a user may have made an error: this rank alone would stop, and peers wait.
        _LOG.warning("the codec of %s could not be measured: %r", short(composition.text), failure)
    return cost_of(numbers)


def cost_of(numbers: Sequence[float]) -> CodecCost | None:
    """The cost from its four numbers, to encode and to decode; `None` if some rank could not measure it."""
    base_s, slope_s, decode_base_s, decode_slope_s = numbers
    if math.inf in numbers:
        return None
    return CodecCost(Line(base_s, slope_s), Line(decode_base_s, decode_slope_s))

"""From arriving buckets to committed means: the agreed order, the exchanges, the verdict.

Everything here runs on one thread (the ordered worker, or a test's own), so that every rank issues the
same collectives in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradwire.adapt import Settler
from gradwire.arena import Lane, ParameterSpec, Unit
from gradwire.comm import Comm
from gradwire.ddp.alone import only_compresses, uncompressed
from gradwire.ddp.arrival import Arrival
from gradwire.ddp.buffers import Carried
from gradwire.ddp.intake import Run, Share
from gradwire.ddp.layout import Layout, Policy, build, plain
from gradwire.ddp.runner import Post, Runner
from gradwire.ddp.step import Step, Task
from gradwire.ddp.survey import aim_of, settler_for, surveyed
from gradwire.ddp.tail import SMALL_BYTES, Small, Tail
from gradwire.ddp.verdict import Row, Verdict, plan_number
from gradwire.ddp.watcher import Watcher, may_follow
from gradwire.errors import RanksDisagree, TransportError
from gradwire.measure import BackwardWatch, Change, Observed, stopwatch_for
from gradwire.measure.traffic import Traffic
from gradwire.memory import UNSENT, Gradients
from gradwire.moment import Moment, Replicas
from gradwire.plan import Facts, Link
from gradwire.recipes import Composition, Recipe

CPU, META = torch.device("cpu"), torch.device("meta")


@dataclass(frozen=True)
class Aside:
    """What an engine ran at some moment."""

    layout: Layout
    step: int
    plan: str | None
    settler: Settler | None
    watcher: Watcher | None


class Engine:
    """The state of one attached model on one rank.

    `post` runs a function on the engine's thread; `concluded` is called there once per step. Without a
    fixed recipe the engine runs dense and measures until its `Settler` has decided, on the same step on
    all ranks, because it sees only numbers from verdicts. `alone` is for a single rank, which has nothing
    to send: it compresses nothing (`ddp/alone.py`). `plan` is the text of what was decided on, `None` before.
    """

    def __init__(
        self,
        comm: Comm,
        specs: Sequence[ParameterSpec],
        recipe: Recipe,
        *,
        post: Post,
        concluded: Callable[[Step], None] = lambda _step: None,
        policy: Policy | None = None,
        seed: int = 0,
        memory_dtype: torch.dtype | None = None,
        alone: bool = False,
    ) -> None:
        self.comm, self.specs, self.recipe = comm, tuple(specs), recipe
        self.step = 0
        self.facts: Facts | None = None
        self.loss_scale: Callable[[], float] = lambda: 1.0
        self.check_layout: Callable[[Layout], None] = lambda _layout: None
        self.replicas: Replicas = lambda _name: None
        self.uses: Callable[[], Mapping[str, float]] = dict
        self.buffers: Callable[[], Carried | None] = lambda: None
        self.link_seen: Callable[[Link | None], None] = lambda _link: None
        self.prepare: Callable[[Layout], None] = lambda _layout: None
        self.watch = BackwardWatch(stopwatch_for(CPU))
        self.inspect: Callable[[Lane, Unit, Tensor, Moment], None] | None = None
        self.traffic = Traffic(comm.world)
        self.link_changes: deque[tuple[int, Change]] = deque(maxlen=16)
        self.runner = Runner(post, self._progress, one_by_one=lambda: self.apart)
        self._post, self._concluded, self._policy, self._seed = post, concluded, policy, seed
        self._memory_dtype = memory_dtype
        self._alone = alone
        self._now: Step | None = None
        self.start_over()

    # -- plans: changed between steps only, on all ranks in the same one

    def start_over(self) -> None:
        """Install the recipe, or dense steps that measure what it needs to decide."""
        built = self.recipe.build()
        fixed = built if isinstance(built, Composition) else None
        self.facts = None
        decided = fixed is not None
        self.run(self.here(self.layout_of(fixed or plain()), decided=decided), decided=decided)

    def run(self, layout: Layout, *, decided: bool) -> None:
        """From the next step on `layout`, with the memory that it has; until it is `decided`, measure."""
        measures = not (decided or layout.alone)
        self.prepare(layout)
        self._watcher = self._watcher_of(layout)
        self.layout, self.plan = layout, layout.main.text if decided else None
        self._settler = settler_for(self.recipe.build(), self.specs) if measures else None
        self.traffic = Traffic(self.comm.world)  # another plan sends other sizes

    def layout_of(self, composition: Composition, device: torch.device = CPU) -> Layout:
        """Who would travel how under another composition; the policy stays."""
        return build(self.specs, composition, self._policy, device, self._memory_dtype)

    def here(self, asked: Layout, *, decided: bool = True, owing: bool = False) -> Layout:
        """`asked`, or what runs instead of it on a rank alone; `owing` as for `uncompressed`.

        While nothing is `decided`, what the recipe says of its decision counts.
        """
        aim = asked if decided else self.layout_of(aim_of(self.recipe), META)
        if self._alone and only_compresses(aim):
            return uncompressed(asked, CPU, self._memory_dtype, owing=owing)
        return asked

    def install(self, composition: Composition) -> None:
        """Change what runs. Memory moves along by parameter name; what is unsent may not be dropped."""
        layout = self.here(self.layout_of(composition))
        layout.take_over(self.layout)
        self.run(layout, decided=True)

    def _watcher_of(self, layout: Layout) -> Watcher | None:
        if layout.main.watch is None:
            return None
        mine = [lane for lane in layout.lanes if lane.exchange is layout.main.exchange]
        largest = max(mine, key=lambda lane: lane.numel, default=None)
        sizes = [] if largest is None else [slot.spec.numel for slot in largest.slots]
        return Watcher(layout.main.watch, self.comm.world, sizes)

    def retire(self) -> None:
        """From the next step on plain all-reduce, whatever the policy. Flush first."""
        self._policy = None
        self.install(plain())

    def put_aside(self) -> Aside:
        """What runs now, for `take_up`; whatever is installed meanwhile has planes of its own."""
        return Aside(self.layout, self.step, self.plan, self._settler, self._watcher)

    def take_up(self, aside: Aside) -> None:
        """Go on as if nothing had run since `put_aside`."""
        self.layout, self.step, self.plan = aside.layout, aside.step, aside.plan
        self._settler, self._watcher = aside.settler, aside.watcher
        self.traffic = Traffic(self.comm.world)

    @property
    def measuring(self) -> bool:
        """Whether dense steps still find out what to do."""
        return self._settler is not None

    @property
    def apart(self) -> bool:
        """Whether this step measures computation and communication apart, so that they do not overlap."""
        return self._settler is not None and self._settler.apart

    @property
    def plan_number(self) -> int:
        """Fingerprint of all that must agree between ranks before a step counts."""
        cuts = tuple(unit.start for lane in self.layout.lanes for unit in lane.units)
        return plan_number(self.step, self.layout.main.text, cuts, self.measuring)

    # -- arrival: fold, and start what is complete

    def arrive(self, arrival: Arrival) -> None:
        """Take in a bucket. Raises nothing: errors go to the step, which `concluded` delivers."""
        opens = self._now is None
        step = self._now = self._now or Step(self.step, self.layout.main.text)
        # First of all, so that an error further down can end the step.
        step.all_arrived = arrival.is_last
        step.arrive(arrival)
        if opens:
            self._open(step, arrival)
        intake = self.layout.intake(arrival.entries)
        for run in intake.runs:
            self._launch_direct(step, arrival, run)
        for share in intake.shares:
            self._fold(step, arrival, share)
        for unit in step.completed(intake.units):
            self._launch_unit(step, unit)
        self._send_early(step)
        self._progress(step)

    def _open(self, step: Step, arrival: Arrival) -> None:
        step.scale = self.loss_scale()
        step.started_s = min(self.watch.take_begun_s(), arrival.at_s)
        step.before_s = self.watch.before_s(step.started_s)
        step.buffers = carried = self.buffers()
        if carried is not None:
            if carried.failure is not None:
                step.fail(carried.failure, "pack of buffers", self.comm.rank)
            self.runner.issue(lambda: carried.send(Observed(self.comm, step.trace, "buffers")))

    def _fold(self, step: Step, arrival: Arrival, share: Share) -> None:
        lane, scale = share.lane, share.lane.scale(step.scale) / step.scale
        grads = Gradients(arrival.buffer, share.pieces, scale)
        try:
            with step.trace.compressing("encode", share.label):
                seen = lane.fold(grads, step.number, self.comm.world)
        except BaseException as error:
            step.fail(error, f"fold of {share.label}", self.comm.rank)
            return
        step.finite &= seen.finite
        for slot in (share.slots[number] for number in seen.idle):
            # DDP throws away what a hook returns for unused parameters, and join() sends zeros from
            # finished ranks: no memory may be spent on them.
            lane.x[slot.start : slot.stop].zero_()
            step.idle.append((lane, slot))

    def _launch_direct(self, step: Step, arrival: Arrival, run: Run) -> None:
        region, label, exchange = arrival.buffer[run.region], run.label, run.exchange
        wide = region.dtype == torch.float64 or region.nbytes >= SMALL_BYTES
        if not wide and not self.layout.is_plain:
            step.tail_regions.update(zip(run.names, region.split_with_sizes(run.sizes), strict=True))
            return
        at = Moment(step.number, len(step.direct), self.comm.rank, self.comm.world, self._seed, lane=-1)
        step.direct.append(region.numel())
        comm, agreed = self._observed(step, label), exchange.rounds(region.numel(), region.dtype, at)
        self.runner.launch(step, Task(label, exchange, region, region, at, comm, agreed))

    def _launch_unit(self, step: Step, unit: Unit) -> None:
        lane = self.layout.lanes[unit.lane]
        x = lane.x[unit.start : unit.stop]
        where = (unit.index, self.comm.rank, self.comm.world, self._seed, unit.lane, unit.parts)
        at = Moment(
            step.number,
            *where,
            lane.scale(step.scale),
            lane.narrow,
            unsent=lane.committed[UNSENT][unit.start : unit.stop] if UNSENT in lane.committed else None,
            kept=lane.kept,
            replicas=self.replicas,
        )
        if self.inspect is not None:
            self.inspect(lane, unit, x, at)
        if self._watcher is not None and lane.exchange is self.layout.main.exchange:
            self._look(step, unit, x)
        if not (agreed := lane.exchange.rounds(x.numel(), x.dtype, at)):
            step.rest(unit)
            return
        factor = step.scale / at.scale
        mean = step.landing(unit, x, factor)
        task = Task(str(unit), lane.exchange, x, mean, at, self._observed(step, str(unit)), agreed)
        task.land = lambda: step.land(unit, mean, factor)
        self.runner.launch(step, task)

    def _look(self, step: Step, unit: Unit, x: Tensor) -> None:
        assert self._watcher is not None
        try:
            with step.trace.compressing("encode", f"look at {unit}"):
                self._watcher.look(step.number, x)
        except BaseException as error:
            step.fail(error, f"look at {unit}", self.comm.rank)

    def _observed(self, step: Step, label: str) -> Observed:
        return Observed(self.comm, step.trace, label)

    # -- verdict: agree, then commit or leave everything as it was

    def _progress(self, step: Step) -> None:
        """Issue the tail when it may go, judge when it has come back, give up when nothing can."""
        if step.closed or not step.all_arrived:
            return
        try:
            if self.runner.broken is not None:
                raise self.runner.broken
            # A plain all-reduce has no decode that could fail, so its verdict need not wait for it.
            decodes_nothing = self.layout.is_dense and not self.apart
            if step.tail is None and (step.outstanding == 0 or decodes_nothing):
                self._send_tail(step)
            if step.tail is not None and step.tail_ended and step.outstanding == 0 and not step.closed:
                self._judge(step, step.tail)
        except TransportError as error:
            self.runner.broken = step.error = error
            self._close(step)

    def _send_early(self, step: Step) -> None:
        """Small gradients that can be under way beside units, once all of them are here."""
        early = self.layout.early
        if step.early is not None or not (early and step.places.keys() >= early):
            return
        if regions := step.small_in(self.specs, early):
            step.early = Small(regions, self._observed(step, "small"), step.device)
            self.runner.issue(step.early.send)

    def _send_tail(self, step: Step) -> None:
        facts: tuple[float, ...] = self.traffic.row
        if self._settler is not None:
            facts = self._settler.row(lambda: step.times(self.specs, self.watch.ready_s()))
        elif self._watcher is not None:
            facts += self._watcher.row(step.number)
        step.require_all_units(self.layout.lanes, self.comm.rank)
        stale = step.buffers is not None and step.buffers.is_stale
        row = Row(step.finite, step.failure is not None, self.plan_number, facts, stale)
        left = step.tail_regions.keys() - (self.layout.early if step.early is not None else ())
        step.tail = Tail(step.small_in(self.specs, left), row, self._observed(step, "tail"), step.device)

        def ended() -> None:
            step.tail_ended = True
            self._progress(step)

        step.tail.send(lambda: self._post(ended))

    def _judge(self, step: Step, tail: Tail) -> None:
        verdict = tail.verdict()
        step.receive_buffers(verdict.stale)
        for small in step.small:
            small.wait()
            step.record_small(small)
        step.error = verdict.error()
        if step.failure is not None and not isinstance(step.error, RanksDisagree):
            step.error = step.failure  # a rank that disagrees may well fail, but that is not why
        if step.error is None:
            if self._is_finite(step, verdict):
                self._commit(step)
            elif not self.layout.is_plain:
                step.poison()  # plain steps protect nothing: what they have is DDP's own
            self._observe(step, verdict)
        self._close(step)

    def _is_finite(self, step: Step, verdict: Verdict) -> bool:
        """The same answer on all ranks: verdicts and reduced values are, and all else is in the verdict."""
        return verdict.finite and step.finite and all(each.is_finite() for each in step.small)

    def _commit(self, step: Step) -> None:
        for small in step.small:
            small.land()
        for lane in self.layout.lanes:
            lane.commit(slot for owner, slot in step.idle if owner is lane)
        self.step += 1
        step.committed = True

    def _observe(self, step: Step, verdict: Verdict) -> None:
        """Let whoever decides see the facts of a step, and act on what that is."""
        rows = [row.facts for row in verdict.rows]
        if self._settler is None:
            self._watch_on(step, rows)
            return
        if (facts := self._settler.observe(rows, step.lasted_s())) is not None:
            decide = self.recipe.build()
            assert not isinstance(decide, Composition), "a fixed recipe does not measure"
            facts = replace(facts, buckets=tuple(step.direct))
            self.facts = surveyed(facts, decide, self.comm, self.specs, self.uses())
            self.install(decide(self.facts))

    def _watch_on(self, step: Step, rows: Sequence[Sequence[float]]) -> None:
        """Has the link changed, and does a watched composition want to be followed by another?"""
        own = len(self.traffic.row)
        changes = self.traffic.hear([row[:own] for row in rows])
        self.link_changes.extend((step.number, change) for change in changes)
        self.link_seen(self.traffic.link)
        if self._watcher is not None:
            took_s = step.lasted_s(), step.trace.compress_s
            told = [row[own:] for row in rows]
            link = self.traffic.link
            following = self._watcher.observe(step.number, told, took_s, step.committed, link)
            if following is not None and may_follow(self.layout, self.layout_of(following, META), self.comm):
                self.install(following)

    def crash(self, error: BaseException) -> None:
        """An error of our own outside any exchange: the order is lost, so nothing can go on."""
        self.runner.broken = TransportError(f"internal error: {error!r}")
        self.runner.broken.__cause__ = error
        if self._now is not None:
            self._progress(self._now)

    def _close(self, step: Step) -> None:
        step.closed = True
        self._now = None
        self.traffic.note(step.trace.rounds) if step.error is None else self.traffic.forget()
        for lane in self.layout.lanes:
            lane.kept.discard()
        if step.error is not None:
            # Half-exchanged buckets must not pass for gradients, should someone catch the error.
            step.poison()
        if step.error is not None and not hasattr(step.error, "__notes__"):
            step.error.add_note(f"gradwire: step {step.number}, rank {self.comm.rank}, {step.plan}")
        self._concluded(step)

"""From arriving gradients to committed means: the agreed order, the exchanges, the verdict.

Everything here runs on one thread at a time, so that every rank issues the same collectives in the same
order. That is the worker's or a test's own. Where collectives are work in a stream, the thread that brings
gradients runs the steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradwire.checkpoint.shards import Shard
from gradwire.control.controller import Controller, Heard, Rows, controller_for, handed_over, traffic_for
from gradwire.control.health import Health
from gradwire.errors import DAMAGED, GradwireError, RanksDisagree, TransportError
from gradwire.measure.clock import BackwardWatch, clock_of, stopwatch_for
from gradwire.measure.link import Change, is_apart
from gradwire.measure.metered import MeteredComm
from gradwire.memory import UNSENT, Gradients
from gradwire.placement import Placement
from gradwire.planning.facts import Facts
from gradwire.recipes import Composition, Recipe
from gradwire.recipes.dense import dense
from gradwire.step.arena import Lane, ParameterSpec, Unit
from gradwire.step.arrival import Arrival, DirectRun, LaneShare
from gradwire.step.context import ExchangeContext, Fates
from gradwire.step.environment import EngineEnvironment
from gradwire.step.layout import Layout, build, only_compresses, uncompressed
from gradwire.step.runner import ExchangeRunner
from gradwire.step.step import ExchangeTask, Outcome, Step
from gradwire.step.verdict import RankReport, SmallReduce, Verdict, VerdictReduce, plan_number, rides

META = torch.device("meta")

_MOMENTUM_TWICE = (
    "several backward passes are exchanged before one optimizer step, and the recipe applies momentum: the "
    "first pass would enter the momentum twice. Wrap all passes but the last in wire.no_sync()"
)


@dataclass(frozen=True)
class Snapshot:
    """A layout, with its memory, that an engine runs or could run from a step on: for `restore`."""

    layout: Layout
    step: int
    plan: str | None
    controller: Controller
    env: EngineEnvironment
    placement: Placement
    facts: Facts | None


class Engine:
    """The state of one attached model on one rank; `env` is all that it needs from outside.

    A `Controller` changes what runs, in the same step on all ranks, because it sees only numbers from
    verdicts. `plan` is the text of what runs, `None` while dense steps are measured.
    """

    def __init__(self, specs: Sequence[ParameterSpec], recipe: Recipe, env: EngineEnvironment) -> None:
        self.specs, self.recipe, self.env = tuple(specs), recipe, env
        self.rank = env.control.rank
        """The number that names this rank in messages."""
        device, self.health = env.usual.device, Health()
        self.watch = BackwardWatch(stopwatch_for(device), exact=clock_of(device))
        self.link_changes: deque[tuple[int, Change]] = deque(maxlen=16)
        self.runner = ExchangeRunner(lambda: self.placement, self._progress, self.rank)
        self._now: Step | None = None
        self._unresolved: Callable[[], None] | None = None
        """Commits the last step, or forgets it, where that is still to be done."""
        self._following: Composition | None = None
        self.begin_anew()
        self.restore(self.prepared(self.layout_to_run(self.layout_of(recipe.build())), step=0))

    # -- plans: changed between steps only, on all ranks in the same one

    def prepared(self, layout: Layout, step: int | None = None) -> Snapshot:
        """A snapshot of `layout`, with the memory that it has, for `restore`; from `step` on, or else as now.

        All that can fail is done here, and nothing changes: ranks can agree before any of them goes on.
        """
        decision, env, placement = layout.main.next, self.env, self.env.placed(layout)
        env.compile_for(layout)
        if decision is not None and decision.about is not None:
            # Whatever the facts will be, its codec is timed and then used.
            foreseen = self.layout_of(decision.about, META)
            env.compile_for(foreseen)
        controller = controller_for(
            layout, env, placement, self.watch, self._hear, self.layout_of, self.health
        )
        plan = layout.main.text if decision is None else None
        step, facts = (self.step, self.facts) if step is None else (step, None)
        return Snapshot(layout, step, plan, controller, env, placement, facts)

    def layout_of(self, composition: Composition, device: torch.device | None = None) -> Layout:
        """The layout of parameters under another composition, by default where that would run."""
        env = self.env
        if device is None:
            where = env.usual if env.on_host is None else env.placed(self.layout_of(composition, META))
            device = where.memory.where
        given = env.world, env.memory_dtype, env.tuning
        return build(self.specs, composition, env.policy, device, *given)

    def layout_to_run(self, asked: Layout, *, owing: bool = False) -> Layout:
        """`asked`, or what runs instead of it on a rank alone; `owing` as for `uncompressed`.

        Of dense steps that measure, what their decision is about counts.
        """
        following = asked.main.next
        aim = asked if following is None or following.about is None else self.layout_of(following.about, META)
        if self.env.alone and only_compresses(aim):
            device = self.env.usual.memory.where
            return uncompressed(asked, device, self.env.memory_dtype, owing=owing)
        return asked

    def install(self, composition: Composition) -> None:
        """Change what runs. Memory moves along by parameter name; what is unsent may not be dropped."""
        self.restore(self.successor(composition))

    def follow(self, following: Composition) -> None:
        """Change what runs, to `first_of` it (a collective)."""
        self._following, first = None, self.first_of(following)
        self.install(first) if first is not None else None

    def first_of(self, following: Composition) -> Composition | None:
        """The composition that runs first where `following` shall, by `handed_over`. A collective."""
        return handed_over(self.layout, self.layout_of(following, META), self.env.control)

    def successor(self, composition: Composition) -> Snapshot:
        """`composition`, `prepared` with the memory of what runs now."""
        layout = self.layout_of(composition)
        layout.take_over(self.layout)
        return self.prepared(self.remembering(layout))

    def remembering(self, asked: Layout) -> Layout:
        """`layout_to_run`, with the memory of `asked`. On a rank alone the next step sends all of it."""
        owing = any(bool(lane.committed[UNSENT].any()) for lane in asked.lanes if UNSENT in lane.committed)
        here = self.layout_to_run(asked, owing=owing)
        if here is not asked:
            here.take_over(asked)
        return here

    def retired(self) -> Snapshot:
        """Plain all-reduce, whatever the policy, `prepared` without any memory."""
        env = self.env
        device, given = env.usual.memory.where, (env.memory_dtype, env.tuning)
        made = self.prepared(build(self.specs, dense(), None, device, env.world, *given))
        return replace(made, env=replace(made.env, policy=None))

    def snapshot(self) -> Snapshot:
        """The present state, for `restore`. A layout that is installed in between has planes of its own."""
        return Snapshot(
            self.layout, self.step, self.plan, self._controller, self.env, self.placement, self.facts
        )

    def restore(self, saved: Snapshot) -> None:
        """Run what was `prepared`, or go on as if nothing had run since `snapshot`."""
        self._following = None
        self.layout, self.step, self.plan, self.facts = saved.layout, saved.step, saved.plan, saved.facts
        self._controller, self.env, self.placement = saved.controller, saved.env, saved.placement
        self.comm, self._control, self._is_sharded = self.placement.comm, self.env.control, self.env.sharded
        self._granularity = self.placement.granularity
        self.traffic = traffic_for(self.layout, self.env)

    # -- what becomes of a step, once optimizers have stepped or not

    def begin_anew(self) -> None:
        """No exchange waits for an optimizer."""
        self._is_counted = self._is_open = False

    def settle(self, fates: Fates) -> bool:
        """Make final, undo, or keep open what exchanges have committed; whether a whole step was undone.

        `step` counts optimizer steps. An exchange is taken to make one until this says that it has not.
        Several exchanges before an optimizer steps have one number, and go back together.
        """
        for lane in self.layout.lanes:
            lane.settle(fates)
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
        """Whether an exchange has been counted as a step for which no optimizer has answered yet."""
        return self._is_counted

    @property
    def shard(self) -> Shard | None:
        """This rank's share of every parameter; `None` where parameters are whole."""
        inside = self.placement.inside
        return None if inside is None else Shard(inside, self.env.replica)

    @property
    def late(self) -> float | None:
        """Steps' worth of gradient that wait in memory under what runs; `None` before that is known."""
        return self._controller.late

    @property
    def measuring(self) -> bool:
        """Whether dense steps still find out what to do."""
        return self._controller.measuring

    @property
    def is_serial(self) -> bool:
        """Whether communication of this step waits for its computation, so that each is timed alone."""
        return self._controller.is_serial

    @property
    def plan_number(self) -> int:
        """Fingerprint of all that must agree between ranks before a step counts."""
        return plan_number(self.step, self.layout.main.text, self.layout.cuts, self.measuring)

    # -- arrival: fold, and start what is complete

    def open(self, at_s: float) -> None:
        """Begin a step whose first gradients are there since `at_s`.

        Neither this nor the two below raise for what goes wrong in a step: `concluded` delivers it.
        """
        self.catch_up()
        self._is_counted = False
        for lane in self.layout.lanes:
            lane.begin()
        is_late, is_serial = self.placement.resolves_late and not self.measuring, self.is_serial
        step = self._now = Step.begun(
            self.step, self.layout.main.text, self.watch, at_s, is_late=is_late, is_serial=is_serial
        )
        step.trace.exact = clock_of(self.placement.memory) if is_serial else None
        if any(lane.held and lane.memory.covers_momentum for lane in self.layout.lanes):
            step.fail(GradwireError(_MOMENTUM_TWICE), "begin", self.rank)
        step.scale = self.env.loss_scale()
        for observer in (*self.env.observers, self._controller):
            observer.before(step, self.env)
        step.buffers = carried = self.env.buffers()
        if carried is not None:
            # What passes over other ranks than gradients do says nothing of their link.
            everyone = self.placement.everyone or self._control
            apart = MeteredComm(everyone) if self._is_sharded else None
            to = apart or step.observed(self.comm, "buffers")
            self.runner.issue(lambda: carried.send(to))
            if carried.failure is not None:
                step.fail(carried.failure, "pack of buffers", self.rank)

    def arrive(self, arrival: Arrival) -> None:
        """Take in a flat buffer of the open step.

        Buffers have their turn by index, and one that comes too early waits: so all ranks issue the same
        collectives in the same order, whatever the order of arrival on each of them.
        """
        step = self._now
        assert step is not None, "open the step first"
        if arrival.failure is not None:
            step.fail(arrival.failure, f"bringing of buffer {arrival.index}", self.rank)
        step.arrive(arrival)
        for each in step.next_turns():
            self._process(step, each)

    def close(self) -> None:
        """All gradients of the open step have come."""
        step = self._now
        assert step is not None, "open the step first"
        step.all_arrived = True
        self.runner.finish_all()
        if self._tells_means(step) or not rides(step.left_bytes, self.comm.world, self.layout.tuning):
            self._send_small(step, step.tail_regions.keys())
        self._progress(step)

    def _process(self, step: Step, arrival: Arrival) -> None:
        bucket_plan = self.layout.bucket_plan(arrival.entries)
        if self.layout.early:
            step.names |= bucket_plan.names
        for run in bucket_plan.runs:
            self._launch_direct(step, arrival, run)
        for share in bucket_plan.shares:
            self._fold(step, arrival, share)
        for unit in step.completed(bucket_plan.units):
            self._launch_unit(step, unit)
        self._send_early(step)

    def _fold(self, step: Step, arrival: Arrival, share: LaneShare) -> None:
        lane, scale = share.lane, share.lane.scale(step.scale) / step.scale
        grads = Gradients(arrival.buffer, share.pieces, scale)
        try:
            with step.trace.compressing("encode", share.label):
                seen = lane.fold(grads, step.number, self.comm.world)
        except BaseException as error:
            step.fail(error, f"fold of {share.label}", self.rank)
            return
        step.note(share, seen, self.placement.fetch)

    def _launch_direct(self, step: Step, arrival: Arrival, run: DirectRun) -> None:
        region = arrival.buffer[run.region]
        wide = region.dtype == torch.float64 or region.nbytes >= self.layout.tuning.small_bytes
        if not wide and not self.layout.is_plain:
            step.tail_regions.update(zip(run.names, region.split_with_sizes(run.sizes), strict=True))
            return
        self.runner.launch(step, self.direct(step, arrival, run))

    def direct(self, step: Step, arrival: Arrival, run: DirectRun) -> ExchangeTask:
        """The exchange of neighbours in a bucket, in place. It belongs to no lane: its context says -1."""
        region, plan = arrival.buffer[run.region], run.plan(arrival.buffer.dtype)
        where = (len(step.direct), self.comm.rank, self.comm.world, self.env.seed, -1)
        ctx = ExchangeContext(step.number, *where, granularity=self._granularity)
        ctx.keeping(plan.constants)
        step.direct.append(region.numel())
        comm, agreed = step.observed(self.comm, plan.label), plan.collectives(ctx, checked=self.comm.verifies)
        return ExchangeTask(plan, agreed, region, region, ctx, comm, is_unseen=True)

    def _launch_unit(self, step: Step, unit: Unit) -> None:
        """Start the exchange of a unit that has been folded, or let it rest."""
        lane = self.layout.lanes[unit.lane]
        plan = lane.plans[unit.index]
        x = lane.x[unit.start : unit.stop]
        where = (unit.index, self.comm.rank, self.comm.world, self.env.seed, unit.lane, unit.parts)
        ctx = ExchangeContext(
            step.number,
            *where,
            lane.scale(step.scale),
            lane.narrow,
            unsent=lane.committed[UNSENT][unit.start : unit.stop] if UNSENT in lane.committed else None,
            kept=lane.kept,
            replicas=self.env.replicas,
            see=step.hear,
            granularity=self._granularity,
        ).keeping(plan.constants)
        if step.looks:
            self._look(step, lane, unit, x, ctx)
        agreed = plan.collectives(ctx, checked=self.comm.verifies)
        route = self.layout.route(unit, step.taken)
        if not agreed.rounds:
            step.rest(route)
            return
        factor = step.scale / ctx.scale
        comm, place = step.observed(self.comm, plan.label), step.landing(route, x, factor)
        mean = torch.empty_like(x) if place is None else place
        task = ExchangeTask(plan, agreed, x, mean, ctx, comm, is_unseen=plan.may_overflow)
        if place is None:
            task.land = lambda: step.land(route, mean, factor)
        self.runner.launch(step, task)

    def _look(self, step: Step, lane: Lane, unit: Unit, x: Tensor, ctx: ExchangeContext) -> None:
        try:
            with step.trace.compressing("encode", f"look at {unit}"):
                for look in step.looks:
                    look(lane, unit, x, ctx)
        except BaseException as error:
            step.fail(error, f"look at {unit}", self.rank)

    # -- verdict: agree, then commit or leave everything as it was

    def _progress(self, step: Step) -> None:
        """Issue the tail when it may go, judge when it has come back, give up when nothing can."""
        if step.is_over or not step.all_arrived:
            return
        try:
            if self.runner.broken is not None:
                raise self.runner.broken
            # Where nothing can fail on one rank alone any more, the verdict goes with the last payload. But
            # ranks that share a replica wait for each other after it: there no lack of memory may come later.
            # And now and then it goes alone, because its time is all that tells the latency of the link.
            apart = step.is_serial or self._is_sharded or (is_apart(step.number) and not self.layout.is_dense)
            left = step.outstanding if apart else step.decoding
            if left == 0 and step.outcome is Outcome.RUNNING:
                self._send_tail(step)
            if step.outcome is Outcome.VOTED and step.outstanding == 0:
                assert step.tail is not None, "sent first"
                self._judge(step, step.tail.verdict())
        except TransportError as error:
            self.runner.broken = error
            self._close(step, Outcome.FAILED, error)
        except DAMAGED as error:  # in the verdict itself or beside it, on all ranks
            self._close(step, Outcome.FAILED, error)

    def _tells_means(self, step: Step) -> bool:
        """Whether the verdict has to tell if means are finite: ranks with other shards see other means.

        Of a late step they ask each other on the device, at its end.
        """
        return self._is_sharded and not step.is_late

    def _send_early(self, step: Step) -> None:
        """Small gradients that can be under way beside units, once all of them are here."""
        early = self.layout.early
        if early and step.names >= early:
            self._send_small(step, early)

    def _send_small(self, step: Step, names: Set[str]) -> None:
        if regions := step.take_small(self.specs, names):
            comm, latency = step.observed(self.comm, "small"), self.layout.tuning.latency
            step.small.append(small := SmallReduce(regions, comm, step.device, latency=latency))
            self.runner.issue(small.send)

    def _send_tail(self, step: Step) -> None:
        facts = (*step.told, *self._controller.row(step, self.traffic.row))
        step.require_all_units(self.layout.lanes, self.rank)
        stale = step.buffers is not None and step.buffers.is_stale(late=step.is_late)
        sound = step.is_late or step.is_finite()
        if self._tells_means(step):
            sound = step.small_are_finite(self.rank) and sound
        finite = step.finite() if step.is_late else None
        row = RankReport(sound, step.error is not None, self.plan_number, facts, stale, step.computing_s)
        comm = step.observed(self.comm, "tail")
        regions = step.take_small(self.specs, step.tail_regions.keys())
        control = self._control
        apart = None if control is self.comm else MeteredComm(control, step.trace, "tail")
        step.tail = tail = VerdictReduce(regions, row, comm, step.device, apart, finite)
        step.small.append(tail)
        step.outcome = Outcome.VOTING

        def came() -> None:
            if not step.is_over:
                step.outcome = Outcome.VOTED
            self._progress(step)

        placement = self.placement
        tail.send(lambda: (placement.post_later or placement.post)(came))

    def _judge(self, step: Step, verdict: Verdict) -> None:
        step.receive_buffers(verdict.stale)
        step.receive_small(self.rank)
        step.computing_by_rank_s = tuple(row.computing_s for row in verdict.rows)
        for small in step.small:
            step.record_small(small)
        error: BaseException | None = verdict.error() or step.compare(verdict)
        if step.error is not None and not isinstance(error, RanksDisagree):
            step.has_failed_unheard = error is None and verdict.finite
            error = step.error  # a rank that disagrees may well fail, but that is not why
        if error is not None:
            self._close(step, Outcome.FAILED, error)
        elif step.is_late:
            self._land(step, verdict)
        else:
            finite = verdict.finite and step.is_finite() and all(each.is_finite() for each in step.small)
            if finite:
                for small in step.small:
                    small.land()
            elif self._is_sharded or not self.layout.is_plain:
                # Plain steps protect nothing: what they have is DDP's own, but of one shard only.
                step.poison()
            self._close(step, self._outcome(step, verdict, finite))

    def _outcome(self, step: Step, verdict: Verdict, finite: bool) -> Outcome:
        """Make what the step leaves the memory, if it was `finite`.

        That is the same answer on all ranks: reduced values are, and all else is in the verdict.
        """
        if finite:
            for lane in self.layout.lanes:
                lane.commit(slot for owner, slots in step.idle if owner is lane for slot in slots())
            self.step += 1
            self._is_counted = True
        self._observe(step, verdict, committed=finite)
        return Outcome.COMMITTED if finite else Outcome.NOT_FINITE

    def _land(self, step: Step, verdict: Verdict) -> None:
        """End the step for the model; whether it counts is asked of the device, and not waited for."""
        finite = torch.stack([step.finite(), *(each.finite() for each in step.small)]).all()
        if (shard := self.shard) is not None:
            finite = shard.all(finite)
        for small in step.small:
            small.land()
        if shard is not None or not self.layout.is_plain:
            step.poison_unless(finite)
        step.measured_s = self.watch.mark_end()
        step.outcome, counts = Outcome.LANDED, self.placement.fetch(finite)
        self._now = None
        self._unresolved = lambda: self._end(step, self._outcome(step, verdict, bool(counts())))
        self.env.concluded(step)

    @property
    def is_resolved(self) -> bool:
        """Whether `resolve` has nothing to do."""
        return self._unresolved is None and self._following is None

    def resolve(self) -> None:
        """Commit the last step, or forget it; needs no other rank, and may wait for the device."""
        resolve, self._unresolved = self._unresolved, None
        if resolve is not None:
            resolve()

    def catch_up(self, fates: Fates | None = None) -> bool:
        """`resolve`, `settle`, and change what runs, on all ranks. An error ends all steps from now on.

        Without `fates` all is final, as after most steps. Returns whether a step was dropped.
        """
        is_dropped = False
        try:
            self.resolve()
            is_dropped = fates is not None and self.settle(fates)
            self.follow(self._following) if self._following is not None else None
        except BaseException as error:  # of the device, for instance
            self.crash(error)
        return is_dropped

    def _observe(self, step: Step, verdict: Verdict, *, committed: bool) -> None:
        """Let the controller see the facts of a step, and run what it wants to follow."""
        rows = [row.facts[len(step.told) :] for row in verdict.rows]
        following = self._following = self._controller.observe(step, rows, committed=committed)
        self.facts = self._controller.facts or self.facts
        # A late step may be asked for by one rank, for its report; and a memory has to be settled first.
        if following is not None and self.layout.is_plain and not step.is_late:
            self.follow(following)

    def _hear(self, step: int, rows: Rows) -> Heard:
        """Take what all ranks said of the link; what it is taken to be, and its change."""
        changes = self.traffic.hear(rows)
        self.link_changes.extend((step, change) for change in changes)
        if (link := self.traffic.link) is not None:
            self.env.on_link(link.beta_s)
        return link, next(((change.before, change.after) for change in changes), None)

    def crash(self, error: BaseException) -> None:
        """An error of our own outside any exchange: the order is lost, so nothing can go on."""
        broken = error if isinstance(error, TransportError) else TransportError(f"internal error: {error!r}")
        broken.__cause__ = error.__cause__ if broken is error else error
        self.lose(broken)

    def lose(self, error: TransportError) -> None:
        """The transport broke: this step, once all of it has come, and all later ones end with `error`."""
        self.runner.broken = self.runner.broken or error
        if self._now is not None:
            self._progress(self._now)

    def _close(self, step: Step, outcome: Outcome, error: BaseException | None = None) -> None:
        """End the step, and conclude it. (`close` only says that all of its gradients have come.)"""
        self._now = None
        self._end(step, outcome, error)
        self.env.concluded(step)

    def _end(self, step: Step, outcome: Outcome, error: BaseException | None = None) -> None:
        """Give the step its final outcome."""
        failed = outcome is Outcome.FAILED
        step.end(outcome, self.rank, error)
        self.traffic.forget() if failed else self.traffic.note(step.trace.rounds)
        for lane in self.layout.lanes:
            lane.kept.discard()
        if not failed:
            self.env.resolved(step)

"""Dense steps are measured until a recipe's decision has the facts that it needs; then it decides, once.

All ranks decide by the same numbers, in the same step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from gradwire.comm import Comm, Round
from gradwire.environment import cores_per_rank
from gradwire.exchange.base import steady_rounds
from gradwire.measure.clock import BackwardWatch, clock_of
from gradwire.measure.codec import codec_cost, payloads
from gradwire.measure.probe import BUDGET_S, name_of, network_of, probe, slowest, table_of
from gradwire.placement import Device, Placement
from gradwire.planning.collectives import serial_bytes
from gradwire.planning.costs import ENOUGH, CodecCost, Line
from gradwire.planning.facts import Facts
from gradwire.planning.links import calibrated
from gradwire.planning.profiler import ORDINARY, WarmupProfiler
from gradwire.planning.step_time import overhead_factor
from gradwire.recipes import Composition, Decision
from gradwire.recipes.parse import short
from gradwire.step.environment import ReducerEnvironment
from gradwire.step.step import Step
from gradwire.unit.parameters import ParameterSpec

_LOG = logging.getLogger("gradwire")


class WarmupController:
    """Measures dense steps until `decision` has its facts; then it decides, once.

    `watch` times the backward pass of the current step.
    """

    measuring = True
    late = 0.0
    looks_on = False
    condition = None

    def __init__(
        self,
        decision: Decision,
        specs: Sequence[ParameterSpec],
        env: ReducerEnvironment,
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
        """True if the current step separates computation and communication."""
        return self.profiler.is_serial

    def before(self, step: Step, _env: ReducerEnvironment) -> None:
        """Do nothing: the values of gradients are not needed."""

    def row(self, step: Step, link: tuple[float, ...]) -> tuple[float, ...]:
        """The profiler's row for the status vote. `link` is not used, because the link is probed later."""
        return self.profiler.row(lambda: step.times(self.specs, self._watch))

    def observe(self, step: Step, rows: Sequence[Sequence[float]], *, committed: bool) -> Composition | None:
        """Take the rows of a step. Once there are enough facts, measure the others in a collective, and
        decide.

        If communication hides in ordinary steps, no step is timed in parts, and nothing else is measured.
        """
        took_s = step.lasted_s()
        facts = self.profiler.observe(rows, took_s, step.exposed(took_s))
        if facts is None:
            exposed = self.profiler.exposed
            return self.decision.hidden(exposed) if exposed else None
        # Status votes have more rows where ranks hold shards.
        facts = replace(facts, buckets=tuple(step.come.direct), world=self.env.world)
        return self.decide(
            surveyed(facts, self.decision, self.env, self._placement, self.specs, self.may_follow)
        )

    def decide(self, facts: Facts) -> Composition | None:
        """The composition to run, or `None` if more has to be measured first."""
        self.facts = facts
        return self.decision.decide(facts)


PROBED = ("all_reduce", "all_gather")
"""Verbs that most recipes use. A verb that is not probed counts with the link of the first one."""

_TYPICAL = 1 << 20
"""Elements of the unit whose payloads are counted."""


def surveyed(
    facts: Facts,
    decision: Decision,
    env: ReducerEnvironment,
    placement: Placement,
    specs: Sequence[ParameterSpec],
    may_follow: Sequence[Composition] = (),
) -> Facts:
    """Measure what `decision` needs: links, processor cores, codec, and parameters' uses. A collective, in
    the same step on all ranks.

    Args:
        facts: results of the dense steps, from whose collectives the bandwidth follows.
        decision: says whether a codec or parameters' uses are to be measured.
        env: counts the uses of parameters.
        placement: comms, and the device of memory and codec.
        specs: the parameters that are exchanged.
        may_follow: recipes whose collectives the probed links must cover.

    Returns `facts` with the results, which are equal on all ranks.
    """
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
        # A thread that waits for a device spins: its processor time does not belong to a collective.
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
    """Share of cores of the rank that has the fewest; `None` if a rank does not know its own."""
    mine = cores_per_rank()
    least = min(row[0] for row in table_of(control, [0.0 if mine is None else mine]))
    return least or None


def links_for(may_follow: Sequence[Composition], world: int) -> tuple[str, ...]:
    """The verbs to probe: `PROBED`, and those of the recipes, if they can be probed.

    They depend on the recipes alone, so that all ranks probe the same ones.
    """
    rounds = (each for one in may_follow for each in steady_rounds(one.exchange, _TYPICAL, world))
    names = (name_of(each) for each in rounds)
    return tuple(dict.fromkeys((*PROBED, *(name for name in names if name is not None))))


def agreed_cost(composition: Composition, comm: Comm, memory: Device) -> CodecCost | None:
    """Measure the codec of `composition` on the device `memory`. Returns its cost on the slowest rank, for
    which all wait; `None` if some rank cannot measure it. A collective over `comm`.
    """
    failure: BaseException | None = None
    try:
        cost = codec_cost(composition.exchange, composition.text, memory)
        mine = [cost.encode.base_s, cost.encode.slope_s, cost.decode.base_s, cost.decode.slope_s]
    except BaseException as error:
        # Peers wait for this rank's numbers, whatever happens here.
        failure, mine = error, [math.inf] * 4
    numbers = slowest(comm, mine)
    if failure is not None:
        # Logged, not warned: as an error, it would stop this rank alone while peers wait.
        _LOG.warning("the codec of %s could not be measured: %r", short(composition.text), failure)
    return cost_of(numbers)


def cost_of(numbers: Sequence[float]) -> CodecCost | None:
    """The cost from its four numbers, to encode and to decode; `None` if some rank could not measure it."""
    base_s, slope_s, decode_base_s, decode_slope_s = numbers
    if math.inf in numbers:
        return None
    return CodecCost(Line(base_s, slope_s), Line(decode_base_s, decode_slope_s))

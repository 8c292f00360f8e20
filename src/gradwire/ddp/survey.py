"""What an adaptive recipe wants to know beside the times of dense steps: links, and the cost of its codec."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gradwire.adapt import Settler
from gradwire.adapt.settler import ORDINARY
from gradwire.arena import ParameterSpec
from gradwire.comm import Comm
from gradwire.ddp.layout import plain
from gradwire.exchange.late import sent
from gradwire.measure import codec_cost, name_of, network_of, payloads, probe, slowest
from gradwire.plan import CodecCost, Facts, Line, calibrated
from gradwire.recipes import Composition, Decide, Recipe
from gradwire.recipes.base import Asking, Counting, Timing

_LOG = logging.getLogger("gradwire")

PROBED = ("all_reduce", "all_gather")
"""What most recipes ask of the network; the links of verbs that nobody probes are taken to be like the
first's."""

_TYPICAL = 1 << 20
"""Elements of the unit whose payloads are counted."""


def settler_for(decide: Composition | Decide, specs: Sequence[ParameterSpec]) -> Settler:
    """What collects the facts that `decide` needs of dense steps."""
    return Settler([spec.numel for spec in specs], ORDINARY if isinstance(decide, Timing) else 0)


def surveyed(
    facts: Facts, decide: Decide, comm: Comm, specs: Sequence[ParameterSpec], uses: Mapping[str, float]
) -> Facts:
    """`facts` with what is found out now. A collective, in the same step on all ranks, which all get the
    same numbers. `uses` are multiply-adds per weight of this rank, as far as it knows them. The links'
    bandwidth follows from what the dense steps sent."""
    gradient_bytes = float(sum(spec.numel * spec.dtype.itemsize for spec in specs))
    facts = replace(facts, gradient_bytes=gradient_bytes)
    if comm.world > 1:
        probed, number = network_of(probe(comm, links_for(decide, comm.world))), len(facts.collectives_s)
        network = calibrated(probed, facts.allreduce_s, facts.gradient_bytes, number, comm.world)
        facts = replace(facts, network=network)
    if isinstance(decide, Asking):
        facts = replace(
            facts,
            codec=_agreed_cost(decide.about, comm),
            payloads=payloads(decide.about.exchange, _TYPICAL, comm.world),
        )
    if isinstance(decide, Counting):
        names = [spec.name for spec in specs if len(spec.shape) > 1]
        most = slowest(comm, [uses.get(name, 0.0) for name in names])
        facts = replace(facts, uses=dict(zip(names, most, strict=True)))
    return facts


def asked_about(built: Composition | Decide) -> Composition | None:
    """Whose codec `surveyed` will time; `None` where it times none."""
    return built.about if isinstance(built, Asking) else None


def aim_of(recipe: Recipe) -> Composition:
    """What a recipe runs, or will as far as it says; else plain all-reduce."""
    built = recipe.build()
    return built if isinstance(built, Composition) else asked_about(built) or plain()


def links_for(decide: Decide, world: int) -> tuple[str, ...]:
    """What to probe: `PROBED`, and what else the recipe asked about sends, as far as that can be probed.

    A function of the recipe alone, so that all ranks probe the same.
    """
    if not isinstance(decide, Asking):
        return PROBED
    names = (name_of(each) for each in sent(decide.about.exchange, _TYPICAL, world))
    return tuple(dict.fromkeys((*PROBED, *(name for name in names if name is not None))))


def _agreed_cost(composition: Composition, comm: Comm) -> CodecCost | None:
    """Of the slowest rank, for which all others wait; `None` if it cannot be measured on some rank."""
    failure: BaseException | None = None
    try:
        cost = codec_cost(composition.exchange, composition.text)
        mine = [cost.encode.base_s, cost.encode.slope_s, cost.decode.base_s, cost.decode.slope_s]
    except BaseException as error:
        # Peers wait for this rank's numbers, whatever happens here.
        failure, mine = error, [math.inf] * 4
    base_s, slope_s, decode_base_s, decode_slope_s = slowest(comm, mine)
    if failure is not None:
        # Not a warning, which a user may have made an error: this rank alone would stop, and peers wait.
        _LOG.warning("the codec of %s could not be measured: %r", composition.text, failure)
    if math.inf in (base_s, slope_s, decode_base_s, decode_slope_s):
        return None
    return CodecCost(Line(base_s, slope_s), Line(decode_base_s, decode_slope_s))

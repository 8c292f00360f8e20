"""What a report says a step should take."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from gradwire.comm import Comm, run_ranks
from gradwire.control.forecast import predicted_step_s
from gradwire.planning.collectives import Transfer, time_of
from gradwire.planning.costs import BackwardTiming, CodecCost, Line, Link, Network
from gradwire.planning.facts import Facts
from gradwire.planning.profiler import DISCARDED, MEASURED, ORDINARY
from gradwire.planning.step_time import Sent, UnitWork, step_time
from gradwire.recipes import recipe
from gradwire.step.layout import build
from gradwire.step.status_vote import HEADER
from tests.support.rig import Rig, gradients, specs
from tests.support.tiers import rest

WORLD = 4
NUMEL = tuple(spec.numel for spec in specs())
READY_S = tuple(0.01 * (number + 1) for number in range(len(NUMEL)))
NETWORK = Network(Link(alpha_s=1e-3, beta_s=1e-6))
FIRST = sum(NUMEL) // 3
STEPS = DISCARDED + ORDINARY + MEASURED + 0 + 2
"""After which every recipe has decided."""
FACTS = Facts(
    READY_S[-1],
    0.1,
    WORLD,
    BackwardTiming(0.5, READY_S, NUMEL, READY_S[-1]),
    NETWORK,
    buckets=(FIRST, sum(NUMEL) - FIRST),
)


def _predicted(text: str, facts: Facts = FACTS) -> float | None:
    composition = recipe(text).build()
    return predicted_step_s(facts, build(specs(), composition, None, torch.device("cpu"), WORLD), specs())


def test_a_dense_step_is_ddps_buckets_and_the_status_vote() -> None:
    first_s, last_s = (
        time_of(Transfer("all_reduce", 4.0 * numel), WORLD, NETWORK) for numel in FACTS.buckets
    )
    vote_s = time_of(Transfer("all_reduce", 4.0 * HEADER * WORLD, "direct"), WORLD, NETWORK)
    at_s = next(at_s for at_s, end in zip(READY_S, accumulate(NUMEL), strict=True) if end >= FIRST)
    sent_s = max(at_s + first_s, READY_S[-1]) + last_s
    assert _predicted("dense") == pytest.approx(0.5 + sent_s + vote_s, rel=1e-12)


def test_what_a_codec_costs_is_added_where_it_is_a_fact() -> None:
    codec = CodecCost(Line(0.25, 0.0), Line(0.125, 0.0))
    text = "star_topk(ratio=0.1)"
    free, dear = _predicted(text), _predicted(text, replace(FACTS, codec=codec))
    assert free is not None
    assert dear == pytest.approx(free + 0.25 + 0.125, rel=1e-12)


def test_units_that_rest_now_and_then_count_as_often_as_they_travel() -> None:
    """One unit, sent every fourth step: between resting and sending always."""
    exchange = "covap(interval=4, sharding='off')"
    flat_buffer = build(specs(), recipe(exchange).build(), None, torch.device("cpu"), WORLD).flat_buffers[0]
    assert len(flat_buffer.units) == 1
    tail = sum(NUMEL) - flat_buffer.numel + HEADER * WORLD
    tail_s = time_of(Transfer("all_reduce", 4.0 * tail, "direct"), WORLD, NETWORK)
    mine = {slot.spec.name for slot in flat_buffer.slots}
    ready_s = max(at_s for at_s, spec in zip(READY_S, specs(), strict=True) if spec.name in mine)
    sum_s = time_of(Transfer("all_reduce", 4.0 * flat_buffer.numel), WORLD, NETWORK)
    sent_s = 0.5 + step_time([UnitWork(ready_s, flat_buffer.numel, (Sent(sum_s),))], READY_S[-1]) + tail_s
    rested_s = 0.5 + READY_S[-1] + tail_s
    assert _predicted(exchange) == pytest.approx((sent_s + 3 * rested_s) / 4, rel=1e-12)


@pytest.mark.parametrize("facts", [replace(FACTS, network=None), replace(FACTS, backward=None)])
def test_without_facts_nothing_is_said(facts: Facts) -> None:
    assert _predicted("dense", facts) is None


@pytest.mark.parametrize("text", rest(["covap", "mergecomp(inner='topk(ratio=0.1)')", "auto"], but=["auto"]))
def test_whoever_has_decided_from_facts_says_what_to_expect(text: str) -> None:
    def rank(comm: Comm) -> list[float | None]:
        rig, found = Rig(comm, text), []
        for step in range(STEPS):
            assert rig.step(gradients(comm.rank, step)).error is None
            reducer = rig.reducer
            assert reducer.measuring == (reducer.facts is None)
            facts = reducer.facts
            found.append(None if facts is None else predicted_step_s(facts, reducer.layout, reducer.specs))
        return found

    ranks = run_ranks(2, rank)
    assert ranks[0] == ranks[1]
    assert ranks[0][:4] == [None] * 4, "still measuring"
    assert all(found is not None and found > 0.0 for found in ranks[0][STEPS - 2 :])

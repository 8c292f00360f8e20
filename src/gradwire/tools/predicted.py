"""What a step of the layout in force should take by the facts from which it was chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from gradwire.arena import Lane, ParameterSpec
from gradwire.comm import Round
from gradwire.engine.layout import Layout
from gradwire.engine.verdict import HEADER
from gradwire.moment import Moment
from gradwire.planning.facts import Facts
from gradwire.planning.predict import Tail, step_from_facts

STEPS = 64
"""What is sent may depend on the step: this many in a row stand for all."""

Sent = tuple[tuple[Round, ...], ...]
"""Every unit's rounds."""


def predicted_step_s(
    facts: Facts | None, layout: Layout, specs: Sequence[ParameterSpec], step: int
) -> float | None:
    """Mean over the steps from `step` on; `None` where facts are missing.

    What travels beside the main lane counts as part of the tail, early or not. Where nothing is remembered,
    DDP's buckets travel.
    """
    if facts is None or facts.backward is None or facts.network is None:
        return None
    lane = _main_lane(layout)
    names = {spec.name for spec in specs} if lane is None else {slot.spec.name for slot in lane.slots}
    places = [place for place, spec in enumerate(specs) if spec.name in names]
    sizes = [specs[place].numel for place in places]
    cuts = facts.bucket_cuts if lane is None else [unit.start for unit in lane.units[1:]]
    beside = sum(spec.numel for spec in specs) - sum(sizes) + facts.world * HEADER
    tail = Tail(Round("all_reduce", beside, torch.float32), waits=not layout.is_dense)
    bounds = (0, *cuts, sum(sizes))
    patterns = Counter(
        _sent(layout, lane, bounds, Moment(number, 0, 0, facts.world)) for number in range(step, step + STEPS)
    )
    total_s = 0.0
    for pattern, times in patterns.items():
        found = step_from_facts(facts, places, cuts, _named(pattern), tail)
        assert found is not None, "ready times and links are there"
        total_s += times * found.step_s
    return total_s / STEPS


def _named(sent: Sent) -> Callable[[int, int], tuple[Round, ...]]:
    return lambda index, _numel: sent[index]


def _main_lane(layout: Layout) -> Lane | None:
    """The lane of the recipe itself; `None` where nothing is remembered."""
    mine = [lane for lane in layout.lanes if lane.exchange is layout.main.exchange]
    return max(mine, key=lambda lane: lane.numel, default=None)


def _sent(layout: Layout, lane: Lane | None, bounds: Sequence[int], at: Moment) -> Sent:
    exchange, dtype = layout.main.exchange, torch.float32 if lane is None else lane.dtype
    at = replace(at, narrow=None if lane is None else lane.narrow)
    rounds = []
    for index, (start, stop) in enumerate(pairwise(bounds)):
        parts = () if lane is None else lane.units[index].parts
        rounds.append(exchange.rounds(stop - start, dtype, replace(at, unit=index, parts=parts)))
    return tuple(rounds)

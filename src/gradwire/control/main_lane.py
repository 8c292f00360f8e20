"""The lane of a layout's own recipe, as the cost model sees it: its units, and what travels beside them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from gradwire.comm import Round
from gradwire.comm.base import shortest_sum
from gradwire.planning.predict import Tail
from gradwire.step.arena import Lane, ParameterSpec
from gradwire.step.context import ExchangeContext
from gradwire.step.layout import Layout
from gradwire.step.verdict import HEADER, rides

Sent = tuple[tuple[Round, ...], ...]
"""Every unit's rounds."""


@dataclass(frozen=True)
class MainLane:
    """The units in which a layout's own recipe sends, and how many elements travel beside them.

    `places` are its parameters' in the layout; `cuts` are in elements. Where nothing is remembered `lane` is
    `None`, and units are DDP's buckets.
    """

    layout: Layout
    lane: Lane | None
    places: tuple[int, ...]
    cuts: tuple[int, ...]
    numel: int
    beside: int

    def rounds(self, ctx: ExchangeContext) -> Sent:
        """The rounds of each unit in the step of `ctx`, which may be the context of any of them."""
        exchange, lane = self.layout.main.exchange, self.lane
        dtype = torch.float32 if lane is None else lane.dtype
        ctx = replace(ctx, narrow=None if lane is None else lane.narrow)
        rounds, known, cycle = [], dict[Hashable, tuple[Round, ...]](), exchange.laws.cycle
        for index, (start, stop) in enumerate(pairwise((0, *self.cuts, self.numel))):
            parts = () if lane is None else lane.units[index].parts
            # They depend on how many elements of which shapes a unit has, not on where these lie.
            alike = stop - start, index % cycle, tuple([(part.shape, part.numel) for part in parts])
            if alike not in known:
                known[alike] = exchange.rounds(stop - start, dtype, replace(ctx, unit=index, parts=parts))
            rounds.append(known[alike])
        return tuple(rounds)

    def small(self, world: int) -> Round:
        """The all-reduce of what travels beside the units."""
        way = shortest_sum(world, torch.float32.itemsize * self.beside, self.layout.tuning.latency)
        return Round("all_reduce", self.beside, torch.float32, algorithm=way)

    def tail(self, world: int) -> Tail:
        """The verdict, and what travels beside: with it where that is little."""
        beside = self.small(world)
        is_apart = not rides(beside.payload_bytes, world, self.layout.tuning)
        numel = world * HEADER + (0 if is_apart else self.beside)
        carried = Round("all_reduce", numel, torch.float32, algorithm=shortest_sum(world))
        exchanges = (*(lane.exchange for lane in self.layout.lanes), *self.layout.direct.values())
        waits = not all(exchange.laws.total for exchange in exchanges)
        return Tail(carried, waits, beside if is_apart else None)


def main_lane(layout: Layout, specs: Sequence[ParameterSpec], bucket_cuts: Sequence[int]) -> MainLane:
    """The lane of the recipe itself; all parameters in buckets where nothing is remembered."""
    mine = [lane for lane in layout.lanes if lane.exchange is layout.main.exchange]
    lane = max(mine, key=lambda lane: lane.numel, default=None)
    names = {spec.name for spec in specs} if lane is None else {slot.spec.name for slot in lane.slots}
    places = tuple(place for place, spec in enumerate(specs) if spec.name in names)
    cuts = tuple(bucket_cuts) if lane is None else tuple(unit.start for unit in lane.units[1:])
    numel = sum(specs[place].numel for place in places)
    return MainLane(layout, lane, places, cuts, numel, sum(spec.numel for spec in specs) - numel)

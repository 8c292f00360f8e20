"""Predicts how long a step of a recipe takes: on a cluster before anything is measured, or by measured facts.

The layout is the one that the engine would build, and the rounds are those that the recipe announces after
every warm-up. Each round is turned into its seconds on the network. From there on measured links, clusters,
nodes and late workers are the same to the model of a step (`gradwire.planning.step_time`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from statistics import fmean
from typing import NamedTuple, TypeVar

import torch

from gradwire.checkpoint.shards import shards_of
from gradwire.comm import Round
from gradwire.comm.base import shortest_sum
from gradwire.control.choice import LEAD
from gradwire.exchange.base import STEADY
from gradwire.granularity import ON_HOST, Granularity
from gradwire.measure.codec import payloads
from gradwire.planning.cluster import Cluster
from gradwire.planning.collectives import Sends, Transfer
from gradwire.planning.costs import FREE, NOMINAL_CODEC, BackwardTiming, CodecCost, Link
from gradwire.planning.facts import Facts, boundaries
from gradwire.planning.interval import bucketed
from gradwire.planning.shapes import Profile
from gradwire.planning.step_time import Forecast, Sent, Tail, UnitWork, ready_of_element
from gradwire.planning.tuning import ROUNDS, USUAL
from gradwire.recipes import Composition
from gradwire.recipes.parse import steady
from gradwire.recipes.regroup import in_fewer_units
from gradwire.step.arena import Lane, ParameterSpec
from gradwire.step.context import ExchangeContext
from gradwire.step.layout import TINY, Layout, Policy, build, chooser
from gradwire.step.verdict import HEADER, rides

_BYTES = 4
"""Bytes of an element while the ranks of a node add it up."""

INSIDE = 16.0
"""How many times as fast as its node's link a rank's link inside the node is taken to be, where nobody has
measured it: PCIe 4.0 with 16 lanes is 20 times 10 Gbit/s."""

Rounds = tuple[Round, ...]
T = TypeVar("T")


def specs_of_profile(profile: Profile) -> tuple[ParameterSpec, ...]:
    """The parameters in layout order, as float32.

    >>> from gradwire.planning.shapes import load
    >>> specs_of_profile(load("vgg16"))[-1]
    ParameterSpec(name='stage0.conv0.0', shape=(64, 3, 3, 3), dtype=torch.float32, numel=1728, stride=None)
    """
    named = [
        (f"{layer.name}.{number}", shape)
        for layer in profile.layers
        for number, shape in enumerate(layer.shapes)
    ]
    return tuple(
        ParameterSpec(name, shape, torch.float32, torch.Size(shape).numel()) for name, shape in named[::-1]
    )


class ClusterForecasts:
    """Forecasts for one model on one cluster, before anything is measured.

    Gradients of `specs` are ready as `backward` says, in that order. With `two_levels` ranks add up inside
    their nodes first, and the layout is that of shards. With `at_once` it is a round of local steps, in which
    all is ready at the end.
    """

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        backward: BackwardTiming,
        cluster: Cluster,
        *,
        two_levels: bool = False,
        at_once: bool = False,
    ) -> None:
        self._held = shards_of(specs, cluster.per_node if two_levels else 1)
        numel = tuple(spec.numel for spec in self._held)
        ready_s = (backward.total_s,) * len(numel) if at_once else backward.ready_s
        self._backward = replace(backward, numel=numel, ready_s=ready_s)
        self._way, self._cluster = (_TwoLevels if two_levels else _Flat), cluster
        self._world = cluster.nodes if two_levels else cluster.workers
        self._tuning = ROUNDS if at_once else USUAL
        # Buckets hold whole parameters.
        ends = dict(zip(accumulate(backward.numel), accumulate(numel), strict=True))
        self._boundaries = [ends[each] for each in boundaries(bucketed(backward.numel))]
        self._known: dict[str, tuple[Composition, MainLane, Forecast]] = {}

    def of(self, composition: Composition, codec: CodecCost | None = None) -> Forecast:
        """The forecast of `composition`. Without a `codec` its cost counts as nothing."""
        return self._laid_out(composition)[1].coded(codec or FREE)

    def of_text(self, text: str, codec: CodecCost | None = None) -> Forecast:
        """The forecast of the recipe `text`, which is made once."""
        return self._recipe(text)[2].coded(codec or FREE)

    def as_cut(self, text: str, codec: CodecCost | None = None) -> tuple[Composition, Forecast]:
        """The recipe `text` as `best_cut` cuts it here, and its forecast.

        Where no `codec` is given, cuts are compared with a nominal one, because in fewer units less of it
        hides.
        """
        own, main, first = self._recipe(text)
        assumed = codec or NOMINAL_CODEC
        cut, found = best_cut(
            own, first.coded(assumed), coarser(text, main), lambda each: self.of(each, assumed)
        )
        return cut, found.coded(codec or FREE)

    def _recipe(self, text: str) -> tuple[Composition, MainLane, Forecast]:
        if text not in self._known:
            own = steady(text, "candidate")
            self._known[text] = (own, *self._laid_out(own))
        return self._known[text]

    def _laid_out(self, composition: Composition) -> tuple[MainLane, Forecast]:
        meta = torch.device("meta")
        layout = build(self._held, composition, None, meta, self._world, tuning=self._tuning)
        main = main_lane(layout, self._held, self._boundaries)
        return main, _priced(self._way(self._cluster, main), self._backward)


def gains_by_two_levels(
    composition: Composition,
    specs: Sequence[ParameterSpec],
    workers: int,
    per_node: int,
    policy: Policy | None = None,
) -> bool:
    """Whether two levels spare a node's link more time than the bytes inside the node take. By bytes alone.

    Nothing is measured, so that all ranks find the same. `specs` are whole parameters. A recipe that will
    choose among others counts as the one of them that gains most.

    >>> from gradwire.recipes import recipe
    >>> [layer] = (ParameterSpec("w", (1000, 1000), torch.float32, 1000_000),)
    >>> [gains_by_two_levels(recipe(text).build(), [layer], 4, 2) for text in ("dense", "topk(ratio=0.001)")]
    [True, False]
    """
    if composition.next is not None and composition.next.candidates:
        choices = (steady(text, "candidate") for text in composition.next.candidates)
        return any(gains_by_two_levels(each, specs, workers, per_node, policy) for each in choices)
    members: dict[str, list[ParameterSpec]] = {}
    choose = chooser(policy)
    for spec in specs:
        text = choose(spec)
        members.setdefault(composition.text if text in (None, TINY) else text, []).append(spec)
    spared = 0.0
    for text, held in members.items():
        each = composition if text == composition.text else steady(text, "policy")
        spared += _spared_bytes(each, held, workers, per_node)
    inside = 2 * (per_node - 1) / per_node * sum(spec.numel * spec.dtype.itemsize for spec in specs)
    return spared > inside / INSIDE


def _spared_bytes(
    composition: Composition, specs: Sequence[ParameterSpec], workers: int, per_node: int
) -> float:
    """Bytes over a node's link that two levels spare."""
    numel = tuple(spec.numel for spec in specs)
    at_once, unknown = BackwardTiming(0.0, (0.0,) * len(numel), numel, 0.0), Link(0.0, 0.0)
    cluster = Cluster(workers, unknown, per_node, unknown)
    flat, levels = (
        ClusterForecasts(specs, at_once, cluster, two_levels=each).of(composition).node_bytes
        for each in (False, True)
    )
    return flat - levels


def forecast_by(
    facts: Facts, layout: Layout, specs: Sequence[ParameterSpec], cut: Granularity = ON_HOST
) -> Forecast | None:
    """`layout` by measured ready times and links; `None` where these were not measured.

    Its work is `cut` as it is where its memory will be. The cost of the codec counts as nothing until it is
    known (`Forecast.coded`).
    """
    if facts.backward is None or facts.network is None:
        return None
    cluster = Cluster(facts.world, facts.network.link, measured=facts.network)
    main = main_lane(layout, specs, facts.bucket_boundaries)
    found = _priced(_Flat(cluster, main, cut), facts.backward)
    return replace(found, cores=facts.cores)


def predicted_step_s(
    facts: Facts, layout: Layout, specs: Sequence[ParameterSpec], cut: Granularity = ON_HOST
) -> float | None:
    """How long a step of `layout` should take, with the codec's cost where that is a fact; `None` where
    ready times or links were not measured."""
    found = forecast_by(facts, layout, specs, cut)
    return None if found is None else found.coded(facts.codec or FREE).step_s()


def _priced(way: _Flat, backward: BackwardTiming) -> Forecast:
    main, exchange = way.main, way.main.layout.main.exchange

    # 1. The rounds that units announce in each step of a cycle, and what travels beside them.
    first = STEADY - STEADY % exchange.laws.cycle
    steps = [way.rounds(step) for step in range(first, first + exchange.laws.cycle)]
    small = main.small(way.world)

    # 2. Their seconds and bytes. Units of one size whose rounds are one object are priced once.
    priced: dict[tuple[int, int], tuple[tuple[Sent, ...], _Price]] = {}

    def price(size: int, rounds: Rounds) -> tuple[tuple[Sent, ...], _Price]:
        key = size, id(rounds)
        if key not in priced:
            found = way.unit(size, rounds)
            priced[key] = tuple([Sent(each.seconds, each.latency_s) for each in found]), _added(found)
        return priced[key]

    prices = [[price(size, rounds) for size, rounds in zip(way.sizes, step, strict=True)] for step in steps]
    sums = [_added(each for _, each in step) for step in prices]
    beside = _added(way.unit(main.beside, (small,)))

    # 3. A unit is ready when its last element is.
    ready_of = ready_of_element(_at(backward, main.places))
    ready_s = [ready_of(stop) for stop in (*main.cuts, main.numel)]
    cycle = tuple(
        tuple(
            [
                UnitWork(at_s, size, sent)
                for at_s, size, (sent, _) in zip(ready_s, way.sizes, step, strict=True)
            ]
        )
        for step in prices
    )
    return Forecast(
        backward,
        cycle,
        way.end(small),
        wire_bytes=fmean(each.wire_bytes for each in sums) + beside.wire_bytes,
        node_bytes=fmean(each.node_bytes for each in sums) + beside.node_bytes,
        memory_bytes=main.layout.memory_bytes + max(each.gathered_bytes for each in sums),
        at_most=any(each.at_most for step in steps for rounds in step for each in rounds),
        calls=fmean(sum(map(len, step)) for step in steps) + 1.0,
        decodes=payloads(exchange, max(way.sizes), way.world),
    )


def coarser(text: str, main: MainLane) -> Iterator[Composition]:
    """The recipe `text`, whose lane is `main`, in fewer units; none where its units are DDP's buckets."""
    if main.lane is not None:
        yield from in_fewer_units(text, main.numel, len(main.cuts) + 1)


def best_cut(
    own: T, first: Forecast, others: Iterable[T], price: Callable[[T], Forecast]
) -> tuple[T, Forecast]:
    """`own`, or the best of `others`, which are it in fewer units, where that is faster by `LEAD`.

    How a recipe cuts by itself depends on no measured link. Where the delay of a message outweighs its bytes,
    each further unit costs its rounds. `first` is the forecast of `own`, and `price` forecasts another.
    """
    if first.step_s() <= (1.0 + LEAD) * first.compute_s:
        return own, first
    priced = [(each, price(each)) for each in others]
    best, found = min(priced, key=lambda pair: pair[1].step_s(), default=(own, first))
    return (best, found) if found.step_s() < (1.0 - LEAD) * first.step_s() else (own, first)


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

    def rounds(self, ctx: ExchangeContext) -> tuple[Rounds, ...]:
        """The rounds of each unit in the step of `ctx`, which may be the context of any of them."""
        exchange, lane = self.layout.main.exchange, self.lane
        dtype = torch.float32 if lane is None else lane.dtype
        ctx = replace(ctx, narrow=None if lane is None else lane.narrow)
        rounds, known, cycle = [], dict[Hashable, Rounds](), exchange.laws.cycle
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

    @property
    def waits(self) -> bool:
        """Whether the verdict waits for every decode, because a decoder may refuse what has come."""
        exchanges = (*(lane.exchange for lane in self.layout.lanes), *self.layout.direct.values())
        return not all(exchange.laws.total for exchange in exchanges)


def main_lane(layout: Layout, specs: Sequence[ParameterSpec], bucket_boundaries: Sequence[int]) -> MainLane:
    """The lane of the recipe itself; all parameters in buckets where nothing is remembered."""
    mine = [lane for lane in layout.lanes if lane.exchange is layout.main.exchange]
    lane = max(mine, key=lambda lane: lane.numel, default=None)
    names = {spec.name for spec in specs} if lane is None else {slot.spec.name for slot in lane.slots}
    places = tuple(place for place, spec in enumerate(specs) if spec.name in names)
    cuts = tuple(bucket_boundaries) if lane is None else tuple(unit.start for unit in lane.units[1:])
    numel = sum(specs[place].numel for place in places)
    return MainLane(layout, lane, places, cuts, numel, sum(spec.numel for spec in specs) - numel)


def _verdict(world: int) -> Round:
    """The all-reduce of every rank's row."""
    return Round("all_reduce", world * HEADER, torch.float32, algorithm=shortest_sum(world))


def _at(backward: BackwardTiming, places: Sequence[int]) -> BackwardTiming:
    ready_s = tuple(backward.ready_s[place] for place in places)
    return replace(backward, ready_s=ready_s, numel=tuple(backward.numel[place] for place in places))


class _Price(NamedTuple):
    """Seconds and bytes of collectives, per rank.

    In `latency_s` of the seconds the link is free. Bytes are those sent, over the busiest node's link, and
    received in all-gathers.
    """

    seconds: float
    latency_s: float
    wire_bytes: float
    node_bytes: float
    gathered_bytes: float


def _added(prices: Iterable[_Price]) -> _Price:
    return _Price(*map(sum, zip(_Price(0.0, 0.0, 0.0, 0.0, 0.0), *prices, strict=True)))


@dataclass(frozen=True)
class _Flat:
    """All ranks take part in every collective."""

    cluster: Cluster
    main: MainLane
    cut: Granularity = ON_HOST
    prices: dict[Round, _Price] = field(default_factory=dict, repr=False, compare=False)

    @property
    def world(self) -> int:
        return self.cluster.workers

    @property
    def sizes(self) -> list[int]:
        """Elements of the units."""
        return [stop - start for start, stop in pairwise((0, *self.main.cuts, self.main.numel))]

    def rounds(self, step: int) -> tuple[Rounds, ...]:
        return self.main.rounds(ExchangeContext(step, 0, 0, self.world, granularity=self.cut))

    def unit(self, _numel: int, rounds: Rounds) -> list[_Price]:
        """The price of the rounds that the worker waits for together, and that of the last."""
        return [self._together(each) for each in (rounds[:-1], rounds[-1:]) if each]

    def _together(self, rounds: Rounds) -> _Price:
        """Rounds that are one object are priced once, and equal ones of other units: there are thousands."""
        found = []
        different = dict(zip(map(id, rounds), rounds, strict=True))
        for key, times in Counter(map(id, rounds)).items():
            sent = different[key]
            price = self.prices.get(sent) or self.prices.setdefault(sent, self.price(sent))
            found.append(price if times == 1 else _Price(*(times * each for each in price)))
        return found[0] if len(found) == 1 else _added(found)

    def price(self, sent: Round) -> _Price:
        carried, gathered = self._carried(sent), sent.verb == "all_gather"
        return _Price(
            self.cluster.seconds(carried),
            self.cluster.latency_s(carried),
            self._travelling(sent) * sent.wire_bytes(self.world),
            self.cluster.node_bytes(carried),
            self.world * sent.payload_bytes if gathered else 0.0,
        )

    def end(self, small: Round) -> Tail:
        """After the units, the verdict; `small` gradients go with it if they are few, else beside it."""
        verdict = _verdict(self.cluster.workers)
        if rides(small.payload_bytes, self.cluster.workers, self.main.layout.tuning):
            numel = verdict.numel + self.main.beside
            return Tail(self._timed(replace(verdict, numel=numel)), self.main.waits)
        return Tail(self._timed(verdict), self.main.waits, self._timed(small))

    def _timed(self, sent: Sends) -> Sent:
        return Sent(self.cluster.seconds(sent), self.cluster.latency_s(sent))

    def _travelling(self, sent: Round) -> float:
        return self.main.layout.main.exchange.laws.travels if sent.at_most else 1.0

    def _carried(self, sent: Round) -> Transfer:
        algorithm = None if sent.algorithm == "library" else sent.algorithm
        return Transfer(sent.verb, self._travelling(sent) * sent.payload_bytes, algorithm)


class _TwoLevels(_Flat):
    """Ranks add up inside nodes, exchange shards between nodes, and gather the means after the verdict."""

    @property
    def world(self) -> int:
        return self.cluster.nodes

    def unit(self, numel: int, rounds: Rounds) -> list[_Price]:
        inside_bytes = 2 * (self.cluster.per_node - 1) * _BYTES * numel
        inside = _Price(self.cluster.inside_s(_BYTES * numel), 0.0, inside_bytes, 0.0, 0.0)
        *waited, last = inside, *super().unit(numel, rounds)
        return [_added(waited), last] if waited else [last]

    def price(self, sent: Round) -> _Price:
        carried = self._carried(sent)
        return (
            super()
            .price(sent)
            ._replace(
                seconds=self.cluster.between_s(carried),
                latency_s=self.cluster.between_latency_s(carried),
                node_bytes=self.cluster.between_bytes(carried),
            )
        )

    def end(self, small: Round) -> Tail:
        """Small gradients go by shards, too; the verdict among all ranks; then all means are gathered."""
        small_s = self.cluster.inside_s(small.payload_bytes) + self.cluster.between_s(small)
        gathered_s = self.cluster.inside_s(_BYTES * (self.main.numel + self.main.beside))
        verdict_s = self.cluster.seconds(_verdict(self.cluster.workers))
        # It waits for every decode (`Engine._progress`).
        return Tail(Sent(small_s + verdict_s + gathered_s))

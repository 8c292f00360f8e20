"""Predicted step of a recipe: on a cluster before anything is measured, or from measured facts.

The layout is the one that the reducer would build. The rounds are those that the recipe announces after every
warm-up. Each round is converted to seconds on the network. After that, the model of a step
(`gradwire.planning.step_time`) does not distinguish measured links, clusters, nodes and late workers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from statistics import fmean
from typing import NamedTuple

import torch

from gradwire.comm import Round
from gradwire.comm.base import shortest_sum
from gradwire.exchange.base import STEADY
from gradwire.granularity import ON_HOST, Granularity, granularity
from gradwire.measure.codec import payloads
from gradwire.planning.boundaries import Boundaries
from gradwire.planning.choice import LEAD
from gradwire.planning.cluster import Cluster
from gradwire.planning.collectives import Sends, Transfer
from gradwire.planning.costs import ENOUGH, FREE, NOMINAL_CODEC, BackwardTiming, CodecCost, Cores, Link
from gradwire.planning.facts import Facts, inner_ends
from gradwire.planning.interval import bucketed
from gradwire.planning.shapes import Profile
from gradwire.planning.step_time import Forecast, Sent, Tail, UnitWork, ready_of_element
from gradwire.planning.tuning import ROUNDS, USUAL
from gradwire.recipes import Composition
from gradwire.recipes.parse import steady
from gradwire.recipes.regroup import fewer_boundaries, with_boundaries
from gradwire.step.flat_buffers import FlatBuffer
from gradwire.step.layout import TINY, Layout, Policy, build, chooser
from gradwire.step.shards import shards_of
from gradwire.step.status_vote import HEADER, riding_bytes
from gradwire.unit.context import ExchangeContext, Part
from gradwire.unit.parameters import ParameterSpec, Unit, units_of

_BYTES = 4
"""Bytes of an element while the ranks of a node add it up."""

INSIDE = 16.0
"""Assumed speed of a rank's link inside a node, as a multiple of the node's link, if nobody has measured it:
PCIe 4.0 with 16 lanes is 20 times 10 Gbit/s."""

Rounds = tuple[Round, ...]


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
    """Forecasts of a training step of one model on one cluster, before anything is measured.

    Args:
        specs: whole parameters, in the order in which their gradients become ready.
        backward: elements and ready times, in seconds, of the same parameters.
        cluster: the ranks and their links.
        two_levels: whether ranks reduce inside their nodes first, so that the layout is that of shards.
        at_once: whether everything becomes ready at the end of the backward pass, as in a round of local
            steps.
        cores: the processor cores of a rank.
        on_device: whether recipes that read nothing on the host run on a GPU, in its larger units.
    """

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        backward: BackwardTiming,
        cluster: Cluster,
        *,
        two_levels: bool = False,
        at_once: bool = False,
        cores: Cores = ENOUGH,
        on_device: bool = False,
    ) -> None:
        self._held = shards_of(specs, cluster.per_node if two_levels else 1)
        numel = tuple(spec.numel for spec in self._held)
        ready_s = (backward.total_s,) * len(numel) if at_once else backward.ready_s
        self._backward = replace(backward, numel=numel, ready_s=ready_s)
        self._way, self._cluster, self._cores = (_TwoLevels if two_levels else _Flat), cluster, cores
        self._world = cluster.nodes if two_levels else cluster.workers
        self._tuning = replace(ROUNDS if at_once else USUAL, on_device=on_device)
        # Buckets hold whole parameters.
        ends = dict(zip(accumulate(backward.numel), accumulate(numel), strict=True))
        self._boundaries = [ends[each] for each in inner_ends(bucketed(backward.numel))]
        self._known: dict[str, tuple[Composition, MainBuffer, Forecast]] = {}
        self._units: Known = {}

    def of(self, composition: Composition, codec: CodecCost | None = None) -> Forecast:
        """The forecast of `composition`. Without a `codec` its cost counts as nothing."""
        return self._laid_out(composition)[1].coded(codec or FREE)

    def of_text(self, text: str, codec: CodecCost | None = None) -> Forecast:
        """The forecast of the recipe `text`, which is made once."""
        return self._recipe(text)[2].coded(codec or FREE)

    def as_cut(self, text: str, codec: CodecCost | None = None) -> tuple[Composition, Forecast]:
        """The recipe `text` with its best boundaries here (`best_boundaries`), and its forecast.

        Without a `codec`, boundaries are compared with a nominal one, because fewer units hide less of its
        work.
        """
        own, main, first = self._recipe(text)
        assumed = codec or NOMINAL_CODEC
        boundaries, found = best_boundaries(
            main, first.coded(assumed), lambda each: self._priced(each).coded(assumed)
        )
        composition = own if boundaries is None else with_boundaries(text, boundaries, main.numel)
        return composition, found.coded(codec or FREE)

    def _recipe(self, text: str) -> tuple[Composition, MainBuffer, Forecast]:
        if text not in self._known:
            own = steady(text, "candidate")
            self._known[text] = (own, *self._laid_out(own))
        return self._known[text]

    def _laid_out(self, composition: Composition) -> tuple[MainBuffer, Forecast]:
        meta = torch.device("meta")
        layout = build(self._held, composition, None, meta, self._world, tuning=self._tuning)
        main = main_buffer(layout, self._held, self._boundaries, self._units)
        return main, self._priced(main)

    def _priced(self, main: MainBuffer) -> Forecast:
        is_host = not (self._tuning.on_device and main.layout.stays_on_device)
        way = self._way(self._cluster, main, granularity(is_host=is_host))
        return replace(_priced(way, self._backward), cores=self._cores)


def gains_by_two_levels(
    composition: Composition,
    specs: Sequence[ParameterSpec],
    workers: int,
    per_node: int,
    policy: Policy | None = None,
) -> bool:
    """True if two levels save more time on a node's link than the bytes inside the node cost, by bytes alone.

    Args:
        composition: the recipe. One that will choose among others counts as the one that gains most.
        specs: whole parameters.
        workers: number of ranks; `per_node` of them share a node.
        policy: which parameters get which recipe; `None` for the default.

    Nothing is measured, so all ranks find the same.

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
    """Bytes over a node's link that two levels spare in a step, for the parameters `specs` under
    `composition` on `workers` ranks, `per_node` of them on each node.
    """
    numel = tuple(spec.numel for spec in specs)
    at_once, unknown = BackwardTiming(0.0, (0.0,) * len(numel), numel, 0.0), Link(0.0, 0.0)
    cluster = Cluster(workers, unknown, per_node, unknown)
    flat, levels = (
        ClusterForecasts(specs, at_once, cluster, two_levels=each).of(composition).node_bytes
        for each in (False, True)
    )
    return flat - levels


def forecast_by(
    facts: Facts, layout: Layout, specs: Sequence[ParameterSpec], granularity: Granularity = ON_HOST
) -> Forecast | None:
    """Forecast of a step under `layout`; `None` if ready times or links were not measured.

    Args:
        facts: measured ready times, in seconds, and links.
        layout: units and exchanges of the recipe.
        specs: the parameters that are exchanged.
        granularity: sizes into which work is cut on the device of the memory.

    The codec counts as free until its cost is known (`Forecast.coded`).
    """
    return forecast_by_units(facts, main_buffer(layout, specs, facts.bucket_boundaries), granularity)


def forecast_by_units(facts: Facts, main: MainBuffer, granularity: Granularity = ON_HOST) -> Forecast | None:
    """Forecast as by `forecast_by`, of a layout's `main` flat buffer with its present units."""
    if facts.backward is None or facts.network is None:
        return None
    cluster = Cluster(facts.world, facts.network.link, measured=facts.network)
    return replace(_priced(_Flat(cluster, main, granularity), facts.backward), cores=facts.cores)


def predicted_step_s(
    facts: Facts, layout: Layout, specs: Sequence[ParameterSpec], granularity: Granularity = ON_HOST
) -> float | None:
    """Predicted seconds of a step of `layout`, with the codec's cost if it was measured; `None` if ready
    times or links were not measured. Arguments are those of `forecast_by`.
    """
    found = forecast_by(facts, layout, specs, granularity)
    return None if found is None else found.coded(facts.codec or FREE).step_s()


def _priced(way: _Flat, backward: BackwardTiming) -> Forecast:
    """Forecast of a flat buffer from its rounds, with a codec that takes no time."""
    main, exchange = way.main, way.main.layout.main.exchange

    # 1. The rounds that units announce in each step of a cycle, and the collectives beside them.
    first = STEADY - STEADY % exchange.laws.cycle
    steps = [way.rounds(step) for step in range(first, first + exchange.laws.cycle)]
    small = main.small(way.world)

    # 2. Seconds and bytes of the rounds. Units of one size that share one object of rounds are priced once.
    priced: dict[tuple[int, int], tuple[tuple[Sent, ...], _Price]] = {}

    def price(size: int, rounds: Rounds) -> tuple[tuple[Sent, ...], _Price]:
        key = size, id(rounds)
        if key not in priced:
            found = way.unit(size, rounds)
            priced[key] = tuple([Sent(each.seconds, each.latency_s) for each in found]), _added(found)
        return priced[key]

    sizes = [unit.numel for unit in main.units]
    prices = [[price(size, rounds) for size, rounds in zip(sizes, step, strict=True)] for step in steps]
    sums = [_added(each for _, each in step) for step in prices]
    beside = _added(way.unit(main.beside, (small,)))

    # 3. A unit is ready when its last element is.
    ready_of = ready_of_element(_at(backward, main.places))
    ready_s = [ready_of(unit.stop) for unit in main.units]
    cycle = tuple(
        tuple([UnitWork(*each) for each in zip(ready_s, sizes, (sent for sent, _ in step), strict=True)])
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
        decodes=payloads(exchange, main.coded_numel, way.world),
    )


def best_boundaries(
    main: MainBuffer, first: Forecast, price: Callable[[MainBuffer], Forecast]
) -> tuple[Boundaries | None, Forecast]:
    """Boundaries of `main` into fewer units that are faster by `LEAD`, with their forecast; else `None` and
    `first`.

    A recipe's own boundaries depend on no measured link. If latency outweighs bytes, every additional unit
    costs its rounds. `first` is the forecast of `main` with its own boundaries, and `price` computes it for
    other units.
    """
    exchange = main.layout.main.exchange
    if main.flat_buffer is None or first.step_s() <= (1.0 + LEAD) * first.compute_s:
        return None, first
    priced = [
        (each, price(main.in_units(each))) for each in fewer_boundaries(exchange, main.numel, len(main.units))
    ]
    best, found = min(priced, key=lambda pair: pair[1].step_s(), default=(None, first))
    return (best, found) if found.step_s() < (1.0 - LEAD) * first.step_s() else (None, first)


class UnitForecast(NamedTuple):
    """A unit that ends at element `stop` of its flat buffer. `alike` has its elements per shape, in order."""

    stop: int
    numel: int
    parts: tuple[Part, ...] = ()
    alike: tuple[tuple[tuple[int, ...], int], ...] = ()


def _seen(units: Iterable[Unit]) -> tuple[UnitForecast, ...]:
    """Units of a flat buffer as the cost model sees them."""
    return tuple(
        UnitForecast(
            unit.stop, unit.numel, unit.parts, tuple([(part.shape, part.numel) for part in unit.parts])
        )
        for unit in units
    )


@dataclass(frozen=True)
class MainBuffer:
    """The units in which a layout's main recipe sends, and the number of elements that travel beside them.

    `places` are the indices of its parameters in the layout. `flat_buffer` is `None` if nothing is
    remembered; units are DDP's buckets then. `coded_numel` is the size in elements of the largest of the
    recipe's own units.
    """

    layout: Layout
    flat_buffer: FlatBuffer | None
    places: tuple[int, ...]
    units: tuple[UnitForecast, ...]
    beside: int
    coded_numel: int

    @property
    def numel(self) -> int:
        """Elements of all units."""
        return self.units[-1].stop

    def in_units(self, boundaries: Boundaries) -> MainBuffer:
        """This forecast with the units of the flat buffer cut at `boundaries`. There must be a flat
        buffer."""
        assert self.flat_buffer is not None, "buckets are DDP's to cut"
        units = units_of(
            self.flat_buffer.slots, boundaries, self.flat_buffer.exchange.laws.grain, self.flat_buffer.number
        )
        return replace(self, units=_seen(units))

    def rounds(self, ctx: ExchangeContext) -> tuple[Rounds, ...]:
        """The rounds of each unit in the step of `ctx`, which may be the context of any of them."""
        exchange, flat_buffer = self.layout.main.exchange, self.flat_buffer
        dtype = torch.float32 if flat_buffer is None else flat_buffer.dtype
        ctx = replace(ctx, narrow=None if flat_buffer is None else flat_buffer.narrow)
        rounds, known, cycle = [], dict[Hashable, Rounds](), exchange.laws.cycle
        for index, (_, numel, parts, alike) in enumerate(self.units):
            # Rounds depend on the number of elements per shape in a unit, not on their positions.
            kind = numel, index % cycle, alike
            if kind not in known:
                known[kind] = exchange.rounds(numel, dtype, replace(ctx, unit=index, parts=parts))
            rounds.append(known[kind])
        return tuple(rounds)

    def small(self, world: int) -> Round:
        """The all-reduce of the `beside` elements, in float32."""
        way = shortest_sum(world, torch.float32.itemsize * self.beside, self.layout.tuning.latency)
        return Round("all_reduce", self.beside, torch.float32, algorithm=way)

    @property
    def waits(self) -> bool:
        """True if the status vote waits for every decode, because a decoder may reject a payload."""
        exchanges = (
            *(flat_buffer.exchange for flat_buffer in self.layout.flat_buffers),
            *self.layout.direct.values(),
        )
        return not all(exchange.laws.total for exchange in exchanges)


Known = dict[Hashable, tuple[UnitForecast, ...]]
"""Units by the places of their parameters and by their ends."""


def main_buffer(
    layout: Layout,
    specs: Sequence[ParameterSpec],
    bucket_boundaries: Sequence[int],
    known: Known | None = None,
) -> MainBuffer:
    """Forecast of the units in which the main recipe of `layout` sends.

    Args:
        layout: layout of all parameters.
        specs: the parameters, in the order of the layout.
        bucket_boundaries: ends of DDP's buckets but the last, in elements. Buckets are the units of a recipe
            without a flat buffer, and all parameters are in them.
        known: cache of units by parameters and boundaries, shared by the forecasts of several recipes.

    If the recipe has several flat buffers, the largest one counts; all other elements are `beside`.
    """
    mine = [
        flat_buffer for flat_buffer in layout.flat_buffers if flat_buffer.exchange is layout.main.exchange
    ]
    flat_buffer = max(mine, key=lambda flat_buffer: flat_buffer.numel, default=None)
    names = (
        {spec.name for spec in specs}
        if flat_buffer is None
        else {slot.spec.name for slot in flat_buffer.slots}
    )
    places = tuple(place for place, spec in enumerate(specs) if spec.name in names)
    numel = sum(specs[place].numel for place in places)
    if flat_buffer is None:
        units = tuple(
            UnitForecast(stop, stop - start) for start, stop in pairwise((0, *bucket_boundaries, numel))
        )
    else:
        known = {} if known is None else known
        key = places, tuple(unit.stop for unit in flat_buffer.units)
        if key not in known:
            known[key] = _seen(flat_buffer.units)
        units = known[key]
    beside = sum(spec.numel for spec in specs) - numel
    return MainBuffer(layout, flat_buffer, places, units, beside, max(unit.numel for unit in units))


def _status_vote(world: int) -> Round:
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
    """One level: all ranks take part in every collective."""

    cluster: Cluster
    main: MainBuffer
    granularity: Granularity = ON_HOST
    prices: dict[Round, _Price] = field(default_factory=dict, repr=False, compare=False)

    @property
    def world(self) -> int:
        return self.cluster.workers

    def rounds(self, step: int) -> tuple[Rounds, ...]:
        return self.main.rounds(ExchangeContext(step, 0, 0, self.world, granularity=self.granularity))

    def unit(self, _numel: int, rounds: Rounds) -> list[_Price]:
        """Prices of a unit's collectives: of all rounds but the last together, then of the last."""
        return [self._together(each) for each in (rounds[:-1], rounds[-1:]) if each]

    def _together(self, rounds: Rounds) -> _Price:
        """Price of rounds. Equal rounds are priced once, because there are thousands."""
        if len(rounds) == 1:
            return self._known(rounds[0])
        found = []
        different = dict(zip(map(id, rounds), rounds, strict=True))
        for key, times in Counter(map(id, rounds)).items():
            price = self._known(different[key])
            found.append(price if times == 1 else _Price(*(times * each for each in price)))
        return found[0] if len(found) == 1 else _added(found)

    def _known(self, sent: Round) -> _Price:
        return self.prices.get(sent) or self.prices.setdefault(sent, self.price(sent))

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
        """The status vote after the units. `small` gradients travel with it if they are few, else beside
        it."""
        vote = _status_vote(self.cluster.workers)
        if small.payload_bytes <= riding_bytes(self.cluster.workers, self.main.layout.tuning):
            numel = vote.numel + self.main.beside
            return Tail(self._timed(replace(vote, numel=numel)), self.main.waits)
        return Tail(self._timed(vote), self.main.waits, self._timed(small))

    def _timed(self, sent: Sends) -> Sent:
        return Sent(self.cluster.seconds(sent), self.cluster.latency_s(sent))

    def _travelling(self, sent: Round) -> float:
        return self.main.layout.main.exchange.laws.travels if sent.at_most else 1.0

    def _carried(self, sent: Round) -> Transfer:
        algorithm = None if sent.algorithm == "library" else sent.algorithm
        return Transfer(sent.verb, self._travelling(sent) * sent.payload_bytes, algorithm)


class _TwoLevels(_Flat):
    """Ranks add up inside nodes, exchange shards between nodes, and gather the means after the status
    vote."""

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
        """The end of a step: `small` gradients go by shards, too; then come the status vote among all ranks,
        and the gather of all means inside the nodes.
        """
        small_s = self.cluster.inside_s(small.payload_bytes) + self.cluster.between_s(small)
        gathered_s = self.cluster.inside_s(_BYTES * (self.main.numel + self.main.beside))
        vote_s = self.cluster.seconds(_status_vote(self.cluster.workers))
        # The status vote waits for every decode (`Reducer._advance`).
        return Tail(Sent(small_s + vote_s + gathered_s))

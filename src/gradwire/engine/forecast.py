"""What a step of a recipe should take: on a cluster before anything is measured, or by measured facts.

The layout is the one that the engine would build, the rounds are those that the recipe announces after every
warm-up, and the step is the cost model's (`gradwire.planning.predict`). Each collective is first turned into
its seconds on the network, so that measured links, clusters, nodes and late workers differ in nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from statistics import fmean

import torch

from gradwire.arena import ParameterSpec
from gradwire.comm import Round
from gradwire.engine.layout import Layout, build
from gradwire.engine.predicted import MainLane, Sent, main_lane
from gradwire.exchange.base import STEADY, WHOLE, Exchange, parts, steady_moment
from gradwire.exchange.compose import Every
from gradwire.exchange.gcomp import Gcomp
from gradwire.measure.codec import payloads
from gradwire.moment import Moment
from gradwire.planning.cluster import Cluster, once
from gradwire.planning.collectives import Sends, Transfer
from gradwire.planning.costs import Backward, CodecCost
from gradwire.planning.facts import Facts
from gradwire.planning.forecast import Forecast
from gradwire.planning.interval import bucketed
from gradwire.planning.predict import FREE, Tail, UnitWork, ready_of_element
from gradwire.planning.shapes import Profile
from gradwire.recipes import Composition

NEAR_LOSSLESS_SHARE = 0.45
"""The share that travels of what near-lossless frames announce at most. It depends on the values: 0.37 to
0.45 was seen in a small transformer, 0.33 and 0.37 are the paper's."""

LOSSLESS_SHARE = 0.88
"""The share that travels of lossless frames, as seen in the same places."""


_BYTES = 4
"""Bytes of an element while the ranks of a node add it up."""

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


def forecast(
    composition: Composition,
    specs: Sequence[ParameterSpec],
    backward: Backward,
    cluster: Cluster,
    codec: CodecCost | None = None,
    *,
    two_levels: bool = False,
) -> Forecast:
    """`composition` on a model of `specs` whose gradients are ready as `backward` says, in the same order.

    Without a `codec` its cost counts as nothing. With `two_levels` ranks add up inside their nodes first.
    Raises `ValueError` where units hold whole matrices: what becomes of those on two levels is not decided.
    """
    exchange = composition.exchange
    if two_levels and exchange.laws.grain == WHOLE:
        raise ValueError(f"{composition.text}: its units hold whole matrices, which two levels would divide")
    layout = build(specs, composition, None, torch.device("meta"))
    main = main_lane(layout, specs, bucket_cuts(backward.numel))
    way = (_TwoLevels if two_levels else _Flat)(cluster, main, _frames(exchange))
    return _priced(way, backward, codec)


def forecast_by(facts: Facts, layout: Layout, specs: Sequence[ParameterSpec]) -> Forecast | None:
    """`layout` by measured ready times and links; `None` where these were not measured.

    The cost of the codec counts as nothing until it is known (`Forecast.coded`).
    """
    if facts.backward is None or facts.network is None:
        return None
    cluster = Cluster(facts.world, facts.network.link, measured=facts.network)
    main = main_lane(layout, specs, facts.bucket_cuts)
    return _priced(_Flat(cluster, main, _frames(layout.main.exchange)), facts.backward)


def _priced(way: _Flat, backward: Backward, codec: CodecCost | None = None) -> Forecast:
    main, exchange = way.main, way.main.layout.main.exchange
    tail, beside = main.tail(way.cluster.workers), Round("all_reduce", main.beside, torch.float32)
    sent = [way.rounds(step) for step in range(STEADY, STEADY + _cycle(exchange))]
    decodes = payloads(exchange, way.share(max(way.sizes)), way.world)
    ready_s = ready_of_element(_at(backward, main.places))
    ready = [ready_s(stop) for stop in (*main.cuts, main.numel)]
    cycle = tuple(
        tuple(
            UnitWork(at_s, way.share(size), way.timed(size, rounds), codec or FREE, decodes)
            for at_s, size, rounds in zip(ready, way.sizes, step, strict=True)
        )
        for step in sent
    )
    gathered = max(sum(map(way.gathered_bytes, step)) for step in sent)
    return Forecast(
        backward,
        cycle,
        Tail(_known(way.sum_s(tail.round)), tail.waits),
        wire_bytes=fmean(sum(map(way.wire_bytes, way.sizes, step)) for step in sent)
        + beside.wire_bytes(way.cluster.workers),
        node_bytes=fmean(sum(map(way.node_bytes, step)) for step in sent) + way.sum_node_bytes(beside),
        memory_bytes=main.layout.memory_bytes / way.divided + gathered,
        at_most=any(each.at_most for step in sent for rounds in step for each in rounds),
        calls=fmean(sum(map(len, step)) for step in sent) + 1.0,
    )


def bucket_cuts(numel: Sequence[int]) -> tuple[int, ...]:
    """After how many elements DDP's buckets end: 1 MB for the first, 25 MB for each other.

    >>> bucket_cuts([1 << 18, 1 << 18, 7 << 20, 5])
    (262144, 7864320)
    """
    return tuple(accumulate(bucketed(numel)))[:-1]


def _at(backward: Backward, places: Sequence[int]) -> Backward:
    ready_s = tuple(backward.ready_s[place] for place in places)
    return replace(backward, ready_s=ready_s, numel=tuple(backward.numel[place] for place in places))


def _cycle(exchange: Exchange) -> int:
    """After how many steps the same units send again."""
    return next((part.interval for part in parts(exchange) if isinstance(part, Every)), 1)


def _frames(exchange: Exchange) -> float:
    """The share of the announced bytes that near-lossless and lossless frames have."""
    modes = [part.mode for part in parts(exchange) if isinstance(part, Gcomp)]
    return LOSSLESS_SHARE if "lossless" in modes else NEAR_LOSSLESS_SHARE


def _known(seconds: float) -> Transfer:
    return Transfer("shift", seconds)


@dataclass(frozen=True)
class _Flat:
    """All ranks take part in every collective; frames are `frames` as long as announced."""

    cluster: Cluster
    main: MainLane
    frames: float

    @property
    def world(self) -> int:
        return self.cluster.workers

    @property
    def divided(self) -> int:
        """Among how many ranks of a node a unit is shared out."""
        return 1

    @property
    def sizes(self) -> list[int]:
        """Elements of the units."""
        return [stop - start for start, stop in pairwise((0, *self.main.cuts, self.main.numel))]

    def share(self, numel: int) -> int:
        return -(-numel // self.divided)

    def rounds(self, step: int) -> Sent:
        return self.main.rounds(Moment(step, 0, 0, self.world))

    def timed(self, _numel: int, rounds: Rounds) -> tuple[Transfer, ...]:
        """The rounds' seconds: what the worker waits for, and the last."""
        return tuple(map(_known, once([self.cluster.seconds(self._carried(each)) for each in rounds])))

    def sum_s(self, sent: Sends) -> float:
        """Of an all-reduce of all ranks."""
        return self.cluster.seconds(sent)

    def sum_node_bytes(self, sent: Sends) -> float:
        return self.cluster.node_bytes(sent)

    def wire_bytes(self, _numel: int, rounds: Rounds) -> float:
        return sum(self._travelling(each) * each.wire_bytes(self.world) for each in rounds)

    def node_bytes(self, rounds: Rounds) -> float:
        return sum(self.cluster.node_bytes(self._carried(each)) for each in rounds)

    def gathered_bytes(self, rounds: Rounds) -> float:
        return sum(self.world * each.payload_bytes for each in rounds if each.verb == "all_gather")

    def _travelling(self, sent: Round) -> float:
        return self.frames if sent.at_most and sent.verb == "shift" else 1.0

    def _carried(self, sent: Round) -> Transfer:
        algorithm = None if sent.algorithm == "library" else sent.algorithm
        return Transfer(sent.verb, self._travelling(sent) * sent.payload_bytes, algorithm)


class _TwoLevels(_Flat):
    """Ranks add up inside a node, exchange a share each between the nodes, and gather inside."""

    @property
    def world(self) -> int:
        return self.cluster.nodes

    @property
    def divided(self) -> int:
        return self.cluster.per_node

    def rounds(self, step: int) -> Sent:
        exchange, found = self.main.layout.main.exchange, []
        for index, size in enumerate(self.sizes):
            share = self.share(size)
            at = replace(steady_moment(share, self.world, step), unit=index)
            found.append(exchange.rounds(share, torch.float32, at))
        return tuple(found)

    def timed(self, numel: int, rounds: Rounds) -> tuple[Transfer, ...]:
        if not rounds:
            return ()
        seconds = [self.cluster.between_s(self._carried(each)) for each in rounds]
        inside_s = self.cluster.inside_s(_BYTES * self.share(numel))
        return tuple(map(_known, once([inside_s, *seconds[:-1], seconds[-1] + inside_s])))

    def wire_bytes(self, numel: int, rounds: Rounds) -> float:
        inside = 2 * (self.divided - 1) * _BYTES * self.share(numel) if rounds else 0.0
        return inside + super().wire_bytes(numel, rounds)

    def node_bytes(self, rounds: Rounds) -> float:
        return sum(self.cluster.between_bytes(self._carried(each)) for each in rounds)

    def sum_s(self, sent: Sends) -> float:
        share = self._share_of(sent)
        return self.cluster.between_s(share) + 2 * self.cluster.inside_s(share.payload_bytes)

    def sum_node_bytes(self, sent: Sends) -> float:
        return self.cluster.between_bytes(self._share_of(sent))

    def _share_of(self, sent: Sends) -> Transfer:
        return Transfer("all_reduce", sent.payload_bytes / self.divided)

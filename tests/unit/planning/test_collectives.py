"""Formulas against schedules: messages that really spread, each α + bytes·β on links of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import log2

import pytest
import torch

from gradwire.comm.base import Round, shortest_sum
from gradwire.planning.collectives import (
    ALGORITHMS,
    GLOO,
    Transfer,
    fastest,
    levels,
    time_of,
    total_time,
)
from gradwire.planning.costs import NOMINAL, Link, Network
from gradwire.planning.ratio import ways
from tests.support.looped import looped

WORLDS = (1, 2, 3, 4, 5, 7, 8, 16)
every_world = looped("world", WORLDS)

Message = tuple[int, int, float, frozenset[tuple[int, int]]]
"""From, to, the share of a payload that travels, and what it holds: (part, rank that has contributed)."""
Held = dict[int, set[tuple[int, int]]]
Schedule = Callable[[int, "Held"], Iterator[list[Message]]]


def ring_all_reduce(world: int, held: Held) -> Iterator[list[Message]]:
    """Parts go round twice: first they gather contributions, then they spread."""
    for step in range(2 * (world - 1)):
        yield [
            (
                rank,
                (rank + 1) % world,
                1 / world,
                frozenset(piece for piece in held[rank] if piece[0] == part),
            )
            for rank in range(world)
            for part in [(rank - step) % world]
        ]


def tree_all_reduce(world: int, held: Held) -> Iterator[list[Message]]:
    """To rank 0 in a binomial tree, and down again."""
    spans = [2**level for level in range(levels(world))]
    for span in spans:
        yield [
            (rank + span, rank, 1.0, frozenset(held[rank + span]))
            for rank in range(0, world - span, 2 * span)
        ]
    yield from tree_broadcast(world, held)


def tree_broadcast(world: int, held: Held) -> Iterator[list[Message]]:
    """Everybody who has it passes it on to one who does not."""
    for level in range(levels(world)):
        span = 2**level
        yield [(rank, rank + span, 1.0, frozenset(held[rank])) for rank in range(min(span, world - span))]


def doubling_all_gather(world: int, held: Held) -> Iterator[list[Message]]:
    """Bruck's: in round k everybody passes on up to 2^k payloads."""
    for level in range(levels(world)):
        span = 2**level
        for_each = min(span, world - span)
        yield [
            (rank, (rank - span) % world, for_each, payloads(held[rank], rank, for_each, world))
            for rank in range(world)
        ]


def payloads(held: set[tuple[int, int]], first: int, count: int, world: int) -> frozenset[tuple[int, int]]:
    owners = {(first + i) % world for i in range(count)}
    return frozenset(piece for piece in held if piece[1] in owners)


def ring_all_gather(world: int, held: Held) -> Iterator[list[Message]]:
    """Everybody passes on what came last."""
    for step in range(world - 1):
        yield [
            (rank, (rank + 1) % world, 1.0, payloads(held[rank], (rank - step) % world, 1, world))
            for rank in range(world)
        ]


def all_held(world: int) -> Held:
    """Everybody has all parts of the own payload."""
    return {rank: {(part, rank) for part in range(world)} for rank in range(world)}


def carried_out(steps: Iterator[list[Message]], held: Held, link: Link) -> float:
    """Seconds; messages of a step run side by side."""
    seconds = 0.0
    for messages in steps:
        seconds += max(
            (link.alpha_s + share * link.beta_s for _from, _to, share, _pieces in messages), default=0.0
        )
        for _from, to, _share, pieces in messages:
            held[to] |= pieces
    return seconds


@every_world
@looped(
    ("verb", "algorithm", "schedule"),
    [
        ("all_reduce", "ring", ring_all_reduce),
        ("all_reduce", "tree", tree_all_reduce),
        ("all_gather", "tree", doubling_all_gather),
        ("all_gather", "ring", ring_all_gather),
    ],
)
def test_a_schedule_that_reaches_everybody_takes_as_long(
    verb: str, algorithm: str, schedule: Schedule, world: int
) -> None:
    held, link = all_held(world), Link(0.3, 1.0)
    seconds = carried_out(schedule(world, held), held, link)
    assert all(
        held[rank] == {(part, r) for part in range(world) for r in range(world)} for rank in range(world)
    )
    assert time_of(Transfer(verb, 1.0, algorithm), world, Network(link)) == pytest.approx(seconds)


@every_world
def test_a_broadcast_that_reaches_everybody_takes_as_long(world: int) -> None:
    held, link = {rank: set[tuple[int, int]]() for rank in range(world)}, Link(0.3, 1.0)
    held[0].add((0, 0))
    seconds = carried_out(tree_broadcast(world, held), held, link)
    assert all(held.values())
    assert time_of(Transfer("broadcast", 1.0), world, Network(link)) == pytest.approx(seconds)


def test_by_hand_for_eight_ranks() -> None:
    # 1 s a message, 1 byte a second.
    network = Network(Link(1.0, 1.0))
    seconds = {key: time_of(Transfer(key[0], 8.0, key[1]), 8, network) for key in ALGORITHMS}
    assert seconds == {
        ("all_reduce", "ring"): 14 + 14,
        ("all_reduce", "tree"): 6 + 6 * 8,
        ("all_reduce", "star"): 2 + 14 * 8,
        ("all_reduce", "direct"): 1 + 7 * 8,
        ("all_gather", "tree"): 3 + 7 * 8,
        ("all_gather", "ring"): 7 + 7 * 8,
        ("broadcast", "tree"): 3 + 3 * 8,
        ("broadcast", "scatter"): 8 + 2 * 7,
        ("broadcast", "zeros"): 14 + 2 * 7,
        ("all_to_all", "pairs"): 7 + 7,
        ("shift", "direct"): 1 + 8,
    }


@looped("verb", GLOO)
def test_nobody_pays_alone_and_the_default_is_gloos(verb: str) -> None:
    network = Network(Link(1.0, 1.0))
    assert time_of(Transfer(verb, 5.0), 1, network) == 0.0
    assert time_of(Transfer(verb, 5.0), 5, network) == time_of(Transfer(verb, 5.0, GLOO[verb]), 5, network)


def test_a_round_of_an_exchange_is_a_transfer() -> None:
    network = Network(Link(1e-3, 1e-8), {"all_gather": Link(2e-3, 1e-8)})
    reduced, gathered = Round("all_reduce", 1000, torch.float16), Round("all_gather", 10, torch.float32)
    assert time_of(reduced, 4, network) == time_of(Transfer("all_reduce", 2000.0), 4, network)
    expected = time_of(Transfer("all_reduce", 2000.0), 4, network) + time_of(
        Transfer("all_gather", 40.0), 4, network
    )
    assert total_time((reduced, gathered), 4, network) == expected


def test_wire_bytes_of_a_round_are_what_a_link_carries_where_all_links_carry_the_same() -> None:
    # Of a tree broadcast the busiest link carries log N payloads, the mean one (N−1)/N.
    for verb in ("all_reduce", "all_gather", "all_to_all", "shift"):
        for world in WORLDS:
            round_ = Round(verb, 1000, torch.float32)
            assert time_of(round_, world, Network(Link(0.0, 1.0))) == pytest.approx(round_.wire_bytes(world))


def test_a_link_calibrated_for_an_algorithm_goes_before_the_verbs() -> None:
    calibrated = {"all_reduce": Link(1.0, 0.0), "all_reduce/tree": Link(10.0, 0.0)}
    network = Network(Link(100.0, 0.0), calibrated)
    assert time_of(Transfer("all_reduce", 1.0), 4, network) == 6.0
    assert time_of(Transfer("all_reduce", 1.0, "tree"), 4, network) == 40.0
    assert time_of(Transfer("shift", 1.0), 4, network) == 100.0


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    network = Network(Link(0.0, 1.0))
    with pytest.raises(ValueError, match="all_reduce by ring"):
        time_of(Transfer("all_reduce", 1.0, "butterfly"), 4, network)
    with pytest.raises(ValueError, match="shift by direct"):
        time_of(Transfer("gather", 1.0), 4, network)


def test_the_fastest_way_stays_until_another_one_leads() -> None:
    network, found = (
        Network(Link(0.0, 1.0)),
        {"a": (Transfer("shift", 10.0),), "b": (Transfer("shift", 9.0),)},
    )
    assert fastest(found, 2, network) == ("b", 9.0)
    assert fastest(found, 2, network, lead=0.2, now="a") == ("a", 10.0)
    assert fastest(found, 2, network, lead=0.05, now="a") == ("b", 9.0)


def test_ways_in_the_papers_form() -> None:
    # Equations 4a and 4b, α = 1 and β = 1 alone.
    for world in (2, 4, 8, 16):
        log, hops = log2(world), world - 1
        by_latency = {
            name: total_time(way, world, Network(Link(1.0, 0.0))) for name, way in ways(1.0).items()
        }
        by_volume = {name: total_time(way, world, Network(Link(0.0, 1.0))) for name, way in ways(1.0).items()}
        assert by_latency == pytest.approx(
            {"all_gather": log, "ring": 2 * hops + log, "tree": 3 * log, "star": 2 + log}
        )
        volumes = {
            "all_gather": 2 * hops,
            "ring": 2 * hops / world + log,
            "tree": 3 * log,
            "star": 2 * hops + log,
        }
        assert by_volume == pytest.approx(volumes)


@looped("world", range(3, 9))
@looped("payload_bytes", [100, 4600, 5000, 6200, 6300, 8400, 8500, 100_000])
def test_few_bytes_go_the_way_that_takes_less_time_over_50_megabits(world: int, payload_bytes: int) -> None:
    network = Network(Link(NOMINAL.alpha_s, 8 / 50e6))
    took_s = {
        way: time_of(Transfer("all_reduce", payload_bytes, way), world, network) for way in ("ring", "direct")
    }
    is_direct = shortest_sum(world, payload_bytes) == "direct"
    assert is_direct == (took_s["direct"] < took_s["ring"])

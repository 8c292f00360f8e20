"""Nodes: what crosses their links, and how long that takes; the slowest of many ranks."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean

import pytest

from gradwire.planning.cluster import Cluster, straggler_factors
from gradwire.planning.collectives import ALGORITHMS, Transfer
from gradwire.planning.costs import Link

LINK, INSIDE = Link(1e-3, 1e-8), Link(1e-5, 1e-10)
EVERY = [pytest.param(Transfer(verb, 1e6, name), id=f"{verb}/{name}") for verb, name in ALGORITHMS]


@pytest.mark.parametrize("sent", EVERY)
def test_a_rank_alone_on_its_node_has_its_link_to_itself(sent: Transfer) -> None:
    algorithm = ALGORITHMS[sent.verb, str(sent.algorithm)]
    cluster = Cluster(8, LINK)
    assert cluster.seconds(sent) == algorithm.seconds(1e6, 8, LINK)
    assert cluster.node_bytes(sent) == pytest.approx(algorithm.volume(8) * 1e6)


@pytest.mark.parametrize("sent", EVERY)
def test_a_single_node_sends_nothing_over_its_link(sent: Transfer) -> None:
    cluster = Cluster(8, LINK, per_node=8, inside=INSIDE)
    assert cluster.node_bytes(sent) == 0.0
    assert cluster.seconds(sent) == ALGORITHMS[sent.verb, str(sent.algorithm)].seconds(1e6, 8, INSIDE)


@pytest.mark.parametrize("sent", EVERY)
def test_what_crosses_a_nodes_link_takes_its_time(sent: Transfer) -> None:
    cluster = Cluster(8, LINK, per_node=4, inside=INSIDE)
    latency_s = ALGORITHMS[sent.verb, str(sent.algorithm)].messages(8) * LINK.alpha_s
    assert cluster.seconds(sent) >= latency_s
    crossing_s = cluster.node_bytes(sent) * LINK.beta_s
    assert cluster.seconds(sent) == pytest.approx(latency_s + crossing_s) or crossing_s == 0.0


def test_ranks_that_all_talk_to_all_share_the_link_and_a_ring_does_not() -> None:
    cluster = Cluster(4, LINK, per_node=2, inside=INSIDE)
    assert cluster.node_bytes(Transfer("all_reduce", 4.0)) == 6.0  # 2·3/4 of the payload, as one rank sends
    assert cluster.node_bytes(Transfer("all_to_all", 4.0)) == 4.0  # two ranks, to two others each


@pytest.mark.parametrize("verb", ["all_gather", "all_to_all"])
def test_on_a_long_link_all_messages_of_a_rank_leave_at_once(verb: str) -> None:
    near, far = (Cluster(4, Link(alpha_s, 1e-8)) for alpha_s in (2e-3, 20e-3))
    sent = Transfer(verb, 4.0)
    assert near.seconds(sent) == pytest.approx(3 * 2e-3 + near.node_bytes(sent) * 1e-8)
    assert far.seconds(sent) == pytest.approx(20e-3 + far.node_bytes(sent) * 1e-8)
    assert far.latency_s(sent) == pytest.approx(19e-3)
    assert Cluster(32, Link(10e-3, 1e-8)).latency_s(sent) == pytest.approx(9e-3)


def test_ranks_that_share_a_long_link_gather_in_a_ring_and_between_nodes_at_once() -> None:
    gathered, far = Transfer("all_gather", 4.0), Link(20e-3, 1e-8)
    assert Cluster(8, far, 2, INSIDE).node_bytes(gathered) == 7 * 4.0
    assert Cluster(8, far, 2, INSIDE).seconds(gathered) > 7 * 20e-3
    swapped = Transfer("all_to_all", 4.0)
    assert Cluster(8, far, 2, INSIDE).seconds(swapped) < 21e-3
    assert Cluster(8, far, 2, INSIDE).between_s(gathered) == pytest.approx(20e-3 + 2 * 3 * 4.0 * 1e-8)


def test_two_levels_at_the_same_time_share_the_link() -> None:
    cluster = Cluster(4, LINK, per_node=2, inside=INSIDE)
    # Each of two ranks reduces its half with one other: 2·1/2 of 2 bytes, and both at once.
    assert cluster.between_s(Transfer("all_reduce", 2.0)) == pytest.approx(2 * 1e-3 + 4.0 * 1e-8)
    assert cluster.inside_s(2.0) == pytest.approx(1e-5 + 2.0 * 1e-10)
    assert Cluster(4, LINK).inside_s(2.0) == 0.0


@pytest.mark.parametrize(
    ("workers", "per_node", "inside", "said"),
    [(0, 1, None, "workers=0"), (6, 4, INSIDE, "do not fill"), (8, 4, None, "link inside")],
)
def test_refused(workers: int, per_node: int, inside: Link | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Cluster(workers, LINK, per_node, inside)


def test_the_same_seed_draws_the_same_and_more_workers_are_never_faster() -> None:
    draws = [straggler_factors(0.2, workers, 50, seed=3) for workers in (1, 2, 8, 64, 4096)]
    assert draws[2] == straggler_factors(0.2, 8, 50, seed=3) != straggler_factors(0.2, 8, 50, seed=4)
    for few, more in pairwise(draws):
        assert all(one <= other for one, other in zip(few, more, strict=True))


def test_a_rank_alone_takes_its_mean_time() -> None:
    # 20000 draws of a variance of e^0.04 - 1 = 0.041: their mean is off by 4 · sqrt(0.041 / 20000) at most.
    assert fmean(straggler_factors(0.2, 1, 20000)) == pytest.approx(1.0, abs=0.006)


def test_without_spread_no_rank_is_late() -> None:
    assert straggler_factors(0.0, 1000, 3) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(("spread", "workers", "steps"), [(-0.1, 2, 2), (0.1, 0, 2), (0.1, 2, 0)])
def test_nothing_to_draw_is_refused(spread: float, workers: int, steps: int) -> None:
    with pytest.raises(ValueError, match=r"must be|at least"):
        straggler_factors(spread, workers, steps)

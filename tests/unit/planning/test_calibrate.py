"""Bandwidth from whole gradients."""

from __future__ import annotations

import pytest

from gradwire.planning import Link, Network, calibrated
from gradwire.planning.collectives import Transfer, time_of

TRUE = Link(alpha_s=6e-4, beta_s=8 / 316e6)
BUCKETS = (1e6, 4e6, 25e6)
WORLD = 4


def _dense_s(link: Link) -> float:
    return sum(time_of(Transfer("all_reduce", size), WORLD, Network(link)) for size in BUCKETS)


@pytest.mark.parametrize("found", [0.0, 4e-9, 1.7e-8])
def test_a_bandwidth_that_a_burst_has_feigned_is_put_right_for_all_verbs(found: float) -> None:
    feigned = Link(TRUE.alpha_s, found)
    slower = Link(1e-3, 1e-7)
    network = Network(feigned, {"all_reduce": feigned, "all_gather": feigned, "shift": slower})
    right = calibrated(network, _dense_s(TRUE), sum(BUCKETS), len(BUCKETS), WORLD)
    for verb in ("all_reduce", "all_gather", "broadcast"):
        assert right.of(verb).beta_s == pytest.approx(TRUE.beta_s, rel=1e-9)
        assert right.of(verb).alpha_s == TRUE.alpha_s
    assert right.of("shift") == slower


def test_nothing_is_made_of_a_time_that_latencies_explain() -> None:
    network = Network(Link(1e-3, 1e-9))
    assert calibrated(network, 0.01, 1e6, 2, WORLD) == network
    assert calibrated(network, 1.0, 0.0, 2, WORLD) == network

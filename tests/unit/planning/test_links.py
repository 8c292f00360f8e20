"""Lines through measured times, and what a dense gradient says of a link."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from gradwire.planning.collectives import Transfer, time_of
from gradwire.planning.costs import Line, Link, Network
from gradwire.planning.links import SLOWER, calibrated, straight_line

SIZES = [2.0**power for power in range(6, 21, 2)]


@pytest.mark.parametrize(("base_s", "slope_s"), [(1e-5, 1e-9), (0.0, 1e-9), (1e-3, 0.0), (1.0, 1e-6)])
def test_points_on_a_line_give_that_line(base_s: float, slope_s: float) -> None:
    line = straight_line([(x, base_s + slope_s * x) for x in SIZES]).line
    # A pair of points loses at most the digits of x2/x1, which is 4 at least here.
    assert line.base_s == pytest.approx(base_s, rel=1e-9, abs=1e-12)
    assert line.slope_s == pytest.approx(slope_s, rel=1e-9, abs=1e-18)


@pytest.mark.parametrize("wrong", range(1, 7))
def test_one_disturbed_measurement_moves_nothing(wrong: int) -> None:
    points = [(x, (1e-5 + 1e-9 * x) * (50.0 if i == wrong else 1.0)) for i, x in enumerate(SIZES)]
    fit = straight_line(points)
    assert fit.line.base_s == pytest.approx(1e-5, rel=1e-9)
    assert fit.line.slope_s == pytest.approx(1e-9, rel=1e-9)
    assert fit.residual < 1e-9
    assert min(fit.deviations) == pytest.approx(1 / 50 - 1)


def test_no_line_of_a_fine_grid_is_better() -> None:
    draw = random.Random(3)
    points = [(x, (1e-4 + 1e-9 * x) * draw.uniform(0.7, 1.5)) for x in SIZES]

    def cost(line: Line) -> float:
        return sum(abs(line(x) - s) / s for x, s in points)

    best = cost(straight_line(points).line)
    grid = product([i * 2e-6 for i in range(100)], [i * 2e-11 for i in range(100)])
    assert best <= min(cost(Line(*each)) for each in grid) + 1e-12


def test_noise_moves_a_prediction_by_its_own_size_times_the_points() -> None:
    # The true line's cost is at most n·ε, so is the best one's; at a point both differ from the same measured
    # value, by 2n·ε together at most.
    draw, noise = random.Random(5), 0.02
    for _ in range(20):
        points = [(x, (1e-5 + 1e-9 * x) * draw.uniform(1 - noise, 1 + noise)) for x in SIZES]
        line = straight_line(points).line
        for x, seconds in points:
            assert abs(line(x) - (1e-5 + 1e-9 * x)) <= 2 * len(points) * noise / (1 - noise) * seconds


def test_times_that_fall_with_size_give_neither_a_negative_slope_nor_base() -> None:
    falling = straight_line([(1.0, 5.0), (2.0, 4.0), (3.0, 3.0)]).line
    assert falling.slope_s == 0.0
    steep = straight_line([(1.0, 1.0), (2.0, 5.0), (3.0, 9.0)]).line
    assert steep.base_s >= 0.0


def test_one_size_alone_is_all_slope() -> None:
    assert straight_line([(4.0, 2.0), (4.0, 2.0)]).line == Line(0.0, 0.5)


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        straight_line([])


TRUE = Link(alpha_s=6e-4, beta_s=8 / 316e6)
BUCKETS = (1e6, 4e6, 25e6)
WORLD = 4


def _dense_s(link: Link) -> float:
    return sum(time_of(Transfer("all_reduce", size), WORLD, Network(link)) for size in BUCKETS)


@pytest.mark.parametrize("found", [0.0, 4e-9, 1.7e-8])
def test_a_bandwidth_that_a_burst_has_feigned_is_put_right_for_all_verbs(found: float) -> None:
    feigned = Link(TRUE.alpha_s, found)
    slower = Link(1e-3, 4e-8)
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


def test_a_probe_that_was_disturbed_makes_no_link_slower_than_the_dense_gradient_found_it() -> None:
    """A busy machine took 30 times as long for the probes' bytes as for those of the dense steps."""
    disturbed = Link(TRUE.alpha_s, 30 * TRUE.beta_s)
    network = Network(disturbed, {"all_reduce": disturbed, "all_gather": disturbed})
    right = calibrated(network, _dense_s(TRUE), sum(BUCKETS), len(BUCKETS), WORLD)
    assert right.of("all_reduce").beta_s == pytest.approx(TRUE.beta_s, rel=1e-9)
    for verb in ("all_gather", "broadcast"):
        assert right.of(verb).beta_s == pytest.approx(SLOWER * TRUE.beta_s, rel=1e-9)


def test_a_dense_gradient_that_is_mostly_latency_says_nothing_against_a_probe() -> None:
    far = Link(1e-2, 1e-9)
    network = Network(replace(far, beta_s=1e-7))
    assert calibrated(network, _dense_s(far), sum(BUCKETS), len(BUCKETS), WORLD) == network

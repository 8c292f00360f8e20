"""Lines through points."""

from __future__ import annotations

import random
from itertools import product

import pytest

from gradwire.measure.fit import straight_line
from gradwire.planning.costs import Line

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

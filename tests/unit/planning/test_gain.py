"""Gains from a histogram against those of an exact top-k."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from gradwire.kernels import magnitude_edges, magnitude_histogram
from gradwire.planning import Magnitudes, gains
from tests.unit.kernels.inputs import FINITE, heavy_tail, normal, special, zeros

RATIOS = (1.0, 0.5, 0.1, 0.033, 0.011, 0.004, 0.001)
every_draw = pytest.mark.parametrize(
    "draw", [draw for draw in FINITE if draw is not zeros], ids=lambda draw: draw.__name__
)


def of(x: Tensor) -> Magnitudes:
    counts, energies = magnitude_histogram(x)
    return Magnitudes(magnitude_edges().numpy(), counts.numpy(), energies.numpy())


def exact(x: Tensor, ratio: float) -> float:
    """By sorting, in float64."""
    squares = x.double().square().sort(descending=True).values
    if squares.sum() == 0:
        return 1.0
    return float(squares[: max(1, round(ratio * x.numel()))].sum() / squares.sum())


@every_draw
@pytest.mark.parametrize("n", [1, 7, 1000, 40_009])
def test_the_gain_of_an_exact_top_k_lies_within_the_error(draw: Callable[[int], Tensor], n: int) -> None:
    x = draw(n)
    for ratio, found in zip(RATIOS, gains(of(x), RATIOS), strict=True):
        # Sums of n squares in float64 in another order: n·2^-53 relative.
        assert abs(found.value - exact(x, ratio)) <= found.error + n * 2.0**-52


@every_draw
def test_the_error_is_that_of_a_bins_width(draw: Callable[[int], Tensor]) -> None:
    x = draw(40_009)
    magnitudes, total = of(x), float(x.double().square().sum())
    for ratio, found in zip(RATIOS, gains(magnitudes, RATIOS), strict=True):
        kept = max(1, round(ratio * x.numel()))
        threshold = float(x.double().abs().sort(descending=True).values[kept - 1])
        place = np.searchsorted(magnitudes.edges, threshold, side="right") - 1
        inside, sent = float(magnitudes.edges[place]), min(kept, int(magnitudes.counts[place]))
        # An eighth of an octave, which is at most an eighth wide; subnormals have bins of fixed width.
        width = max(1 / 8, 2.0**-129 / max(inside, 2.0**-149))
        assert found.error <= sent * (inside + 2.0**-149) ** 2 * (width + width**2 / 2) / total + 1e-15


def test_the_error_is_small_where_it_matters() -> None:
    for x in (normal(200_003), heavy_tail(200_003)):
        assert max(found.error for found in gains(of(x), RATIOS)) < 0.005


def test_units_and_ranks_add_up() -> None:
    x, y = normal(5000), 3 * normal(7001)
    together, one, other = of(torch.cat([x, y])), of(x), of(y)
    added = Magnitudes(one.edges, one.counts + other.counts, one.energies + other.energies)
    assert [g.value for g in gains(added, RATIOS)] == pytest.approx(
        [g.value for g in gains(together, RATIOS)]
    )


def test_gain_rises_with_the_ratio_to_one() -> None:
    values = [found.value for found in gains(of(normal(9973)), sorted(RATIOS))]
    assert values == sorted(values)
    assert values[-1] == pytest.approx(1.0, abs=1e-12)


def test_nothing_is_lost_of_nothing() -> None:
    for x in (torch.zeros(0), torch.zeros(100)):
        assert [tuple(found) for found in gains(of(x), [0.01])] == [(1.0, 0.0)]


def test_infinities_and_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="infinities"):
        gains(of(special(1000)), [0.1])
    with pytest.raises(ValueError, match="n bins have n \\+ 1 edges"):
        Magnitudes(np.zeros(3), np.zeros(3, np.int64), np.zeros(3))

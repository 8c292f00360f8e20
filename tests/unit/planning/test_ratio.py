"""The exact sweep, its front and its knee; gains from a histogram against those of an exact top-k."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from gradwire.kernels.magnitudes import magnitude_edges, magnitude_histogram
from gradwire.planning.ratio import (
    Magnitudes,
    RatioCandidate,
    candidate_ratios,
    gains,
    knee,
    pareto_front,
)
from tests.support.inputs import FINITE, heavy_tail, normal, special, zeros
from tests.support.looped import looped
from tests.support.planning_problems import best_ratio, fine_ratios, typical


def test_candidates_are_the_papers() -> None:
    # "[0.1, 0.033, 0.011, 0.004, 0.001]"
    assert [round(ratio, 3) for ratio in candidate_ratios()] == [0.1, 0.033, 0.011, 0.004, 0.001]
    assert candidate_ratios()[-1] == 0.001
    assert candidate_ratios(0.5, 0.5) == (0.5,)
    assert candidate_ratios(0.4, 0.5) == (0.5, 0.4)
    assert candidate_ratios(0.01, 0.09, 3.0) == pytest.approx((0.09, 0.03, 0.01))


@pytest.mark.parametrize("options", [(0.0, 0.1, 3.0), (0.2, 0.1, 3.0), (0.1, 1.5, 3.0), (0.1, 0.2, 1.0)])
def test_ranges_without_a_candidate_are_refused(options: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="needs 0 < low"):
        candidate_ratios(*options)


@pytest.mark.parametrize("seed", range(10))
def test_the_front_is_what_nobody_beats(seed: int) -> None:
    draw = Random(seed)
    number = draw.randint(1, 25)
    found = [
        RatioCandidate(i / 100, draw.randint(1, 5), draw.randint(1, 5), draw.choice((0.1, 0.2, 0.5, 1.0)))
        for i in range(1, number + 1)
    ]
    front = pareto_front(found)

    def beats(one: RatioCandidate, other: RatioCandidate) -> bool:
        pairs = list(zip(one.objectives, other.objectives, strict=True))
        return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)

    assert front == [each for each in found if not any(beats(other, each) for other in found)]
    assert knee(front) in front


def test_a_candidate_that_is_best_at_everything_is_the_knee() -> None:
    best = RatioCandidate(0.05, 1.0, 1.0, 0.9)
    found = pareto_front([RatioCandidate(0.1, 2.0, 2.0, 0.8), best, RatioCandidate(0.01, 1.0, 3.0, 0.9)])
    assert found == [best]
    assert knee(found) == best


def test_units_do_not_move_the_knee() -> None:
    front = [typical(1.0)(ratio) for ratio in fine_ratios()]
    scaled = [
        each._replace(compress_s=1e3 * each.compress_s, communicate_s=1e-3 * each.communicate_s)
        for each in front
    ]
    assert knee(front).ratio == knee(scaled).ratio


def test_of_equally_near_points_the_one_that_sends_most() -> None:
    one, other = RatioCandidate(0.01, 1.0, 1.0, 0.5), RatioCandidate(0.1, 1.0, 2.0, 1.0)
    assert knee([one, other]) == knee([other, one]) == other


def test_the_more_small_ratios_lose_the_more_is_sent() -> None:
    chosen = [best_ratio(typical(1.0, lost), fine_ratios()).ratio for lost in (0.001, 0.01, 0.1)]
    assert chosen == sorted(chosen)
    assert chosen[0] < chosen[-1]


def test_an_empty_front_has_no_knee() -> None:
    with pytest.raises(ValueError, match="no knee"):
        knee([])


RATIOS = (1.0, 0.5, 0.1, 0.033, 0.011, 0.004, 0.001)
every_draw = looped("draw", [draw for draw in FINITE if draw is not zeros])


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
@looped("n", [1, 7, 1000, 40_009])
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

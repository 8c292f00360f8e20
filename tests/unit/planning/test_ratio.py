"""The exact sweep, its front and its knee."""

from __future__ import annotations

from random import Random

import pytest

from gradwire.planning import Candidate, best_ratio, candidate_ratios
from gradwire.planning.ratio import fine_ratios, knee, pareto_front
from tests.unit.planning.instances import typical


def test_candidates_are_the_papers() -> None:
    # "[0.1, 0.033, 0.011, 0.004, 0.001]"
    assert [round(ratio, 3) for ratio in candidate_ratios()] == [0.1, 0.033, 0.011, 0.004, 0.001]
    assert candidate_ratios(0.5, 0.5) == (0.5,)
    assert candidate_ratios(0.01, 0.09, 3.0) == pytest.approx((0.09, 0.03, 0.01))
    assert fine_ratios(0.01, 1.0, 3) == pytest.approx((1.0, 0.1, 0.01))


@pytest.mark.parametrize("options", [(0.0, 0.1, 3.0), (0.2, 0.1, 3.0), (0.1, 1.5, 3.0), (0.1, 0.2, 1.0)])
def test_ranges_without_a_candidate_are_refused(options: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="needs 0 < low"):
        candidate_ratios(*options)


@pytest.mark.parametrize("seed", range(10))
def test_the_front_is_what_nobody_beats(seed: int) -> None:
    draw = Random(seed)
    number = draw.randint(1, 25)
    found = [
        Candidate(i / 100, draw.randint(1, 5), draw.randint(1, 5), draw.choice((0.1, 0.2, 0.5, 1.0)))
        for i in range(1, number + 1)
    ]
    front = pareto_front(found)

    def beats(one: Candidate, other: Candidate) -> bool:
        pairs = list(zip(one.objectives, other.objectives, strict=True))
        return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)

    assert front == [each for each in found if not any(beats(other, each) for other in found)]
    assert knee(front) in front


def test_a_candidate_that_is_best_at_everything_is_the_knee() -> None:
    best = Candidate(0.05, 1.0, 1.0, 0.9)
    found = pareto_front([Candidate(0.1, 2.0, 2.0, 0.8), best, Candidate(0.01, 1.0, 3.0, 0.9)])
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
    one, other = Candidate(0.01, 1.0, 1.0, 0.5), Candidate(0.1, 1.0, 2.0, 1.0)
    assert knee([one, other]) == knee([other, one]) == other


def test_the_more_small_ratios_lose_the_more_is_sent() -> None:
    chosen = [best_ratio(typical(1.0, lost), fine_ratios()).ratio for lost in (0.001, 0.01, 0.1)]
    assert chosen == sorted(chosen)
    assert chosen[0] < chosen[-1]


def test_an_empty_front_has_no_knee() -> None:
    with pytest.raises(ValueError, match="no knee"):
        knee([])

"""The sampler itself: all pairs, few rows, the same in every process."""

from __future__ import annotations

from itertools import combinations, product

from tests.laws.pairwise import all_pairs
from tests.support.looped import looped

LEVELS = (range(7), "abc", range(4), "xyz", (True, False))


@looped("seed", range(5))
@looped("levels", [LEVELS, ("ab", "cd"), ("abc", "d", "ef")])
def test_every_two_values_meet(levels, seed: int) -> None:
    rows = all_pairs(levels, seed)
    for one, other in combinations(range(len(levels)), 2):
        met = {(row[one], row[other]) for row in rows}
        assert met == set(product(levels[one], levels[other]))


@looped("seed", range(5))
def test_rows_are_few(seed: int) -> None:
    # The two longest factors alone need 7·4 = 28; all combinations would be 504.
    assert 28 <= len(all_pairs(LEVELS, seed)) <= 40


def test_the_seed_alone_decides() -> None:
    assert all_pairs(LEVELS, 1) == all_pairs(LEVELS, 1)
    assert all_pairs(LEVELS, 1) != all_pairs(LEVELS, 2)

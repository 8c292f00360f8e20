"""Few rows that hold every pair of values: most bugs need one odd value, or two that meet."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

Pair = tuple[tuple[int, int], tuple[int, int]]


def all_pairs(levels: Sequence[Sequence[Any]], seed: int, candidates: int = 6) -> list[tuple[Any, ...]]:
    """Rows, one value per factor, such that any two values of different factors meet in some row.

    Greedy: of a few random rows that hold a pair still missing, keep the one that holds most of them.
    """
    rng = random.Random(seed)
    missing = _pairs(levels)
    rows = []
    while missing:
        needed = rng.choice(list(missing)) if len(missing) < 2000 else next(iter(missing))
        drafts = [_draft(levels, needed, missing, rng) for _ in range(candidates)]
        best = max(drafts, key=lambda row: sum(map(missing.__contains__, _held(row))))
        for pair in _held(best):
            missing.pop(pair, None)
        rows.append(tuple(values[choice] for values, choice in zip(levels, best, strict=True)))
    return rows


def _pairs(levels: Sequence[Sequence[Any]]) -> dict[Pair, None]:
    # A dictionary keeps its order, so that equal seeds give equal rows in every process.
    return {
        ((one, i), (other, j)): None
        for one, other in combinations(range(len(levels)), 2)
        for i in range(len(levels[one]))
        for j in range(len(levels[other]))
    }


def _held(row: Sequence[int]) -> Iterator[Pair]:
    return combinations(enumerate(row), 2)


def _draft(
    levels: Sequence[Sequence[Any]], needed: Pair, missing: dict[Pair, None], rng: random.Random
) -> list[int]:
    """A row with `needed` in it, filled factor by factor with the value that meets most missing pairs."""
    chosen = dict(needed)
    factors = [factor for factor in range(len(levels)) if factor not in chosen]
    for factor in rng.sample(factors, len(factors)):
        before = [other for other in chosen.items() if other[0] < factor]
        after = [other for other in chosen.items() if other[0] > factor]
        scores = []
        for value in range(len(levels[factor])):
            here = factor, value
            met = sum([(other, here) in missing for other in before])
            met += sum([(here, other) in missing for other in after])
            scores.append((met, rng.random(), value))
        chosen[factor] = max(scores)[2]
    return [chosen[factor] for factor in range(len(levels))]

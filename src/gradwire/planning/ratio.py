"""Which ratio: the knee of what it costs in time against what it loses of the gradient.

"Flexible communication …" (Tyagi, Swany 2024, section 3-E, equation 6) minimises compression time,
communication time and 1/gain together, and takes the knee point of the Pareto front.

Differences from the paper: the choice has one dimension, so an exact sweep over the candidates replaces the
genetic algorithm, which finds the same; the gain of each comes from a histogram (`gain.py`). What a knee is
the paper does not say: here the point of the front next to the ideal, each objective scaled to 0 … 1 over
the front.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

LOWEST, HIGHEST, FACTOR = 0.001, 0.1, 3.0


class Candidate(NamedTuple):
    """A ratio and its three objectives: two times in seconds, and the compression gain (0, 1]."""

    ratio: float
    compress_s: float
    communicate_s: float
    gain: float

    @property
    def objectives(self) -> tuple[float, float, float]:
        """What is minimised; nothing sent loses without bound."""
        return self.compress_s, self.communicate_s, 1.0 / self.gain if self.gain > 0 else math.inf


Evaluate = Callable[[float], Candidate]
"""Objectives of any ratio, by measured lines, calibrated links and a histogram."""


def candidate_ratios(low: float = LOWEST, high: float = HIGHEST, factor: float = FACTOR) -> tuple[float, ...]:
    """high, high/factor, … down to `low`.

    >>> [round(ratio, 4) for ratio in candidate_ratios()]
    [0.1, 0.0333, 0.0111, 0.0037, 0.0012]
    """
    if not (0.0 < low <= high <= 1.0 and factor > 1.0):
        raise ValueError(
            f"low={low}, high={high}, factor={factor}: needs 0 < low <= high <= 1 and factor > 1"
        )
    steps = math.floor(math.log(high / low) / math.log(factor) + 1e-9)
    return tuple(high / factor**step for step in range(steps + 1))


def fine_ratios(low: float = LOWEST, high: float = HIGHEST, number: int = 101) -> tuple[float, ...]:
    """So many ratios at equal distances on a logarithmic scale, the largest first."""
    return tuple(float(ratio) for ratio in np.geomspace(high, low, number))


def pareto_front(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that no other one beats: nowhere worse and somewhere better.

    >>> cheap, good = Candidate(0.01, 1.0, 1.0, 0.5), Candidate(0.1, 1.0, 2.0, 0.9)
    >>> pareto_front([cheap, good, Candidate(0.05, 1.5, 2.0, 0.6)]) == [cheap, good]
    True
    """
    table = _table(candidates)
    not_worse = (table[:, None, :] <= table[None, :, :]).all(axis=2)
    better = (table[:, None, :] < table[None, :, :]).any(axis=2)
    beaten = np.any(not_worse & better, axis=0)
    return [candidates[int(place)] for place in np.flatnonzero(~beaten)]


def knee(front: Sequence[Candidate]) -> Candidate:
    """The point of a front that is nearest to the ideal one; of several the one that sends most.

    Each objective is scaled to 0 … 1 over the front, so no unit matters; the ideal has the best of each.
    """
    if not front:
        raise ValueError("an empty front has no knee")
    table = _table(front)
    low, high = table.min(axis=0), table.max(axis=0)
    width = np.where(high > low, high - low, 1.0)
    distance = np.sqrt((((table - low) / width) ** 2).sum(axis=1))
    nearest = [each for each, d in zip(front, distance, strict=True) if d <= distance.min() * (1 + 1e-12)]
    return max(nearest, key=lambda candidate: candidate.ratio)


def best_ratio(evaluate: Evaluate, ratios: Sequence[float] | None = None) -> Candidate:
    """The exact sweep: evaluate every ratio, by default the paper's five; the knee of their front."""
    return knee(pareto_front([evaluate(ratio) for ratio in ratios or candidate_ratios()]))


def _table(candidates: Sequence[Candidate]) -> NDArray[np.float64]:
    return np.array([candidate.objectives for candidate in candidates], np.float64).reshape(-1, 3)

"""Choice of a ratio and of its collectives by "Flexible communication …" (Tyagi, Swany 2023).

Section 3-E, equation 6 minimises compression time, communication time and 1/gain together, and takes the knee
point of the Pareto front. The compression gain is ‖sent‖²/‖x‖² (GraVAC, Tyagi and Swany 2023; section 2-C).
Equation 4 is the cost of AR-Topk as a ring and as a tree; section 3-D has the cost of an all-gather.

Differences from the paper:

- An exact sweep over the candidates replaces the genetic algorithm, because the choice has one dimension. It
  finds the same point as a fine sweep; among five candidates, the nearest one.
- The paper runs ten iterations per candidate ratio, under checkpoint and restore, to find the gain. Here a
  histogram of counts and energies gives the gain of all ratios at once, with an error bound. It does not
  contain the memory that would build up after some steps at another ratio. So smaller ratios look better than
  ten iterations would show.
- The paper does not define a knee (its authors' code weighs time 0.6 and gain 0.4). Here it is the point of
  the front nearest to the ideal, with each objective scaled to 0 … 1 over the front.
- The smallest calibrated cost (`fastest`) decides between collectives. Tests compare it with the thresholds
  of the paper's equation 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwire.planning.collectives import Sends, Transfer

LOWEST, HIGHEST, FACTOR = 0.001, 0.1, 3.0
MOST = 100
"""Candidate ratios at most. Ranks tell each other a gain of each."""


class RatioCandidate(NamedTuple):
    """A ratio and its three objectives: two times in seconds, and the compression gain (0, 1]."""

    ratio: float
    compress_s: float
    communicate_s: float
    gain: float

    @property
    def objectives(self) -> tuple[float, float, float]:
        """The numbers to be minimised: two times and the loss, which is infinite if nothing is sent."""
        return self.compress_s, self.communicate_s, 1.0 / self.gain if self.gain > 0 else math.inf


Evaluate = Callable[[float], RatioCandidate]
"""Objectives of any ratio, by measured lines, calibrated links and a histogram."""


def candidate_ratios(low: float = LOWEST, high: float = HIGHEST, factor: float = FACTOR) -> tuple[float, ...]:
    """Ratios high, high/factor, …, with `low` in place of the nearest one; the paper's by default.

    Raises `ValueError` unless 0 < low <= high <= 1 and factor > 1, and for more than `MOST` ratios.

    >>> [round(ratio, 4) for ratio in candidate_ratios()]
    [0.1, 0.0333, 0.0111, 0.0037, 0.001]
    """
    if not (0.0 < low <= high <= 1.0 and factor > 1.0):
        raise ValueError(
            f"low={low}, high={high}, factor={factor}: needs 0 < low <= high <= 1 and factor > 1"
        )
    steps = max(round(math.log(high / low) / math.log(factor)), low < high)
    if steps >= MOST:
        raise ValueError(
            f"low={low}, high={high}, factor={factor}: more than {MOST} ratios; raise the factor"
        )
    return (*(high / factor**step for step in range(steps)), low)


def pareto_front(candidates: Sequence[RatioCandidate]) -> list[RatioCandidate]:
    """The candidates that no other one beats: nowhere worse and somewhere better.

    >>> cheap, good = RatioCandidate(0.01, 1.0, 1.0, 0.5), RatioCandidate(0.1, 1.0, 2.0, 0.9)
    >>> pareto_front([cheap, good, RatioCandidate(0.05, 1.5, 2.0, 0.6)]) == [cheap, good]
    True
    """
    table = _table(candidates)
    not_worse = (table[:, None, :] <= table[None, :, :]).all(axis=2)
    better = (table[:, None, :] < table[None, :, :]).any(axis=2)
    beaten = np.any(not_worse & better, axis=0)
    return [candidates[int(place)] for place in np.flatnonzero(~beaten)]


def knee(front: Sequence[RatioCandidate]) -> RatioCandidate:
    """The point of a front nearest to the ideal; among equals, the one that sends most.

    Each objective is scaled to 0 … 1 over the front, so that units do not matter. The ideal has the best
    value of each.

    Raises `ValueError` for an empty front.
    """
    if not front:
        raise ValueError("an empty front has no knee")
    table = _table(front)
    low, high = table.min(axis=0), table.max(axis=0)
    width = np.where(high > low, high - low, 1.0)
    distance = np.sqrt((((table - low) / width) ** 2).sum(axis=1))
    nearest = [each for each, d in zip(front, distance, strict=True) if d <= distance.min() * (1 + 1e-12)]
    return max(nearest, key=lambda candidate: candidate.ratio)


def _table(candidates: Sequence[RatioCandidate]) -> NDArray[np.float64]:
    return np.array([candidate.objectives for candidate in candidates], np.float64).reshape(-1, 3)


Floats = NDArray[np.float64]


class UncertainGain(NamedTuple):
    """A compression gain and by how much it can be wrong, either way."""

    value: float
    error: float


@dataclass(frozen=True)
class Magnitudes:
    """|x| in bins: ascending `edges` (bins + 1,), and (bins,) each, `counts` and sums of squares.

    Counts and energies of several units, or of several ranks, may be added up.
    """

    edges: Floats
    counts: NDArray[np.int64]
    energies: Floats

    def __post_init__(self) -> None:
        bins = len(self.counts)
        if len(self.edges) != bins + 1 or len(self.energies) != bins:
            sizes = f"{len(self.edges)} edges, {bins} counts, {len(self.energies)} energies"
            raise ValueError(f"{sizes}; n bins have n + 1 edges")

    @property
    def total(self) -> int:
        """Number of elements."""
        return int(self.counts.sum())


def gains(magnitudes: Magnitudes, ratios: Sequence[float]) -> list[UncertainGain]:
    """The gain of an exact top-k at every ratio; k is the ratio's share of the elements, at least 1. Raises
    `ValueError` if the histogram has NaN or Inf.

    Bins above the k-th magnitude are sent whole, and their energy is known. From the bin that contains it,
    the r largest of n elements are sent. Their energy is at least that of r average elements. It is at most r
    upper edges squared, and at most the bin's energy minus n − r lower edges squared. `value` is the middle
    of this range. If the width of the bin is the share w of its edge, the error is at most r·edge²·(w +
    w²/2), divided by ‖x‖².

    >>> exact = Magnitudes(np.array([0.0, 1.5, 2.5]), np.array([3, 1]), np.array([3.0, 4.0]))
    >>> [round(gain.value, 3) for gain in gains(exact, [0.25, 1.0])]
    [0.571, 1.0]
    """
    total_energy = float(magnitudes.energies.sum())
    if not np.isfinite(total_energy):
        raise ValueError("the histogram holds infinities or NaN, so no gain can be computed")
    if magnitudes.total == 0 or total_energy == 0.0:
        return [UncertainGain(1.0, 0.0) for _ in ratios]
    counts, energies = magnitudes.counts[::-1], magnitudes.energies[::-1]
    reached = np.cumsum(counts)
    energy = np.concatenate(((0.0,), np.cumsum(energies)))
    found = []
    for ratio in ratios:
        kept = min(max(1, round(ratio * magnitudes.total)), magnitudes.total)
        place = int(np.searchsorted(reached, kept))
        least, most = _part(magnitudes, place, int(kept - (reached[place] - counts[place])))
        middle, half = (least + most) / 2, (most - least) / 2
        found.append(UncertainGain((float(energy[place]) + middle) / total_energy, half / total_energy))
    return found


def _part(magnitudes: Magnitudes, from_top: int, taken: int) -> tuple[float, float]:
    """Least and most energy of the `taken` largest elements of a bin, which is number `from_top` from the top
    of the histogram.
    """
    place = len(magnitudes.counts) - 1 - from_top
    count, energy = int(magnitudes.counts[place]), float(magnitudes.energies[place])
    low, high = float(magnitudes.edges[place]), float(magnitudes.edges[place + 1])
    least = energy * taken / count
    most = min(energy - (count - taken) * low**2, taken * high**2) if taken < count else energy
    return least, max(least, most)


ALL_GATHER, RING, TREE, STAR = "all_gather", "ring", "tree", "star"


def ways(value_bytes: float, index_bytes: float | None = None) -> dict[str, tuple[Sends, ...]]:
    """The collectives of every way to agree on k chosen values of `value_bytes` together.

    `index_bytes` is the size of their indices: as much as the values in the paper, less if they are coded.
    Either all ranks' indices and values travel by all-gather, in its tree form; or the leader's indices by a
    tree broadcast and the values by an all-reduce.
    """
    places = value_bytes if index_bytes is None else index_bytes
    spread = Transfer("broadcast", places, "tree")
    return {
        ALL_GATHER: (Transfer("all_gather", value_bytes + places, "tree"),),
        RING: (spread, Transfer("all_reduce", value_bytes, "ring")),
        TREE: (spread, Transfer("all_reduce", value_bytes, "tree")),
        STAR: (spread, Transfer("all_reduce", value_bytes, "star")),
    }

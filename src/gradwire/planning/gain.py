"""How much of a gradient every ratio would keep, from one histogram of its magnitudes.

Compression gain is ‖sent‖²/‖x‖² (GraVAC, Tyagi and Swany 2023; "Flexible communication …", section 2-C).
The paper runs ten iterations for each candidate ratio under checkpoint–restore to find it; a histogram
with counts and energies gives it for all ratios at once, with a bound on the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Gain(NamedTuple):
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


def gains(magnitudes: Magnitudes, ratios: Sequence[float]) -> list[Gain]:
    """The gain of an exact top-k at every ratio; k is the ratio's share of the elements, at least 1.

    Bins above the k-th magnitude are sent whole, and their energy is known. Of the bin it falls into, the
    r largest of n elements are sent: not less energy than r average ones have, and at most r upper edges
    squared, nor what is left when the others have their lower edges squared. The value is the middle of
    that; a bin whose width is the share w of its edge leaves an error of at most r·edge²·(w + w²/2)
    before it is divided by ‖x‖².

    >>> exact = Magnitudes(np.array([0.0, 1.5, 2.5]), np.array([3, 1]), np.array([3.0, 4.0]))
    >>> [round(gain.value, 3) for gain in gains(exact, [0.25, 1.0])]
    [0.571, 1.0]
    """
    total_energy = float(magnitudes.energies.sum())
    if not np.isfinite(total_energy):
        raise ValueError("the histogram holds infinities or NaN: there is no gain to speak of")
    if magnitudes.total == 0 or total_energy == 0.0:
        return [Gain(1.0, 0.0) for _ in ratios]
    counts, energies = magnitudes.counts[::-1], magnitudes.energies[::-1]
    reached = np.cumsum(counts)
    energy = np.concatenate(((0.0,), np.cumsum(energies)))
    found = []
    for ratio in ratios:
        kept = min(max(1, round(ratio * magnitudes.total)), magnitudes.total)
        place = int(np.searchsorted(reached, kept))
        least, most = _part(magnitudes, place, int(kept - (reached[place] - counts[place])))
        middle, half = (least + most) / 2, (most - least) / 2
        found.append(Gain((float(energy[place]) + middle) / total_energy, half / total_energy))
    return found


def _part(magnitudes: Magnitudes, from_top: int, taken: int) -> tuple[float, float]:
    """Least and most energy of the `taken` largest elements of a bin."""
    place = len(magnitudes.counts) - 1 - from_top
    count, energy = int(magnitudes.counts[place]), float(magnitudes.energies[place])
    low, high = float(magnitudes.edges[place]), float(magnitudes.edges[place + 1])
    least = energy * taken / count
    most = min(energy - (count - taken) * low**2, taken * high**2) if taken < count else energy
    return least, max(least, most)

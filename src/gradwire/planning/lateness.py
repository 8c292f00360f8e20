"""Lateness of a recipe: number of steps' worth of gradient that wait in memory.

Lateness is the median of ‖unsent‖ / ‖gradient‖ over committed steps: the norm of the memory when a step
begins, divided by the norm of the step's gradient. It is measured in the steps that the recipe runs.
`docs/recipes.md` shows how it orders recipes, and from where on losses suffer.

- The norms of all ranks are pooled as roots of sums of squares. Gradient that cancels over ranks waits all
  the same.
- A memory counts by its weight (`Memory.weight`) and in full, with the part that a coefficient below 1
  discards. A momentum that a rank keeps by itself is not unsent gradient.
- First gradients, spikes and a warm-up do not decide. The median of the quotients stays the same if gradients
  grow tenfold and shrink again; the quotient of medians does not.
- A memory of momentum is compared with the momentum that a step adds.
- Units that take turns are counted over whole cycles of steps.

Everything but `Layers`, which computes one rank's numbers, uses values on which ranks agree.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

LEAST = 4
"""Looks from which lateness is told: what will be above a limit is above it by then. Twice as many at most
make the median."""
RISEN = 1.25
"""The growth from the older half of the looks to the newer above which lateness is not yet known."""


class Weighed(NamedTuple):
    """Numbers of one rank in one step, as norms: squares would exceed the range of the status vote's float32.

    - `fresh`: norm of the step's addition to the memory, or of its gradient if there is no memory.
    - `unsent`: norm of the memory when the step began, times its weight.
    - `latest` and `layer`: lateness and number of this rank's latest layer.
    """

    fresh: float = 0.0
    unsent: float = 0.0
    latest: float = 0.0
    layer: float = 0.0


class Lateness:
    """Lateness under one recipe, whose units take turns in a `cycle` of steps.

    Measured steps must form whole cycles (`is_weighed`). Raises `ValueError` for a cycle below one step.

    >>> lateness = Lateness()
    >>> for step in range(8):
    ...     lateness.add([Weighed(fresh=3.0, unsent=1.2), Weighed(fresh=4.0, unsent=1.6)])
    >>> lateness.late, lateness.is_known
    (0.4, True)
    """

    def __init__(self, cycle: int = 1) -> None:
        self._cycle, self._least = cycle, _cycles(LEAST, cycle)
        self._begun: list[tuple[float, float]] = []
        self._late: deque[float] = deque(maxlen=2 * self._least)
        self.latest, self.layer = 0.0, 0
        """Lateness of the latest layer on the rank where it is latest, and its number."""

    def add(self, rows: Sequence[Weighed]) -> None:
        """Add all ranks' numbers of a committed step. Numbers that are zero or not finite are ignored."""
        fresh, unsent = (math.hypot(*each) for each in list(zip(*rows, strict=True))[:2])
        if not (0.0 < fresh < math.inf and unsent < math.inf):
            return
        latest = max(rows, key=lambda row: row.latest)
        self.latest, self.layer = latest.latest, int(latest.layer)
        self._begun.append((fresh, unsent))
        if len(self._begun) >= self._cycle:
            usual, waits = map(root_mean_square, zip(*self._begun, strict=True))
            self._late.append(waits / usual)
            self._begun = []

    @property
    def late(self) -> float | None:
        """Steps' worth of gradient that waits; `None` before there are enough looks."""
        return median(self._late) if len(self._late) >= self._least else None

    @property
    def is_known(self) -> bool:
        """True if the lateness has settled: there are twice the needed measurements, and the median of the
        later half is not much above that of the earlier one.
        """
        values = list(self._late)
        if len(values) < 2 * self._least:
            return False
        return median(values[-self._least :]) <= RISEN * median(values[: -self._least])

    def save(self) -> dict[str, Any]:
        """The measurements, in lists of numbers."""
        return {"begun": [list(each) for each in self._begun], "late": list(self._late)}

    def take_up(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `save` returned."""
        # Older states also have norms of discarded gradient, which decide nothing.
        self._begun = [(fresh, unsent) for fresh, unsent, *_discarded in saved["begun"]]
        self._late.extend(saved["late"])


class Layers:
    """Layers of one rank, which names the latest of them in its row.

    >>> layers = Layers()
    >>> for step in range(4):
    ...     row = layers.weighed(fresh=[3.0, 4.0, 0.0], unsent=[1.5, 8.0, 0.0])
    >>> row.fresh, row.latest, row.layer
    (5.0, 2.0, 1)
    """

    def __init__(self, cycle: int = 1) -> None:
        looks = _cycles(LEAST, cycle) * cycle
        self._fresh: deque[Sequence[float]] = deque(maxlen=looks)
        self._unsent: deque[Sequence[float]] = deque(maxlen=looks)

    def weighed(self, fresh: Sequence[float], unsent: Sequence[float]) -> Weighed:
        """Add a step's norms, and return this rank's row with its latest layer.

        `fresh` and `unsent` are the norms of each layer's gradient and unsent gradient. Before enough steps
        are known, the row names no latest layer. A layer without a gradient is never the latest. Neither is
        one of which not all is finite.
        """
        self._fresh.append(fresh)
        self._unsent.append(unsent)
        latest, layer = 0.0, 0
        if len(self._unsent) == self._unsent.maxlen:
            usual = [median(each) for each in zip(*self._fresh, strict=True)]
            waits = [root_mean_square(each) for each in zip(*self._unsent, strict=True)]
            for number, (wait, step) in enumerate(zip(waits, usual, strict=True)):
                if step > 0.0 and latest < wait / step < math.inf:
                    latest, layer = wait / step, number
        return Weighed(math.hypot(*fresh), math.hypot(*unsent), latest, layer)


def _cycles(looks: int, cycle: int) -> int:
    """The least number of whole cycles of `cycle` steps that have `looks` steps or more. Raises `ValueError`
    for a cycle below one step.
    """
    if cycle < 1:
        raise ValueError(f"cycle={cycle} must be at least 1 step")
    return -(-looks // cycle)


def root_mean_square(values: Sequence[float]) -> float:
    """Root of the mean square of norms.

    >>> root_mean_square([1.0, 7.0])
    5.0
    """
    return math.sqrt(fmean(value * value for value in values))


def is_weighed(step: int, every: int, cycle: int = 1) -> bool:
    """True if `step` is to be measured: the last whole cycle of every `every` steps.

    Single steps at equal distances would always find units that take turns in the same phase.

    >>> [step for step in range(20) if is_weighed(step, every=8, cycle=3)]
    [5, 6, 7, 13, 14, 15]
    """
    return every - step % every <= cycle

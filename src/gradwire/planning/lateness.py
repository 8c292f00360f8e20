"""How late the gradient is that a recipe sends: how many steps' worth of it wait in memory.

Lateness is the median of ‖unsent‖ / ‖gradient‖ over committed steps: what waited when a step began, beside
what the step adds. It is measured in the steps that the recipe runs. How it orders recipes, and where losses
begin to show, is in `docs/choosing.md`.

- Each rank's own norms count, pooled as roots of sums of squares: what cancels over ranks waits all the same.
- A memory counts by its weight (`Memory.weight`), and in full: also the part that a coefficient below 1
  throws away in a fold. A momentum that a rank keeps by itself is not unsent gradient.
- First gradients, spikes and a warm-up do not decide. The median of the quotients holds still where gradients
  grow ten times and shrink again, and the quotient of medians does not.
- A memory of momentum is compared with the momentum that a step adds.
- Units that rest in turns are counted over whole cycles of steps.
- What is thrown away never arrives. `Lateness.error` tells it alone, as a share of a step's gradient.

All of it sees numbers that ranks have agreed on, except `Layers`, which makes one rank's.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

LEAST = 4
"""Looks from which lateness is told: what will be above a limit is above it by then. Twice as many at most
make the median."""
RISEN = 1.25
"""The growth from the older half of the looks to the newer above which lateness is not yet known."""


class Weighed(NamedTuple):
    """Numbers of one rank on one step, in norms: squares would leave the range of a verdict's float32.

    - `fresh`: what the step adds to the memory, or its gradient where there is none.
    - `unsent`: what waited when the step began, by the memory's weight.
    - `lost`: what the step throws away: of its gradient, where there is no memory, or of the memory, where
      that is added with a coefficient below 1.
    - `latest` and `layer`: how late this rank's latest layer is, and its number.
    """

    fresh: float = 0.0
    unsent: float = 0.0
    lost: float = 0.0
    latest: float = 0.0
    layer: float = 0.0


class Lateness:
    """Lateness under one recipe, whose units rest in turns in a `cycle` of so many steps.

    The steps that are looked at must be whole cycles (`is_weighed`). `ValueError` for a cycle below one step.

    >>> lateness = Lateness()
    >>> for step in range(8):
    ...     lateness.add([Weighed(fresh=3.0, unsent=1.2), Weighed(fresh=4.0, unsent=1.6)])
    >>> lateness.late, lateness.error, lateness.is_known
    (0.4, 0.0, True)
    """

    def __init__(self, cycle: int = 1) -> None:
        self._cycle, self._least = cycle, _cycles(LEAST, cycle)
        self._begun: list[tuple[float, float, float]] = []
        self._late: deque[float] = deque(maxlen=2 * self._least)
        self._error: deque[float] = deque(maxlen=2 * self._least)
        self.latest, self.layer = 0.0, 0
        """How late the latest layer is, on the rank where it is latest, and its number."""

    def add(self, rows: Sequence[Weighed]) -> None:
        """Take what all ranks say of a committed step. Where that is not finite, or zero, it says nothing."""
        fresh, unsent, lost = (math.hypot(*each) for each in list(zip(*rows, strict=True))[:3])
        if not (0.0 < fresh < math.inf and unsent < math.inf and lost < math.inf):
            return
        latest = max(rows, key=lambda row: row.latest)
        self.latest, self.layer = latest.latest, int(latest.layer)
        self._begun.append((fresh, unsent, lost))
        if len(self._begun) == self._cycle:
            usual, waits, goes = map(root_mean_square, zip(*self._begun, strict=True))
            self._late.append(waits / usual)
            self._error.append(goes / usual)
            self._begun = []

    @property
    def late(self) -> float | None:
        """Steps' worth of gradient that waits; `None` before there are enough looks."""
        return median(self._late) if len(self._late) >= self._least else None

    @property
    def error(self) -> float | None:
        """Share of its gradient that a step throws away; `None` before there are enough looks."""
        return median(self._error) if len(self._error) >= self._least else None

    @property
    def is_known(self) -> bool:
        """Whether there are twice as many looks as are needed, and the later half is not much above."""
        values = list(self._late)
        if len(values) < 2 * self._least:
            return False
        return median(values[-self._least :]) <= RISEN * median(values[: -self._least])


class Layers:
    """One rank's layers, of which it names the latest in its row.

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

    def weighed(self, fresh: Sequence[float], unsent: Sequence[float], lost: float = 0.0) -> Weighed:
        """The row of a step, from the norms of every layer; nothing about the latest before it is known.

        A layer without a gradient is never the latest. Neither is one of which not all is finite.
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
        return Weighed(math.hypot(*fresh), math.hypot(*unsent), lost, latest, layer)


def _cycles(looks: int, cycle: int) -> int:
    """The least number of whole cycles with so many looks or more."""
    if cycle < 1:
        raise ValueError(f"cycle={cycle} must be at least 1 step")
    return -(-looks // cycle)


def root_mean_square(values: Sequence[float]) -> float:
    """Of norms: the root of their mean square.

    >>> root_mean_square([1.0, 7.0])
    5.0
    """
    return math.sqrt(fmean(value * value for value in values))


def is_weighed(step: int, every: int, cycle: int = 1) -> bool:
    """Whether to look at `step`: a whole cycle of steps in a row out of `every` steps, at their end.

    Single steps at equal distances would find units that rest in turns always in the same phase.

    >>> [step for step in range(20) if is_weighed(step, every=8, cycle=3)]
    [5, 6, 7, 13, 14, 15]
    """
    return every - step % every <= cycle

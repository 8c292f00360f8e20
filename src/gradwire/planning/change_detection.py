"""Detection of changes: has a measured level moved, or does it only vary? One test for links, steps and
gains.

Values are compared as logarithms, so that doubling and halving count alike. A cumulative sum (CUSUM; Page
1954, "Continuous inspection schemes") adds up the deviations from the level that exceed the tolerance. A
change is reported when the sum reaches its limit: a large change early, a small one later.

Differences from the paper: level and spread are medians of measured values. Each value adds a limited amount,
so that a few disturbed values do not look like a change.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import islice
from statistics import median

THRESHOLD = 0.2
WINDOW = 15
"""Values from which a level is told."""
SOONEST = 6
"""Values that a change takes at least: if one in ten is disturbed, six in a row are one in a million."""
CERTAIN = 5.0
"""Standard deviations beyond the tolerance that must add up. Large, because the test is repeated at every
value."""
_LONG = 64
"""Number of recent values from which the spread is estimated."""


class ChangeDetector:
    """Detector for a change of the level of positive numbers by more than the share `threshold`.

    The first `window` values set the level. Detecting a change takes at least `soonest` values, which then
    begin the estimate of the new level. A deviation within the spread of the values is no change.

    >>> level = ChangeDetector()
    >>> [step for step, value in enumerate([1.0] * 20 + [2.0] * 30 + [1.0] * 30) if level.add(value)]
    [25, 55]
    """

    def __init__(self, threshold: float = THRESHOLD, window: int = WINDOW, soonest: int = SOONEST) -> None:
        if not threshold > 0.0:
            raise ValueError(f"threshold={threshold} must be above 0; 0.2 is a fifth more or less")
        self._least, self._window, self._soonest = math.log1p(threshold), window, soonest
        self._values: deque[float] = deque(maxlen=max(_LONG, window))
        self._centre: float | None = None
        self._sums, self._runs = [0.0, 0.0], [0, 0]
        self.before = self.now = 0.0
        """The level before the last change, and the present one; 0 while unknown."""
        self.since = 0
        """Number of values in which the last change was found."""

    def add(self, value: float) -> bool:
        """Add a value. Returns True if the level has just moved."""
        here = math.log(value)
        self._values.append(here)
        if self._centre is None:
            if len(self._values) >= self._window:
                self._centre = median(self._values)
                self.now = math.exp(self._centre)
            return False
        deviation = here - self._centre
        if not any(self._sums) and abs(deviation) <= self._least:
            return False
        return self._exceeds(0, deviation) or self._exceeds(1, -deviation)

    def _exceeds(self, side: int, deviation: float) -> bool:
        assert self._centre is not None, "only what is known can move"
        run = self._runs[side] + 1
        noise = _noise(list(islice(self._values, max(len(self._values) - run, self._window))))
        allowed, scale = max(self._least, noise), max(self._least, CERTAIN * noise)
        most = 1.0 / self._soonest
        total = self._sums[side] + max(-2.0 * most, min((deviation - allowed) / scale, most))
        self._sums[side], self._runs[side] = (total, run) if total > 0.0 else (0.0, 0)
        if total < 1.0 - 1e-9:  # equal parts, each rounded, need not add up to 1
            return False
        self._move(run)
        return True

    def _move(self, run: int) -> None:
        kept = list(self._values)[-run:]
        self.before, self.since = math.exp(self._centre or 0.0), run
        self.now = math.exp(median(kept))
        self._values.clear()
        self._values.extend(kept)
        self._centre, self._sums, self._runs = None, [0.0, 0.0], [0, 0]


class StepWatch:
    """Detector for a change of step times that no change of the link explains.

    It needs twice as many values as the detector of links. So a change of the link is found first.
    """

    def __init__(self, threshold: float = THRESHOLD) -> None:
        self._threshold = threshold
        self._level = self._anew()

    def _anew(self) -> ChangeDetector:
        return ChangeDetector(self._threshold, soonest=2 * SOONEST)

    def change_s(self, step_s: float, *, link_has_changed: bool) -> tuple[float, float] | None:
        """Add the time of a step in seconds, 0 if unknown. Returns the typical times (before, now) if they
        have just changed, else `None`.
        """
        if link_has_changed:
            self._level = self._anew()
        elif step_s > 0.0 and self._level.add(step_s):
            return self._level.before, self._level.now
        return None


def _noise(logarithms: Sequence[float]) -> float:
    """Upper estimate of the standard deviation of logarithms, in which single outliers do not count.
    >>> round(_noise([1.0, 1.1, 0.9, 50.0]), 3)
    0.296
    """
    # n values tell it to about 1/√n of itself; two such errors are allowed for.
    return deviation(logarithms) * (1.0 + 2.0 / math.sqrt(len(logarithms)))


def noise_of(values: Sequence[float]) -> float:
    """Relative standard deviation of positive values, estimated so that a few outliers do not count.
    >>> round(noise_of([1.0, 1.1, 0.9, 1.2, 50.0]), 3)
    0.135
    """
    return deviation(values) / median(values)


def error_of(noise: float, number: int) -> float:
    """The relative standard error of the median of `number` values, whose standard deviation is `noise`."""
    return 1.25 * noise / math.sqrt(number)


def middle_of(values: Sequence[float]) -> tuple[float, float]:
    """The median of positive values, and its standard error, as they vary themselves.

    >>> middle, error = middle_of([1.0, 1.1, 0.9, 1.2, 50.0])
    >>> middle, round(error, 3)
    (1.1, 0.083)
    """
    middle = median(values)
    return middle, middle * error_of(noise_of(values), len(values))


def deviation(values: Sequence[float]) -> float:
    """The standard deviation about the median: a few disturbed values do not count.

    >>> round(deviation([1.0, 1.1, 0.9, 1.2, 50.0]), 3)
    0.148
    """
    middle = median(values)
    # A normal's standard deviation is 1.48 times its median absolute deviation.
    return 1.48 * median(abs(value - middle) for value in values)

"""Whether a level has moved or only varies: one test for links, steps and gains.

Values are compared in logarithms, so that twice as much and half as much are equally far. A cumulative sum
adds up by how much they exceed what they may deviate by (Page 1954, "Continuous inspection schemes"): a
change is found as soon as there is enough of it, a small one later than a large one.

Differences from the paper: level and spread are measured, by medians, and one value adds a limited amount, so
that a few disturbed ones are not taken for a change.
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
"""Standard deviations that must add up, beyond those that are allowed: the test is made again and again."""
_LONG = 64
"""Values from which it is told how much they vary."""


class ChangeDetector:
    """The level of positive numbers, and whether it has moved by more than the share `threshold`.

    The first `window` values tell the level. A change takes at least `soonest` values; after it, the level is
    told anew, beginning with those values. A deviation smaller than the values' variation is no change
    either.

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
        """How many values the last change has been told from."""

    def add(self, value: float) -> bool:
        """Take the next value; whether the level has just moved."""
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
    """Notices when the time of steps changes although their link does not.

    A link that has changed says more, and is found before the steps are: they need twice as many values.
    """

    def __init__(self, threshold: float = THRESHOLD) -> None:
        self._threshold = threshold
        self._level = self._anew()

    def _anew(self) -> ChangeDetector:
        return ChangeDetector(self._threshold, soonest=2 * SOONEST)

    def change_s(self, step_s: float, *, link_has_changed: bool) -> tuple[float, float] | None:
        """Take what a step took, 0 if that is not known; what they took and take now, if that has changed."""
        if link_has_changed:
            self._level = self._anew()
        elif step_s > 0.0 and self._level.add(step_s):
            return self._level.before, self._level.now
        return None


def _noise(logarithms: Sequence[float]) -> float:
    """The most that their standard deviation may be.

    >>> round(_noise([1.0, 1.1, 0.9, 50.0]), 3)
    0.296
    """
    # n values tell it to about 1/√n of itself; two such errors are allowed for.
    return deviation(logarithms) * (1.0 + 2.0 / math.sqrt(len(logarithms)))


def noise_of(values: Sequence[float]) -> float:
    """The relative standard deviation of positive values: a few disturbed ones do not count.

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

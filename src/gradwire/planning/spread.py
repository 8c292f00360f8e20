"""Whether a time has changed or only varies, by the medians of repeated measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

WINDOW = 15
"""Steps in a median; eight of them have to change before it does."""
CERTAIN = 5.0
"""Standard errors that a difference must have. They are many because a long run compares often."""


def noise_of(values: Sequence[float]) -> float:
    """The relative standard deviation, from deviations from the median: a few disturbed ones do not count.

    >>> round(noise_of([1.0, 1.1, 0.9, 1.2, 50.0]), 3)
    0.135
    """
    middle = median(values)
    # A normal's standard deviation is 1.48 times its median absolute deviation.
    return 1.48 * median(abs(value - middle) for value in values) / middle


def error_of(noise: float, number: int = WINDOW) -> float:
    """The relative standard error of the difference of two medians of `number` values each."""
    return 1.25 * math.sqrt(2 / number) * noise


def has_moved(before: Sequence[float], after: Sequence[float], least: float) -> bool:
    """Whether the median of as many values has moved by the share `least`, and by more than they vary.

    >>> steady, rising = [1.0, 1.01, 0.99], [1.5, 1.51, 1.49]
    >>> has_moved(steady, rising, least=0.2), has_moved(steady, rising, least=0.6)
    (True, False)
    >>> has_moved([1.0, 1.3, 0.7], [1.5, 1.8, 1.2], least=0.2)
    False
    """
    error = error_of(max(noise_of(before), noise_of(after)), len(after))
    return abs(median(after) / median(before) - 1.0) > max(least, CERTAIN * error)

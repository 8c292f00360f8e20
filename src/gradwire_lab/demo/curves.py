"""Losses over time: when a step is over on the slow link, when a loss is reached, who is ahead."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from statistics import median

from gradwire_lab.demo.race import Course

WINDOW = 15
"""Steps over which losses are averaged, because single batches jump."""


def smooth(values: Sequence[float | None], window: int = WINDOW) -> list[float]:
    """Mean of the last `window` known values; NaN where none of them is.

    As many as `values`: a curve that diverges must not move later ones to the left.
    """
    smoothed = []
    for index in range(len(values)):
        known = [value for value in values[max(0, index - window + 1) : index + 1] if value is not None]
        smoothed.append(sum(known) / len(known) if known else math.nan)
    return smoothed


def on_slow_link(course: Course, warmup: int, like: Course | None = None) -> list[float]:
    """Seconds of each step of a course on the slow link: as measured there, then the median of the measured
    ones.

    Args:
        course: all its steps, of which the first `course.shaped` used the slow link.
        warmup: steps at the beginning that do not count for the median.
        like: the course whose times one takes that never used the slow link.
    """
    timed = course if course.shaped or like is None else like
    measured = timed.step_s[: timed.shaped]
    if not measured:
        return []
    usual = median(measured[warmup:] or measured)
    return (measured + [usual] * len(course))[: len(course)]


def ends_s(course: Course, warmup: int, like: Course | None = None) -> list[float]:
    """The time at which each step is over on the slow link, in seconds of training. The arguments are those
    of `on_slow_link`.
    """
    return list(accumulate(on_slow_link(course, warmup, like)))


def reached(losses: Sequence[float], times_s: Sequence[float], target: float) -> float | None:
    """The time at which smoothed losses are first at or below `target`; None where they never are.

    >>> reached([3.0, 2.0, 1.0], [10.0, 20.0, 30.0], 2.0)
    20.0
    """
    pairs = zip(losses, times_s, strict=False)
    return next((second for loss, second in pairs if loss <= target), None)


def ahead(
    mine: tuple[Sequence[float], Sequence[float]], other: tuple[Sequence[float], Sequence[float]], start: int
) -> float | None:
    """The share of the time after step `start` in which my loss is below the other's at the same time.

    Both are smoothed losses and the times at which their steps are over. None where nothing is left.

    >>> ahead(([9.0, 2.0, 2.0], [1.0, 2.0, 3.0]), ([4.0, 1.0], [0.5, 2.5]), 1)
    0.5
    """
    losses, times_s = mine
    other_losses, other_s = other
    won, whole = 0.0, 0.0
    for index in range(start, min(len(losses), len(times_s))):
        place = bisect_right(other_s, times_s[index]) - 1
        if place < 0 or place >= len(other_losses):
            continue
        lasted_s = times_s[index] - (times_s[index - 1] if index else 0.0)
        whole += lasted_s
        won += lasted_s * (losses[index] < other_losses[place])
    return won / whole if whole else None


def lags(mine_s: Sequence[float], other_s: Sequence[float]) -> list[float]:
    """By how many seconds each of my steps was over later than the other's, from what each step took.

    >>> lags([1.0, 3.0, 1.0], [2.0, 1.0, 2.0])
    [-1.0, 1.0, 0.0]
    """
    return list(accumulate(mine - other for mine, other in zip(mine_s, other_s, strict=False)))

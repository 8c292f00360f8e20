"""Search for the fastest grouping by timing real iterations: MergeComp's Algorithm 2, or a contest of a few.

Wang et al. 2021, section 4.3. Differences from the paper: every grouping runs for a few steps of the ongoing
training. The first two do not count: the first has the time of the grouping before, and in the second,
buffers are cold. The median of the others counts, three if the budget allows it. A search compares boundaries
that are an eighth of its bracket apart, because neighbours differ by less than the noise of a step. Its
budget is 100 steps by default; the paper's search for two groups takes fewer than 50. If the budget is too
small for all tensors, neighbouring tensors stay together. All ranks see the same times, those of the slowest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from math import comb
from statistics import median

from gradwire.planning.boundaries import Boundaries
from gradwire.planning.facts import StepObservation
from gradwire.planning.merge import Seconds, compared, search_boundaries

MOST_STEPS = 100
"""The default budget of a search, in steps: three of each grouping count then, for some 300 tensors."""
APART = 0.125
"""Distance of compared boundaries, as a share of the search's bracket. On random problems of 54 and 105
tensors, with step times that vary by 1 %, the result takes 0.3 to 0.5 % longer than the best of one and two
groups. It takes 1.0 to 1.4 % longer if neighbours are compared, and a random boundary 8 to 9 %."""
UNCOUNTED = 2
"""Steps of a grouping before those that count: the first follows another's, the second has cold buffers."""
COUNTED = 3
"""Largest number of counted steps of a grouping; fewer if the budget is small."""
LEAST_STEPS = 2 * (UNCOUNTED + 1)
"""Number of steps in which one group and two can be compared."""


def groupings(tensors: int, groups: int = 2) -> int:
    """The largest number of groupings in a search for up to `groups` groups.

    These are one group of all tensors and, for every choice of the first boundaries, a bisection of the
    tensors after them.

    >>> [groupings(tensors) for tensors in (1, 3, 60, 161, 257)]
    [1, 3, 15, 17, 19]
    """
    found = 1
    for number in range(2, min(groups, tensors) + 1):
        # By the last of the first boundaries; there are none of two groups.
        heads = {0: 1} if number == 2 else {at: comb(at - 1, number - 3) for at in range(1, tensors - 1)}
        found += sum(choices * _bisection(tensors - 1 - at) for at, choices in heads.items())
    return found


def _bisection(boundaries: int) -> int:
    """Calls that a bisection of `boundaries` boundaries takes at most: two as long as its bracket has a
    span."""
    calls, span = min(boundaries, 1), boundaries - 1
    while span > 0:
        left, right = compared(span, APART)
        calls += 2 if span > 1 else 1
        span = max(span - left - 1, right - 1)
    return calls


@dataclass(frozen=True)
class GroupingTrial:
    """The grouping to run next; `is_last` when nothing is left to try."""

    boundaries: Boundaries
    is_last: bool


class _UntriedError(Exception):
    def __init__(self, boundaries: Boundaries) -> None:
        super().__init__()
        self.boundaries = boundaries


class TimedMerge:
    """Timed search: one group first, then one grouping after another, each for `steps` counted steps.

    `search` looks for the best grouping, given a function from a grouping to its seconds. It runs again after
    each trial, and the first grouping with unknown seconds is tried next. It considers at most `most`
    groupings, so it ends after `most_steps` steps. Then the fastest grouping of all stays, the first among
    equals. `stride` neighbouring tensors stay together.
    """

    def __init__(self, search: Callable[[Seconds], object], steps: int, most: int, stride: int = 1) -> None:
        self._search, self._steps = search, steps
        self.most_steps, self.stride = most * (steps + UNCOUNTED), stride
        self._now: Boundaries = ()
        self._took_s: list[float] = []
        self._seconds: dict[Boundaries, float] = {}

    def observe(self, shown: StepObservation) -> GroupingTrial | None:
        """Take in a step; returns what to run from now on, if that changes."""
        if shown.previous_s == 0.0:  # the step before ran another grouping
            return None
        self._took_s.append(shown.previous_s)
        if len(self._took_s) <= self._steps:
            return None
        self._seconds[self._now] = median(self._took_s[1:])
        self._took_s = []
        trial = self._next()
        self._now = trial.boundaries
        return trial

    def _next(self) -> GroupingTrial:
        try:
            self._search(self._known)
        except _UntriedError as untried:
            return GroupingTrial(untried.boundaries, is_last=False)
        return GroupingTrial(min(self._seconds, key=self._seconds.__getitem__), is_last=True)

    def _known(self, boundaries: Boundaries) -> float:
        if boundaries not in self._seconds:
            raise _UntriedError(boundaries)
        return self._seconds[boundaries]


def timed_search(
    tensors: int, groups: int = 2, alpha: float = 0.0, most_steps: int = MOST_STEPS
) -> TimedMerge:
    """Prepare MergeComp's algorithm 2, which times groupings in training.

    Args:
        tensors: number of tensors.
        groups: the most groups that are tried.
        alpha: the search ends when one more group gains less than this share.
        most_steps: the most steps that all timings together may take.

    Up to three steps count for a grouping. Neighbouring tensors stay together only as far as the budget asks
    for it. Raises `ValueError` if `most_steps` is too few to compare one group with two.
    """
    affordable = most_steps // (1 + UNCOUNTED)
    if most_steps < LEAST_STEPS:
        raise ValueError(f"{most_steps} steps are too few: timing two groupings takes {LEAST_STEPS}")
    stride = next(stride for stride in count(1) if groupings(-(-tensors // stride), groups) <= affordable)
    merged = -(-tensors // stride)

    def search(seconds: Seconds) -> Boundaries:
        return search_boundaries(
            lambda boundaries: seconds(_spread(boundaries, stride)), merged, groups, alpha, APART
        )

    most = groupings(merged, groups)
    return TimedMerge(search, min(COUNTED, most_steps // most - UNCOUNTED), most, stride)


def contest(candidates: Sequence[Boundaries], steps: int = 5) -> TimedMerge:
    """The fastest of one group and `candidates`; `steps` steps count for each."""
    return TimedMerge(
        lambda seconds: [seconds(boundaries) for boundaries in candidates], steps, len({(), *candidates})
    )


def _spread(boundaries: Boundaries, stride: int) -> Boundaries:
    return tuple(boundary * stride for boundary in boundaries)

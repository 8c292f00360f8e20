"""Times groupings on real iterations and keeps the fastest: MergeComp's Algorithm 2, or a contest of a few.

Wang et al. 2021, section 4.3. Differences from the paper: every grouping runs for a few steps of the ongoing
training. The first is not counted, because its buffers are cold; the median of the rest counts. A search has
a budget of steps, by default 49, because the paper's search for two groups takes fewer than 50. If that is
too few for all tensors, neighbouring tensors stay together. All ranks see the same times, those of the
slowest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from math import comb
from statistics import median

from gradwire.planning.cuts import Cuts
from gradwire.planning.facts import StepObservation
from gradwire.planning.merge import Seconds, search_cuts

MOST_STEPS = 49
"""The default budget of a search, in steps."""
UNCOUNTED = 2
"""Steps of a grouping before those that count: the first follows another's, the second has cold buffers."""
COUNTED = 3
"""Steps of a grouping that count, at most; fewer where the budget asks for it."""
LEAST_STEPS = 2 * (UNCOUNTED + 1)
"""Steps that it takes to compare one group with two."""


def groupings(tensors: int, groups: int = 2) -> int:
    """The largest number of groupings that a search for up to `groups` groups looks at.

    These are one group of all tensors and, for every choice of the first cuts, a bisection of the tensors
    after them.

    >>> [groupings(tensors) for tensors in (1, 3, 60, 161, 257)]
    [1, 3, 12, 16, 16]
    >>> [groupings(tensors, groups=3) for tensors in (3, 6, 40, 161)]
    [4, 15, 307, 1894]
    """
    found = 1
    for number in range(2, min(groups, tensors) + 1):
        # By the last of the first cuts; there are none of two groups.
        heads = {0: 1} if number == 2 else {at: comb(at - 1, number - 3) for at in range(1, tensors - 1)}
        found += sum(choices * _bisection(tensors - 1 - at) for at, choices in heads.items())
    return found


def _bisection(cuts: int) -> int:
    """Calls that a bisection of `cuts` cuts takes; of the last two cuts, one is known already."""
    return max(2 * (cuts - 1).bit_length() - 1, min(cuts, 2))


@dataclass(frozen=True)
class GroupingTrial:
    """The grouping to run next; `is_last` when nothing is left to try."""

    cuts: Cuts
    is_last: bool


class _UntriedError(Exception):
    def __init__(self, cuts: Cuts) -> None:
        super().__init__()
        self.cuts = cuts


class TimedMerge:
    """Begins with one group, then asks for one grouping after another, each for `steps` steps that count.

    `search` finds the best grouping, given a function from a grouping to its seconds. It is run anew after
    each trial, and the first grouping whose seconds are unknown is the next to try. It looks at no more than
    `most` groupings, so it ends after `most_steps` steps. `stride` neighbouring tensors stay together.
    """

    def __init__(self, search: Callable[[Seconds], Cuts], steps: int, most: int, stride: int = 1) -> None:
        self._search, self._steps = search, steps
        self.most_steps, self.stride = most * (steps + UNCOUNTED), stride
        self._now: Cuts = ()
        self._took_s: list[float] = []
        self._seconds: dict[Cuts, float] = {}

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
        self._now = trial.cuts
        return trial

    def _next(self) -> GroupingTrial:
        try:
            return GroupingTrial(self._search(self._known), is_last=True)
        except _UntriedError as untried:
            return GroupingTrial(untried.cuts, is_last=False)

    def _known(self, cuts: Cuts) -> float:
        if cuts not in self._seconds:
            raise _UntriedError(cuts)
        return self._seconds[cuts]


def timed_search(
    tensors: int, groups: int = 2, alpha: float = 0.0, most_steps: int = MOST_STEPS
) -> TimedMerge:
    """Algorithm 2 for `tensors` tensors in at most `most_steps` steps.

    Up to three steps count for a grouping. Neighbouring tensors stay together only as far as the budget asks
    for it. Raises `ValueError` if `most_steps` is too few to compare one group with two.
    """
    affordable = most_steps // (1 + UNCOUNTED)
    if most_steps < LEAST_STEPS:
        raise ValueError(f"{most_steps} steps are too few: timing two groupings takes {LEAST_STEPS}")
    stride = next(stride for stride in count(1) if groupings(-(-tensors // stride), groups) <= affordable)
    merged = -(-tensors // stride)

    def search(seconds: Seconds) -> Cuts:
        of_merged = search_cuts(lambda cuts: seconds(_spread(cuts, stride)), merged, groups, alpha)
        return _spread(of_merged, stride)

    most = groupings(merged, groups)
    return TimedMerge(search, min(COUNTED, most_steps // most - UNCOUNTED), most, stride)


def contest(candidates: Sequence[Cuts], steps: int = 5) -> TimedMerge:
    """The fastest of `candidates`, the first among equals; `steps` steps count for each."""
    return TimedMerge(lambda seconds: min(candidates, key=seconds), steps, len({(), *candidates}))


def _spread(cuts: Cuts, stride: int) -> Cuts:
    return tuple(cut * stride for cut in cuts)

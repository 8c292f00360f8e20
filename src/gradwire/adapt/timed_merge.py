"""Groupings tried on real iterations, and the fastest kept: MergeComp's Algorithm 2, or a contest of a few.

Wang et al. 2021, section 4.3. Differences from the paper: every grouping runs for a few steps of the
training that goes on, of which the first is not counted, because it finds cold buffers; of the others the
median is; for a search as many as fit into fewer than 50 steps for two groups, which is what the paper
takes. All ranks time alike: the slowest counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from gradwire.plan import Observed
from gradwire.plan.groups import Cuts
from gradwire.plan.merge_search import Seconds, search_cuts

MOST_STEPS = 49
"""That a search for two groups takes."""
MOST_TENSORS = 257
"""As many as can be bisected in so many steps; of more, neighbours stay together."""


def groupings(tensors: int) -> int:
    """How many groupings a search for two groups looks at, at most: the whole, and two per bisection.

    The last bisection is between two neighbours of which one is known already.

    >>> [groupings(tensors) for tensors in (1, 3, 60, 161, 257)]
    [1, 3, 12, 16, 16]
    """
    bisections = max(tensors - 2, 0).bit_length()
    return max(2 * bisections, min(max(tensors, 1), 3))


@dataclass(frozen=True)
class Trial:
    """What to run next; `is_last` when nothing is left to try."""

    cuts: Cuts
    is_last: bool


class _UntriedError(Exception):
    def __init__(self, cuts: Cuts) -> None:
        super().__init__()
        self.cuts = cuts


class TimedMerge:
    """Begins with one group, and asks for one grouping after another, each for so many `steps` that count.

    `search` is a function of the seconds that a grouping takes. It is run anew after each trial, with those
    that are known; the first that it misses is the next to try.
    """

    def __init__(self, search: Callable[[Seconds], Cuts], steps: int) -> None:
        self._search, self._steps = search, steps
        self._now: Cuts = ()
        self._took_s: list[float] = []
        self._seconds: dict[Cuts, float] = {}

    def observe(self, shown: Observed) -> Trial | None:
        """Take a step; what to run from now on, if that changes."""
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

    def _next(self) -> Trial:
        try:
            return Trial(self._search(self._known), is_last=True)
        except _UntriedError as untried:
            return Trial(untried.cuts, is_last=False)

    def _known(self, cuts: Cuts) -> float:
        if cuts not in self._seconds:
            raise _UntriedError(cuts)
        return self._seconds[cuts]


def timed_search(tensors: int, groups: int = 2, alpha: float = 0.0, steps: int | None = None) -> TimedMerge:
    """Algorithm 2 for `tensors`; as many steps a grouping as there is time for, at most three, by default."""
    stride = max(1, -(-tensors // MOST_TENSORS))
    merged = -(-tensors // stride)

    def search(seconds: Seconds) -> Cuts:
        of_merged = search_cuts(lambda cuts: seconds(_spread(cuts, stride)), merged, groups, alpha)
        return _spread(of_merged, stride)

    # Beside those that count, one behind another grouping's step, and one that finds cold buffers.
    affordable = MOST_STEPS // groupings(merged) - 2
    return TimedMerge(search, max(1, min(3, affordable)) if steps is None else steps)


def contest(candidates: Sequence[Cuts], steps: int = 5) -> TimedMerge:
    """The fastest of a few groupings; the first, if equal."""
    return TimedMerge(lambda seconds: min(candidates, key=seconds), steps)


def _spread(cuts: Cuts, stride: int) -> Cuts:
    return tuple(cut * stride for cut in cuts)

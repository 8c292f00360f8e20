"""MergeComp's search on real iterations (Wang et al. 2021, Algorithm 2): try, time, and keep the best.

Differences from the paper: every grouping runs for a few steps of the training that goes on, of which the
first is not counted, because it finds cold buffers; of the others the median is. There are as many as fit
into fewer than 50 steps for two groups, which is what the paper takes. All ranks time alike: the slowest
counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from gradwire.plan import Observed
from gradwire.plan.groups import Cuts
from gradwire.plan.merge_search import search_cuts

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
    """Begins with one group of all `tensors`, and asks for one grouping after another, each for `steps` that
    count; as many as there is time for, at most three, by default.

    The search itself is a function of the seconds that a grouping takes. It is run anew after each
    trial, with those that are known; the first that it misses is the next to try.
    """

    def __init__(self, tensors: int, groups: int = 2, alpha: float = 0.0, steps: int | None = None) -> None:
        self._stride = max(1, -(-tensors // MOST_TENSORS))
        self._tensors, self._groups, self._alpha = -(-tensors // self._stride), groups, alpha
        # Beside those that count, one behind another grouping's step, and one that finds cold buffers.
        affordable = MOST_STEPS // groupings(self._tensors) - 2
        self._steps = max(1, min(3, affordable)) if steps is None else steps
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
            found = search_cuts(self._known, self._tensors, self._groups, self._alpha)
        except _UntriedError as untried:
            return Trial(self._of_tensors(untried.cuts), is_last=False)
        return Trial(self._of_tensors(found), is_last=True)

    def _of_tensors(self, cuts: Cuts) -> Cuts:
        return tuple(cut * self._stride for cut in cuts)

    def _known(self, cuts: Sequence[int]) -> float:
        tensors = self._of_tensors(tuple(cuts))
        if tensors not in self._seconds:
            raise _UntriedError(tuple(cuts))
        return self._seconds[tensors]

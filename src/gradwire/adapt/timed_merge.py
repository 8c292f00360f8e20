"""MergeComp's search on real iterations (Wang et al. 2021, Algorithm 2): try, time, and keep the best.

Differences from the paper: every grouping runs for a few steps of the training that goes on, of which the
first is not counted, because it finds cold buffers; of the others the median is. All ranks time alike: the
slowest counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from gradwire.plan import Observed
from gradwire.plan.groups import Cuts
from gradwire.plan.merge_search import search_cuts


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
    """Begins with one group of all `tensors`, and asks for one grouping after another.

    The search itself is a function of the seconds that a grouping takes. It is run anew after each
    trial, with those that are known; the first that it misses is the next to try.
    """

    def __init__(self, tensors: int, groups: int = 2, alpha: float = 0.0, steps: int = 2) -> None:
        self._tensors, self._groups, self._alpha, self._steps = tensors, groups, alpha, steps
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
            return Trial(search_cuts(self._known, self._tensors, self._groups, self._alpha), is_last=True)
        except _UntriedError as untried:
            return Trial(untried.cuts, is_last=False)

    def _known(self, cuts: Sequence[int]) -> float:
        if tuple(cuts) not in self._seconds:
            raise _UntriedError(tuple(cuts))
        return self._seconds[tuple(cuts)]

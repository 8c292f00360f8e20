"""Looks and probes of a watched composition, from one rank's numbers to agreed ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor

from gradwire.comm import Comm
from gradwire.ddp.layout import Layout
from gradwire.measure import now_s, slowest
from gradwire.plan import Observed, Watched
from gradwire.recipes import Composition
from gradwire.recipes.base import Watch

MOVED = 0.1
"""By this share steps must take longer or shorter than they did before the link is looked at more often."""
FEWEST = 5
"""Steps whose median is compared: one that follows probes takes longer."""
IN_A_ROW = 3
"""So many times then, which is what a median needs to follow, and at the beginning."""


def may_follow(now: Layout, following: Layout, comm: Comm) -> bool:
    """Whether no rank's unsent gradient would lose its place. A collective where a place is lost."""
    homeless = now.homeless_in(following)
    left = any(bool(now.memory(name).any()) for name in homeless)
    return not homeless or slowest(comm, [float(left)]) == [0.0]


class Watcher:
    """One rank's side of a `Watch`; all calls are on the engine's thread.

    Its numbers ride in the verdict's rows: how long the last step took and its codec, then what was looked at
    in this one, then how long the last probes took. How many there are depends on agreed numbers alone.
    """

    def __init__(self, watch: Watch, comm: Comm, sizes: Sequence[int]) -> None:
        self._watch, self._comm = watch, comm
        self._judge = watch.judge(Watched(comm.world, tuple(sizes)))
        self._looked = [0.0] * watch.looks
        self._probed_s: list[float] = []
        self._previous_s = (0.0, 0.0)
        self._recent_s: deque[float] = deque(maxlen=max(watch.every, FEWEST))
        self._usual_s = 0.0
        self._in_a_row = IN_A_ROW

    def _due(self, step: int) -> bool:
        return step % self._watch.every == 0

    def look(self, step: int, x: Tensor) -> None:
        """Look at one unit, `x` (numel,), before its exchange."""
        if self._watch.look is not None and self._due(step):
            seen = self._watch.look(x)
            self._looked = [total + more for total, more in zip(self._looked, seen, strict=True)]

    def row(self, step: int) -> tuple[float, ...]:
        """This rank's facts for the verdict. Looks begin anew: a step that fails is tried again."""
        looked = self._looked if self._due(step) else []
        self._looked = [0.0] * self._watch.looks
        return (*self._previous_s, *looked, *self._probed_s)

    def observe(
        self, step: int, rows: Sequence[Sequence[float]], took_s: tuple[float, float], committed: bool
    ) -> Composition | None:
        """Hand what all ranks said in the verdict of `step` to the judge; returns what is to run instead.

        `took_s` is how long the step took here, and its codec. A step that was not committed says nothing.
        """
        looks = self._watch.looks if self._due(step) else 0
        columns = list(zip(*rows, strict=True))
        looked = tuple(map(sum, columns[2 : 2 + looks])) if looks else None
        probed_s = tuple(map(min, columns[2 + looks :])) or None
        self._previous_s, self._probed_s = took_s, []
        previous_s = max(columns[0])
        self._compare(previous_s)
        if not committed:
            return None
        return self._judge(Observed(step, previous_s, max(columns[1]), looked, probed_s))

    def _compare(self, step_s: float) -> None:
        """Notice, alike on all ranks, that steps do not take as long any more."""
        if step_s > 0.0:
            self._recent_s.append(step_s)
        if len(self._recent_s) == self._recent_s.maxlen:
            now_takes_s = median(self._recent_s)
            if abs(now_takes_s - self._usual_s) > MOVED * self._usual_s:
                self._usual_s, self._in_a_row = now_takes_s, IN_A_ROW

    def probe(self, step: int) -> None:
        """After the verdict of `step`: time the probes, one after the other."""
        if not self._due(step):
            return
        if self._in_a_row == 0 and step % (self._watch.calm * self._watch.every) != 0:
            return
        self._in_a_row = max(self._in_a_row - 1, 0)
        for numel in self._watch.probes:
            payload = torch.zeros(numel)
            start_s = now_s()
            self._comm.all_reduce(payload).wait()
            self._probed_s.append(now_s() - start_s)

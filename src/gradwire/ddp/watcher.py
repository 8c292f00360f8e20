"""Looks of a watched composition, from one rank's numbers to agreed ones."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradwire.comm import Comm
from gradwire.ddp.layout import Layout
from gradwire.measure import slowest
from gradwire.plan import Link, Observed, Watched
from gradwire.recipes import Composition
from gradwire.recipes.base import Watch


def may_follow(now: Layout, following: Layout, comm: Comm) -> bool:
    """Whether no rank's unsent gradient would lose its place. A collective where a place is lost."""
    homeless = now.homeless_in(following)
    left = any(bool(now.memory(name).any()) for name in homeless)
    return not homeless or slowest(comm, [float(left)]) == [0.0]


class Watcher:
    """One rank's side of a `Watch`; all calls are on the engine's thread.

    Its numbers ride in the verdict's rows: how long the last step took and its codec, then what was looked at
    in this one. How many there are depends on agreed numbers alone.
    """

    def __init__(self, watch: Watch, world: int, sizes: Sequence[int]) -> None:
        self._watch = watch
        self._judge = watch.judge(Watched(world, tuple(sizes)))
        self._looked = [0.0] * watch.looks
        self._previous_s = (0.0, 0.0)

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
        return (*self._previous_s, *looked)

    def observe(
        self,
        step: int,
        rows: Sequence[Sequence[float]],
        took_s: tuple[float, float],
        committed: bool,
        link: Link | None,
    ) -> Composition | None:
        """Hand what all ranks said in the verdict of `step` to the judge; returns what is to run instead.

        `took_s` is how long the step took here, and its codec; `link` what all ranks take it to be. A step
        that was not committed says nothing.
        """
        columns = list(zip(*rows, strict=True))
        looked = tuple(map(sum, columns[2:])) if self._watch.looks and self._due(step) else None
        self._previous_s = took_s
        if not committed:
            return None
        return self._judge(Observed(step, max(columns[0]), max(columns[1]), looked, link))

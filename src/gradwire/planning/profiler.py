"""Measure a few dense steps, then decide once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from gradwire.planning.change_detection import noise_of
from gradwire.planning.facts import Facts, Times, facts_of_step, typical

DISCARDED = 2
ORDINARY = 13
"""Number of steps that run as under plain DDP, for recipes that need the duration of such steps."""
MEASURED = 3


class WarmupProfiler:
    """Profiler of dense steps: 2 discarded, `ordinary` ones timed as a whole, and 3 timed in parts; then
    facts.

    The first step has DDP's provisional bucket and cold caches; the second rebuilds the buckets. In an
    ordinary step, communication overlaps with the backward pass. A step that `is_serial` sends bucket after
    bucket when the backward pass has ended, so that neither slows the other. `numel` (parameters,) has the
    elements of each parameter, in layout order.

    A rank's row has the duration of its last step and the exposed share of it (`Step.exposed`). After a step
    timed in parts, it also has that step's `Times.row`.

    >>> profiler = WarmupProfiler()
    >>> rows = [(0.0, 0.0), (9.0, 0.5), *3 * [(3.5, 0.5, 1.0, 0.5, 2.0, 0.25)]]
    >>> [profiler.observe([row]) is not None for row in rows]
    [False, False, False, False, True]
    """

    def __init__(self, numel: Sequence[int] = (), ordinary: int = 0) -> None:
        self._seen = 0
        self._numel, self._ordinary = tuple(numel), ordinary
        self._told = (0.0, 0.0)
        self._ordinary_s: list[float] = []
        self._exposed: list[float] = []
        self._steps: list[Facts] = []

    @property
    def is_serial(self) -> bool:
        """True if the next step, or the one that runs, is timed in parts."""
        return self._seen >= DISCARDED + self._ordinary

    @property
    def exposed(self) -> tuple[float, ...]:
        """Exposed shares of the ordinary steps; the last one is not known yet.

        Empty until all of them have run; available before the first step that would be timed in parts. Each
        share is that of the rank that computes longest: other ranks wait for that rank, too, not for the
        network alone.
        """
        is_time = self._ordinary > 0 and self._seen == DISCARDED + self._ordinary
        return tuple(self._exposed) if is_time else ()

    def row(self, times: Callable[[], Times]) -> tuple[float, ...]:
        """This rank's row of a status vote. `times` is called only in a step timed in parts."""
        return (*self._told, *(times().row if self.is_serial else ()))

    def observe(
        self, rows: Sequence[Sequence[float]], took_s: float = 0.0, exposed: float = 0.0
    ) -> Facts | None:
        """Take the rows of all ranks. Returns facts once there are enough, else `None`.

        Args:
            rows: the rows, by rank.
            took_s: duration of this step on this rank, in seconds.
            exposed: the exposed share of it.
        """
        if DISCARDED < self._seen <= DISCARDED + self._ordinary:
            self._ordinary_s.append(max(row[0] for row in rows))
            self._exposed.append(min(row[1] for row in rows))
        if self.is_serial:
            ranks = [Times.of_row(row[2:], len(self._numel)) for row in rows]
            self._steps.append(facts_of_step(ranks, self._numel))
        self._seen += 1
        self._told = took_s, exposed
        if len(self._steps) < MEASURED:
            return None
        facts = replace(typical(self._steps), steps=self._seen)
        if not self._ordinary_s:
            return facts
        return replace(facts, dense_s=median(self._ordinary_s), dense_noise=noise_of(self._ordinary_s))

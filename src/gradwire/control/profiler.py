"""Measure a few dense steps, then decide once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from gradwire.planning.change_detection import noise_of
from gradwire.planning.facts import Facts, Times, facts_of_step, typical

DISCARDED = 2
ORDINARY = 13
"""Steps that run as plain DDP would, for recipes that ask how long those take."""
MEASURED = 3


class WarmupProfiler:
    """Has facts after 2 discarded dense steps, `ordinary` ones that are timed whole, and 3 taken apart.

    The first step has DDP's provisional bucket and cold caches, the second rebuilds the buckets. In an
    ordinary step communication overlaps with the backward pass. A step that `is_serial` sends bucket
    after bucket when the backward pass is over, so that neither slows the other down. `numel` are the
    elements of the parameters in layout order.

    A rank's row says how long its last step took, and in a step taken apart also that step's `Times.row`.

    >>> profiler = WarmupProfiler()
    >>> rows = [(0.0,), (9.0,), *3 * [(3.5, 1.0, 0.5, 2.0, 0.25)]]
    >>> [profiler.observe([row]) is not None for row in rows]
    [False, False, False, False, True]
    """

    def __init__(self, numel: Sequence[int] = (), ordinary: int = 0) -> None:
        self._seen = 0
        self._numel, self._ordinary = tuple(numel), ordinary
        self._previous_s = 0.0
        self._ordinary_s: list[float] = []
        self._steps: list[Facts] = []

    @property
    def is_serial(self) -> bool:
        """Whether the next step, or the one that runs, is taken apart."""
        return self._seen >= DISCARDED + self._ordinary

    def row(self, times: Callable[[], Times]) -> tuple[float, ...]:
        """This rank's row of a verdict; `times` are asked for only in a step that is taken apart."""
        return (self._previous_s, *(times().row if self.is_serial else ()))

    def observe(self, rows: Sequence[Sequence[float]], took_s: float = 0.0) -> Facts | None:
        """Take every rank's row; facts once there are enough. `took_s` is how long this step took here."""
        if DISCARDED < self._seen <= DISCARDED + self._ordinary:
            self._ordinary_s.append(max(row[0] for row in rows))
        if self.is_serial:
            ranks = [Times.of_row(row[1:], len(self._numel)) for row in rows]
            self._steps.append(facts_of_step(ranks, self._numel))
        self._seen += 1
        self._previous_s = took_s
        if len(self._steps) < MEASURED:
            return None
        facts = replace(typical(self._steps), steps=self._seen)
        if not self._ordinary_s:
            return facts
        return replace(facts, dense_s=median(self._ordinary_s), dense_noise=noise_of(self._ordinary_s))

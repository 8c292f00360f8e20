"""Measure a few dense steps, then decide once."""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.plan.facts import Facts, Times, facts_of_step, typical

DISCARDED = 2
MEASURED = 3


class Settler:
    """Collects one row per rank and step; has facts after 2 discarded and 3 measured steps.

    The first step has DDP's provisional bucket and cold caches, the second rebuilds the buckets. `numel` are
    the elements of the parameters in layout order.

    >>> settler = Settler()
    >>> [settler.observe([(1.0, 0.5, 2.0)]) is not None for _ in range(5)]
    [False, False, False, False, True]
    """

    def __init__(self, numel: Sequence[int] = ()) -> None:
        self._seen = 0
        self._numel = tuple(numel)
        self._steps: list[Facts] = []

    def observe(self, rows: Sequence[Sequence[float]]) -> Facts | None:
        """Take every rank's `Times.row`; facts once there are enough."""
        self._seen += 1
        if self._seen > DISCARDED:
            ranks = [Times.of_row(row, len(self._numel)) for row in rows]
            self._steps.append(facts_of_step(ranks, self._numel))
        return typical(self._steps) if len(self._steps) == MEASURED else None

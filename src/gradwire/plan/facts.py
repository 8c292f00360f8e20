"""What has been measured, agreed by all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Facts:
    """Times of one dense step, in seconds, the same numbers on every rank.

    `allreduce_s` adds up the collectives' own durations, `backward_s` is the backward pass alone; `world` is
    the number of ranks.
    """

    backward_s: float
    allreduce_s: float
    world: int

    @property
    def ccr(self) -> float:
        """Communication-to-computation ratio of the backward pass (COVAP, section III-C)."""
        return self.allreduce_s / max(self.backward_s, 1e-9)


def facts_of_step(backward_s: Sequence[float], durations_s: Sequence[Sequence[float]]) -> Facts:
    """Facts of one step from every rank's rows.

    All ranks leave a collective together but may enter it apart, and an early rank's wait is no
    transmission: the true duration is the minimum over ranks (COVAP's distributed profiler). Ranks
    compute side by side, so the mean backward time stands for all.

    >>> facts_of_step([1.0, 1.0], [[0.5, 0.25], [0.75, 0.25]])
    Facts(backward_s=1.0, allreduce_s=0.75, world=2)
    """
    allreduce_s = sum(min(column) for column in zip(*durations_s, strict=True))
    world = len(backward_s)
    return Facts(sum(backward_s) / world, allreduce_s, world)


def typical(steps: Sequence[Facts]) -> Facts:
    """The step with the median ratio of communication to computation."""
    middle = median(range(len(steps)))
    return sorted(steps, key=lambda facts: facts.ccr)[int(middle)]

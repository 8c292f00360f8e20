"""The numbers of a run as it is: steps of each rank, its collectives, its gradients."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import fsum, prod
from statistics import median
from typing import NamedTuple

from gradwire.planning.change_detection import error_of, noise_of

UNLIKE = 0.05
"""The share of the gradients' bytes by which those of all-reduces may differ: a script may have small ones of
its own."""

MOSTLY, ERRORS = 0.8, 2.2
"""Of the steps in which one rank is the last: their share, and by how many standard errors they are more than
half, from which on that rank is late. Of two ranks that are the last by chance, one is taken for late in 1 of
80 runs of 20 steps, and in 1 of 16 of 5."""


@dataclass(frozen=True)
class ObservedStep:
    """One step of one rank, in seconds.

    `input_s` passed while it waited for a DataLoader. `backward_s` is the synchronizing backward pass alone.
    `communicating_s` is the time in which a collective ran, and `exposed_s` the part of it for which
    computing waited. The optimizer took `optimizer_s`; 0 on a GPU, where the host's time does not tell.
    `between_s` passed outside of forward and backward passes, the optimizer and the DataLoader.
    """

    step_s: float
    input_s: float
    backward_s: float
    communicating_s: float
    exposed_s: float
    optimizer_s: float = 0.0
    between_s: float = 0.0

    @property
    def ready_s(self) -> float:
        """Seconds of the step in which this rank did not wait for a collective: for so long others wait."""
        return self.step_s - self.exposed_s


@dataclass(frozen=True)
class RankSteps:
    """The steps that one rank has measured."""

    rank: int
    steps: tuple[ObservedStep, ...]

    def typical(self, number: Callable[[ObservedStep], float]) -> float:
        """Median over steps of the `number` of a step."""
        return median(map(number, self.steps))


class Late(NamedTuple):
    """Ranks wait `seconds` of a typical step for the last one: for `rank` in `times` of `steps` steps."""

    rank: int
    seconds: float
    times: int
    steps: int

    @property
    def is_one(self) -> bool:
        """True if it is `rank` that is late, and not another one from step to step."""
        by_chance = 0.5 * self.steps + 0.5 * ERRORS * math.sqrt(self.steps)
        return self.seconds > 0.0 and self.times >= max(MOSTLY * self.steps, by_chance)


@dataclass(frozen=True)
class ReadyOrder:
    """Trainable parameters in the order in which their gradients were ready.

    `ready_s` count from the start of the backward pass. With `assumed`, only the first and the last of them
    were measured, and the others lie between.
    """

    shapes: tuple[tuple[int, ...], ...]
    ready_s: tuple[float, ...]
    element_bytes: int = 4
    assumed: bool = False


@dataclass(frozen=True)
class Gathers:
    """All-gathers of a typical step: how many, the bytes that a rank hands in, and the seconds in which any
    of them runs; `nan` where that was not recorded. Most bytes are of elements of `element_bytes`.
    """

    calls: float
    size_bytes: float
    took_s: float
    element_bytes: int


@dataclass(frozen=True)
class Observed:
    """A run as it is.

    Ranks are those that were read, of `world` ranks in all, `per_node` on each node; `world` is 0 where it is
    not known. `buckets` are the bytes of each all-reduce of a step in their order, empty where they are not
    known, and `calls` is how many collectives a step made. `passes` backward passes of a step ended in
    collectives: more than one where gradients are accumulated without `no_sync()`. `timed` are bytes and
    seconds of single all-reduces, each in the median over steps.

    If DDP `finds_unused`, it looked for unused parameters in each step and found none. `hook` is the name of
    its comm hook. If the run `is_blind`, times of its steps do not show all waiting for the network: a hook,
    or gradwire in another way, may wait where DDP does not see it. The system tells the one-way delay
    `latency_s` between two ranks, the rate `card_bit_per_s` of a network card, and `cores_per_rank`; a rank
    computes with so many `threads`. Recording a trace took `recording_s` of each step. `missing` are
    sentences about what was not recorded, and how to record it.
    """

    source: str
    wrapper: str
    backend: str
    world: int
    ranks: tuple[RankSteps, ...]
    gradients: ReadyOrder | None = None
    gathers: Gathers | None = None
    buckets: tuple[float, ...] = ()
    calls: float = 0.0
    passes: float = 1.0
    timed: tuple[tuple[float, float], ...] = ()
    per_node: int = 1
    finds_unused: bool = False
    hook: str = ""
    is_blind: bool = False
    latency_s: float | None = None
    card_bit_per_s: float | None = None
    cores_per_rank: float | None = None
    threads: int = 1
    recording_s: float = 0.0
    missing: tuple[str, ...] = ()

    def least(self, number: Callable[[ObservedStep], float]) -> float:
        """The least over ranks of the median over steps: of a collective, the time that is no waiting."""
        return min(each.typical(number) for each in self.ranks)

    def most(self, number: Callable[[ObservedStep], float]) -> float:
        """The most over ranks of the median over steps: of computing, the time for which all wait."""
        return max(each.typical(number) for each in self.ranks)

    @property
    def exposed_s(self) -> float:
        """The exposed time of a typical step, without what is waiting for the last rank.

        In each step that is the least over ranks, because another rank may be the last one in each.
        """
        return median(min(step.exposed_s for step in steps) for steps in self._together)

    @property
    def _together(self) -> list[tuple[ObservedStep, ...]]:
        """Each step that all ranks have, as that of each rank: recording ends on all at once."""
        fewest = min(len(each.steps) for each in self.ranks)
        return list(zip(*(each.steps[-fewest:] for each in self.ranks), strict=True))

    @property
    def gradient_bytes(self) -> float:
        """Bytes of all gradients; 0 where they are not known."""
        found = self.gradients
        return 0.0 if found is None else float(found.element_bytes * sum(map(prod, found.shapes)))

    @property
    def sends_gradients(self) -> bool:
        """True if all-reduces carry the gradients as they are, as plain DDP's do; also if that is unknown."""
        sent_bytes, held_bytes = fsum(self.buckets), self.gradient_bytes
        return not sent_bytes or not held_bytes or abs(sent_bytes - held_bytes) <= UNLIKE * held_bytes

    @property
    def late(self) -> Late:
        """Time that ranks wait for the last one, in a typical step: from the median of the others to the last
        one.

        It is found in each step: medians over steps would name a rank by chance where ranks take turns.
        """
        last: Counter[int] = Counter()
        waits_s = []
        for steps in self._together:
            ready_s = [step.ready_s for step in steps]
            slowest = max(range(len(ready_s)), key=ready_s.__getitem__)
            last[self.ranks[slowest].rank] += 1
            waits_s.append(ready_s.pop(slowest) - median(ready_s) if len(steps) > 1 else 0.0)
        [(rank, times)] = last.most_common(1)
        return Late(rank, median(waits_s), times, len(waits_s))

    @property
    def spread(self) -> float:
        """The relative standard error of the median step, on the rank where it is largest."""
        return max(_error([step.step_s for step in each.steps]) for each in self.ranks)


def _error(seconds: Sequence[float]) -> float:
    return error_of(noise_of(seconds), len(seconds)) if len(seconds) > 1 else 0.0

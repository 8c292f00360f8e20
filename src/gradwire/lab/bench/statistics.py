"""Medians, spreads and paired comparisons of step times."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, pstdev
from typing import TypeVar

from gradwire.lab.bench.samples import StepSample

T = TypeVar("T")

_RESAMPLES = 2000


@dataclass(frozen=True)
class Ratio:
    """A paired ratio: median over rounds, and a 95 % bootstrap interval of that median."""

    ratio: float
    low: float
    high: float


def slowest(per_rank: Sequence[Sequence[StepSample]]) -> list[float]:
    """Step times (s) of a synchronous step: the slowest rank's, step by step."""
    return [max(sample.step_s for sample in samples) for samples in zip(*per_rank, strict=True)]


def mean_over_ranks(
    per_rank: Sequence[Sequence[StepSample]], read: Callable[[StepSample], float | None]
) -> list[float]:
    """A value step by step, mean over ranks; steps in which no rank measured it are left out."""
    values = [[read(sample) for sample in samples] for samples in zip(*per_rank, strict=True)]
    known = [[value for value in row if value is not None] for row in values]
    return [fmean(row) for row in known if row]


def median_over_steps(
    per_rank: Sequence[Sequence[StepSample]], read: Callable[[StepSample], float | None]
) -> float | None:
    """Median over steps of the mean over ranks; None when the value was not measured."""
    means = mean_over_ranks(per_rank, read)
    return median(means) if means else None


def paired(numerators: Sequence[float], denominators: Sequence[float], seed: int = 0) -> Ratio:
    """Ratio of two settings measured in the same rounds, from one figure per round and setting.

    Pairing by round removes the machine's slow drifts; the bootstrap resamples rounds.
    """
    ratios = [top / bottom for top, bottom in zip(numerators, denominators, strict=True)]
    if not ratios:
        raise ValueError("no rounds to compare")
    draw = random.Random(seed)
    medians = sorted(median(draw.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    return Ratio(median(ratios), medians[int(0.025 * _RESAMPLES)], medians[int(0.975 * _RESAMPLES)])


def spread(values: Sequence[float]) -> float:
    """Standard deviation over mean (the population's); 0 for fewer than two values."""
    return pstdev(values) / fmean(values) if len(values) > 1 else 0.0


def mixed(items: Sequence[T], number: int) -> list[T]:
    """The same items in another order for every round `number`.

    A setting may run faster or slower for who went before it: over n rounds every item follows many others.
    Each comes first once in n rounds.

    >>> mixed("abc", 0), mixed("abc", 1)
    (['a', 'b', 'c'], ['b', 'c', 'a'])
    """
    if not items:
        return []
    turn = number % len(items)
    rest = [*items[:turn], *items[turn + 1 :]]
    random.Random(number).shuffle(rest)
    return [items[turn], *rest]

"""Samples of single steps, and their medians, spreads and paired comparisons."""

import random
from collections.abc import Callable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from statistics import fmean, median, pstdev
from typing import Any, TypeVar


@dataclass(frozen=True)
class StepSample:
    """Seconds of one step on one rank.

    step_s           from asking for the batch to the end of the optimizer's step
    data_s           waiting for the batch
    forward_s        forward pass and loss (DDP's buffer broadcast included)
    backward_s       from the start of backward until the last *local* gradient was computed
    exposed_comm_s   from then until backward returned: what communication was not hidden (None: not known)
    optimizer_s      the optimizer's step and zero_grad
    hook_s           inside the communication hook of a peer, before it returned (None: no such hook)
    cpu_s            processor time of all threads of the process
    loss             local training loss
    compile_s        compiling kernels, on whichever thread
    settled          whether the recipe was decided when the step ended: not while `auto` tries things out
    """

    step_s: float
    data_s: float
    forward_s: float
    backward_s: float
    exposed_comm_s: float | None
    optimizer_s: float
    cpu_s: float
    loss: float | None
    hook_s: float | None = None
    compile_s: float = 0.0
    settled: bool = True

    def as_dict(self) -> dict[str, float | None]:
        """The sample as a dictionary of plain JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "StepSample":
        """The inverse of `as_dict`; unknown keys are ignored, missing ones are None or what is usual."""
        usual = {item.name: None if item.default is MISSING else item.default for item in fields(cls)}
        known: dict[str, Any] = {name: values.get(name, value) for name, value in usual.items()}
        return cls(**known)


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
    """Ratio of two settings measured in the same rounds, from one figure per round and setting, with its
    confidence interval.

    Pairing by round removes the machine's slow drifts; the bootstrap resamples rounds, by random numbers from
    `seed`. Raises `ValueError` without rounds.
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
    """Put items into another order for every round `number`.

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

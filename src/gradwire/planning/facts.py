"""The numbers that have been measured, and those of a watched step. All ranks agree on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from statistics import fmean, median
from typing import TYPE_CHECKING

from gradwire.planning.costs import ENOUGH, BackwardTiming, CodecCost, Cores, Link, Network
from gradwire.planning.tuning import USUAL, Tuning

if TYPE_CHECKING:  # which is made of facts
    from gradwire.planning.step_time import Forecast


@dataclass(frozen=True)
class Facts:
    """Times of one dense step, in seconds, the same numbers on every rank.

    `allreduce_s` adds up `collectives_s`, the collectives' own durations, each the least over ranks;
    `backward_s` is the backward pass alone; `world` is the number of ranks. `backward` says when which
    parameter is ready, in layout order, and `network` describes the links. `codec` is the cost of the codec
    that a recipe asks about; a rank decodes `payloads` payloads of it per unit. `uses` are multiply-adds
    per weight in a forward pass, by parameter name. `dense_s` is what an ordinary dense step, whose
    communication overlaps with its backward pass, takes from the start of that pass to the verdict on the
    slowest rank. `None` if not measured. `gradient_bytes` is the size of the gradient, and `buckets`
    are the elements of DDP's buckets in their order; 0 and empty where they are unknown. `dense_noise` is the
    relative standard deviation of those ordinary steps. `cores` are those of the rank that has fewest,
    and how many the slowest rank's computation kept busy. `sending_s` is the processor time that the
    collectives took a rank in the mean. It took `steps` to find all of this out.

    `forecasts` are of the recipes that a decision asks about, by text. A recipe that was asked about and is
    not there could not be predicted. `recut` has the texts of those that would run in other units than by
    themselves, with these units.
    """

    backward_s: float
    allreduce_s: float
    world: int
    backward: BackwardTiming | None = None
    network: Network | None = None
    codec: CodecCost | None = None
    payloads: float = 1.0
    uses: Mapping[str, float] | None = None
    collectives_s: tuple[float, ...] = ()
    dense_s: float | None = None
    gradient_bytes: float = 0.0
    buckets: tuple[int, ...] = ()
    dense_noise: float = 0.0
    cores: Cores = ENOUGH
    sending_s: float = 0.0
    steps: int = 0
    forecasts: Mapping[str, Forecast] = field(default_factory=dict, repr=False)
    recut: Mapping[str, str] = field(default_factory=dict)

    @property
    def ccr(self) -> float:
        """Communication-to-computation ratio of the backward pass (COVAP, section III-B)."""
        return self.allreduce_s / max(self.backward_s, 1e-9)

    @property
    def bucket_boundaries(self) -> tuple[int, ...]:
        """The boundaries of DDP's buckets, in elements."""
        return boundaries(self.buckets)


def boundaries(buckets: Sequence[int]) -> tuple[int, ...]:
    """After how many elements a bucket ends and the next begins.

    >>> boundaries((5, 10, 10))
    (5, 15)
    """
    return tuple(accumulate(buckets))[:-1]


@dataclass(frozen=True)
class Times:
    """One rank's times of one step, as its row of the verdict carries them.

    `durations_s` (collectives,) from entering to leaving each; `before_s` what preceded the backward pass;
    `ready_s` (parameters,) from the start of the backward pass on, in layout order. `busy` is how many cores
    the backward pass kept busy, and `sending_s` the processor time from its end until all collectives had
    ended.
    """

    backward_s: float
    durations_s: tuple[float, ...] = ()
    before_s: float = 0.0
    ready_s: tuple[float, ...] = ()
    busy: float = 0.0
    sending_s: float = 0.0

    @property
    def row(self) -> tuple[float, ...]:
        """All of it in a row of numbers."""
        return (self.backward_s, self.before_s, self.busy, self.sending_s, *self.ready_s, *self.durations_s)

    @classmethod
    def of_row(cls, row: Sequence[float], parameters: int) -> Times:
        """Take a row apart.

        >>> times = Times(2.0, (0.5, 0.25), before_s=1.0, ready_s=(0.1, 0.2, 2.0), busy=1.5, sending_s=0.125)
        >>> Times.of_row(times.row, parameters=3) == times
        True
        """
        backward_s, before_s, busy, sending_s, *rest = row
        ready_s, durations_s = tuple(rest[:parameters]), tuple(rest[parameters:])
        return cls(backward_s, durations_s, before_s, ready_s, busy, sending_s)


def facts_of_step(ranks: Sequence[Times], numel: Sequence[int] = ()) -> Facts:
    """Facts of one step from every rank's times; `numel` (parameters,) in layout order.

    All ranks leave a collective together but may enter it apart, and an early rank's wait is no
    transmission: the true duration is the minimum over ranks (COVAP's distributed profiler). All wait
    for the rank that computes longest, so its computation stands for all.

    >>> facts_of_step([Times(1.0, (0.5, 0.25)), Times(1.0, (0.75, 0.25))])  # doctest: +ELLIPSIS
    Facts(backward_s=1.0, allreduce_s=0.75, world=2, ...)
    """
    durations = zip(*(times.durations_s for times in ranks), strict=True)
    collectives_s = tuple(min(column) for column in durations)
    slowest = max(ranks, key=lambda times: times.before_s + times.backward_s)
    backward = None
    if numel:
        backward = BackwardTiming(slowest.before_s, slowest.ready_s, tuple(numel), slowest.backward_s)
    return Facts(
        slowest.backward_s,
        sum(collectives_s),
        len(ranks),
        backward,
        collectives_s=collectives_s,
        cores=Cores(busy=slowest.busy),
        sending_s=fmean(times.sending_s for times in ranks),
    )


def typical(steps: Sequence[Facts]) -> Facts:
    """The step with the median ratio of communication to computation.

    The time before a backward pass is the median of all steps: now and then an evaluation comes before it.
    So is the processor time of collectives: now and then another thread is at work.
    """
    middle = int(median(range(len(steps))))
    facts = sorted(steps, key=lambda facts: facts.ccr)[middle]
    facts = replace(facts, sending_s=median(step.sending_s for step in steps))
    known = [step.backward.before_s for step in steps if step.backward is not None]
    if facts.backward is None or not known:
        return facts
    return replace(facts, backward=replace(facts.backward, before_s=median(known)))


@dataclass(frozen=True)
class Watched:
    """The number of ranks, and the elements of each parameter in the main recipe's lane, in order."""

    world: int
    sizes: tuple[int, ...]
    tuning: Tuning = USUAL


@dataclass(frozen=True)
class StepObservation:
    """The numbers of one committed step on which all ranks agree, with the step's own number.

    `previous_s` is how long the step before took from the start of backward to its verdict, `compressed_s`
    what of that went into encoding and decoding, each on the slowest rank; 0 when there was none under this
    plan. `looked` are sums over units and ranks, and `left` is the energy (sum of squares) of what the
    exchanges have not sent; `None` in steps that did not look. `link` is the line through what steps' own
    collectives took under this plan, as `gradwire.measure.link` draws it; `None` in the first 15 of them.

    `link_change` and `step_change_s` are what link and steps were, and what they are, where that has just
    been found to have changed. A change of the link is not told once more as one of the steps. `unhealthy`
    says in words that training suffers, once for each composition.

    `late` are the steps' worth of gradient that wait in memory under this composition, `None` before enough
    steps were looked at. `late_is_known` if it does not rise any more. Where nothing is remembered it is 0.
    """

    step: int
    previous_s: float
    compressed_s: float
    looked: tuple[float, ...] | None = None
    link: Link | None = None
    left: float | None = None
    link_change: tuple[Link, Link] | None = None
    step_change_s: tuple[float, float] | None = None
    unhealthy: str = ""
    late: float | None = None
    late_is_known: bool = False

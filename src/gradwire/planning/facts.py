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
    """Measured times of one dense step, in seconds; equal on all ranks. `None`, 0 or empty if not measured.

    - `backward_s` is the duration of the backward pass, `allreduce_s` the sum of `collectives_s`, which are
      the durations of the collectives. Each of these is the minimum over ranks. `world` is the number of
      ranks.
    - `backward` has the time at which each parameter is ready, in layout order. `network` describes the
      links.
    - `codec` is the cost of the codec that a recipe asks about. A rank decodes `payloads` payloads of it per
      unit.
    - `uses` are multiply–adds per weight in a forward pass, by parameter name.
    - `dense_s` is the duration of an ordinary dense step, with overlap, from the start of the backward pass
      to the status vote, on the slowest rank. `dense_noise` is the relative standard deviation of these
      steps.
    - `gradient_bytes` is the size of the gradient. `buckets` are the elements of DDP's buckets, in order.
    - `cores` are those of the rank that has the fewest, with the busy cores of the slowest rank. `sending_s`
      is the mean processor time of a rank for the collectives. Measuring took `steps` steps.
    - `forecasts` are the predictions of the recipes that a decision asks about, by text. A recipe without a
      forecast could not be predicted. `recut` maps the text of each recipe that would run in other units than
      its own to these units.
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
        return inner_ends(self.buckets)


def inner_ends(buckets: Sequence[int]) -> tuple[int, ...]:
    """Boundaries between buckets, in elements from the start.

    >>> inner_ends((5, 10, 10))
    (5, 15)
    """
    return tuple(accumulate(buckets))[:-1]


@dataclass(frozen=True)
class Times:
    """Times of one step on one rank, as sent in its row of the status vote.

    - `durations_s` (collectives,): seconds from entering to leaving each collective.
    - `before_s`: seconds before the backward pass.
    - `ready_s` (parameters,): seconds from the start of the backward pass, in layout order.
    - `busy`: number of cores that the backward pass keeps busy.
    - `sending_s`: processor seconds from the end of the backward pass to the end of the last collective.
    """

    backward_s: float
    durations_s: tuple[float, ...] = ()
    before_s: float = 0.0
    ready_s: tuple[float, ...] = ()
    busy: float = 0.0
    sending_s: float = 0.0

    @property
    def row(self) -> tuple[float, ...]:
        """All times as a row of numbers."""
        return (self.backward_s, self.before_s, self.busy, self.sending_s, *self.ready_s, *self.durations_s)

    @classmethod
    def of_row(cls, row: Sequence[float], parameters: int) -> Times:
        """Inverse of `row`: read the times of a rank, with as many ready times as there are `parameters`.

        >>> times = Times(2.0, (0.5, 0.25), before_s=1.0, ready_s=(0.1, 0.2, 2.0), busy=1.5, sending_s=0.125)
        >>> Times.of_row(times.row, parameters=3) == times
        True
        """
        backward_s, before_s, busy, sending_s, *rest = row
        ready_s, durations_s = tuple(rest[:parameters]), tuple(rest[parameters:])
        return cls(backward_s, durations_s, before_s, ready_s, busy, sending_s)


def facts_of_step(ranks: Sequence[Times], numel: Sequence[int] = ()) -> Facts:
    """Facts of one step from the times of all ranks; `numel` (parameters,) in layout order.

    All ranks leave a collective together but may enter it at different times. An early rank's waiting is not
    transmission, so the duration of a collective is the minimum over ranks (COVAP's distributed profiler).
    All ranks wait for the slowest computation, so that one counts.

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
    """The number of ranks, and the elements of each parameter in the main recipe's flat buffer, in order."""

    world: int
    sizes: tuple[int, ...]
    tuning: Tuning = USUAL


@dataclass(frozen=True)
class StepObservation:
    """Numbers of one committed step, equal on all ranks.

    - `previous_s`: duration of the previous step, from the start of the backward pass to the status vote.
      `compressed_s`: its time for encoding and decoding. Both of the slowest rank; 0 in the first step under
      a plan.
    - `looked`: results of the judge's measurement, summed over units and ranks. `left`: energy (sum of
      squares) of the unsent gradient. `None` in steps without a measurement.
    - `link`: line through the times of the steps' own collectives under this plan (`gradwire.measure.link`).
      `None` in the first 15 steps.
    - `link_change`, `step_change_s`: old and new values, if a change of the link or of the step time has just
      been found. A change of the link is not reported again as a change of the step time.
    - `unhealthy`: a sentence on how training suffers, once per composition.
    - `late`: lateness under this composition, in steps' worth of gradient. `None` until enough steps were
      measured; 0 if nothing is remembered. `late_is_known`: it has stopped rising.
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

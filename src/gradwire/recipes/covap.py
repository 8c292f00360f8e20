"""covap: sends each unit once in I steps; I is the ratio of communication to computation, rounded up.

Meng et al. 2023, "Near-Linear Scaling Data Parallel Training with Overlapping-Aware Gradient Compression".

Differences from the paper:

- By default, boundaries give all phases equal bytes (`sharding="balanced"`). If ready times were measured,
  they are placed for the shortest step, else spread over the whole backward pass. "paper" shards units of at
  least twice the median instead.
- The step of a cycle in which a unit is sent is drawn again every few cycles, so that two turns are 1 to 2I −
  1 steps apart. "paper" is the paper's fixed `order` with equal intervals (its formula; the example in III-A
  counts differently). It never sends a unit whose parameters have gradients in the other steps only.
- CCR is the median over three dense steps in which buckets are sent after the backward pass; the paper takes
  one step. It is rounded to `ccr_decimals`, then rounded up. A measured interval is at most 64.
- The schedule's numbers come from the authors' code; the paper gives none. That code adds the whole residual
  when a unit that is not cut is sent. Here c applies then, too, as in the paper, so less is delivered while c
  < 1.
- Norms, biases and other tiny tensors are sent densely in every step.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Literal, get_args

from gradwire.exchange.base import Exchange
from gradwire.exchange.compose import every, forget, remember
from gradwire.exchange.dense import dense
from gradwire.exchange.round_robin import Order
from gradwire.memory import NoMemory, Residual
from gradwire.planning.boundaries import PHASED_RAMP, phased_boundaries
from gradwire.planning.collectives import Transfer, time_of
from gradwire.planning.costs import Line
from gradwire.planning.facts import Facts
from gradwire.planning.interval import balanced_edges, bucketed, interval_for, paper_boundaries
from gradwire.recipes.base import Composition, Cutter, Decision, register
from gradwire.recipes.dense import measured_for

Sharding = Literal["balanced", "paper", "off"]
Feedback = Literal["schedule", "full", "none"]


@register
def covap(
    interval: int | None = None,
    sharding: Sharding = "balanced",
    feedback: Feedback = "schedule",
    unit_mb: float = 25.0,
    edges: Sequence[float] | None = None,
    init_value: float | None = None,
    ascend_steps: int | None = None,
    ascend_range: float | None = None,
    ccr_decimals: int = 1,
    order: Order = "random",
) -> Composition:
    """Each unit once in I steps with error feedback; without an interval, I from the measured CCR.

    A unit that travels every I steps hands the optimizer the gradients of I steps at once, and zeros in
    between. What Adam, momentum and clipping make of that is in
    `benchmarks/results/2026-11-25-covap-optimizers.md`.

    Travels: one unit in I, whole.

    Paper: Meng et al. 2023, "Near-linear scaling data parallel training with overlapping-aware gradient
        compression".

    Use when: the network is 2 to 4 times too slow and the codec must cost nothing; above that gradients
        get stale, and a measured interval above 5 is logged as a warning.

    Args:
        interval: I, at most 1000. Without one, dense steps measure CCR, and I = ⌈CCR⌉ after rounding.
        sharding: "balanced" makes units of equal size for all steps of an interval. Where ready times and
            links have been measured, segments are placed for the least step time. "paper" takes units of
            `unit_mb` as DDP has them, and cuts those of twice the median or more into ⌊elements / median⌋
            parts, at most I. "off" does not cut. A unit that is much larger than the others then makes every
            I-th step slow: VGG-19's steps carry 0.20 to 2.99 of the mean at I = 4 (Table V).
        feedback: with "schedule" the residual counts times c = min(init_value + ⌊step / ascend_steps⌋ ·
            ascend_range, 1). With "full" c = 1, and nothing is ever lost. With "none" the unsent gradient is
            dropped.
        unit_mb: size of a unit before it is cut, in MiB, with "paper" and "off".
        edges: shares of the gradient at which segments end, with "balanced"; measured by default.
        init_value: c at first. The default is 0.5, and 0.2 above I = 8.
        ascend_steps: steps after which c rises. The default is 50, and 100 above I = 8.
        ascend_range: by how much c rises. The default is 0.1.
        ccr_decimals: decimals to which the measured CCR is rounded.
        order: with "random", the step of a cycle in which a unit travels is drawn anew every three cycles
            (`docs/engineering/laws.md`). With "paper", unit u always travels in steps s with
            (u + s) mod I = 0. A unit whose parameters have gradients in some steps only may then never
            travel.
    """
    segments = None if edges is None else tuple(edges)
    options = Options(sharding, feedback, unit_mb, segments, init_value, ascend_steps, ascend_range, order)
    if not isinstance(ccr_decimals, int) or ccr_decimals < 0:
        raise ValueError(f"ccr_decimals={ccr_decimals} must be a whole number from 0 on; the paper prints 1")
    if interval is None:
        return measured_for(Decision(partial(from_facts, options=options, decimals=ccr_decimals)))
    return compose(interval, options)


@dataclass(frozen=True)
class Options:
    """All options except the interval and its measurement.

    Units of `unit_mb`, the first one a 25th of that, are sharded with "paper" and not with "off". `edges` are
    the shares of all elements at which the segments of "balanced" end. The schedule's coefficient is
    min(init_value + ⌊step / ascend_steps⌋ · ascend_range, 1). `None` stands for the published value
    (`schedule`).
    """

    sharding: Sharding = "balanced"
    feedback: Feedback = "schedule"
    unit_mb: float = 25.0
    edges: tuple[float, ...] | None = None
    init_value: float | None = None
    ascend_steps: int | None = None
    ascend_range: float | None = None
    order: Order = "random"

    def __post_init__(self) -> None:
        for option, known in (("sharding", Sharding), ("feedback", Feedback), ("order", Order)):
            if getattr(self, option) not in get_args(known):
                raise ValueError(
                    f"{option}={getattr(self, option)!r} is none of {', '.join(get_args(known))}"
                )
        if not 0 < self.unit_mb <= 1e6:
            raise ValueError(f"unit_mb={self.unit_mb} must be positive, and at most 10^6; the paper's is 25")
        bounds = (0.0, *(self.edges or ()), 1.0)
        if any(a > b for a, b in pairwise(bounds)):
            raise ValueError(f"edges={self.edges} must ascend within 0 … 1: shares of all elements")
        self._check_schedule()

    def _check_schedule(self) -> None:
        start, steps, rise = self.init_value, self.ascend_steps, self.ascend_range
        if self.feedback != "schedule" and (start, steps, rise) != (None, None, None):
            raise ValueError(f"feedback={self.feedback!r} has no schedule, so it takes no options for one")
        if start is not None and not 0.0 <= start <= 1.0:
            raise ValueError(f"init_value={start} is outside 0 … 1; 1 is plain error feedback")
        if steps is not None and not (isinstance(steps, int) and steps >= 1):
            raise ValueError(f"ascend_steps={steps} must be a whole number of steps from 1 on")
        if rise is not None and not rise >= 0.0:
            raise ValueError(f"ascend_range={rise} must not be negative: the coefficient rises")

    def text(self, interval: int) -> str:
        """The text that parses back to these options, without defaults."""
        default = asdict(Options())
        changed = [f"{key}={value!r}" for key, value in asdict(self).items() if value != default[key]]
        return f"covap({', '.join([f'interval={interval}', *changed])})"

    @property
    def unit_elements(self) -> int:
        """Elements of float32 in a unit, at least one."""
        return max(1, round(self.unit_mb * (1 << 18)))


def compose(interval: int, options: Options, why: str = "as configured") -> Composition:
    """COVAP's filter with its scheduled memory and boundaries, for units sent once in `interval` steps. At
    interval 1 nothing is filtered or remembered. `why` is the reason that reports show.
    """
    text = options.text(interval)
    if interval == 1:
        return Composition(dense(), why=why, text=text)
    exchange = _fed_back(interval, options)
    if interval > MOST:
        raise ValueError(f"interval={interval} is outside 1 … {MOST} steps; 2 to 4 are usual")
    return Composition(exchange, _cutter(interval, options), why, text=text)


def _fed_back(interval: int, options: Options) -> Exchange:
    filtered = every(interval, dense(), order=options.order)
    if options.feedback == "none":
        return forget(filtered, NoMemory(as_arrived=True))
    return remember(filtered, schedule(interval, options) if options.feedback == "schedule" else Residual())


def _cutter(interval: int, options: Options) -> Cutter:
    unit = options.unit_elements
    if options.sharding == "balanced":
        edges = PHASED_RAMP if options.edges is None else options.edges
        return partial(phased_boundaries, interval=interval, edges=edges)
    if options.sharding == "paper":
        return partial(paper_boundaries, interval=interval, unit=unit, first=unit // 25)
    return lambda sizes: tuple(accumulate(bucketed(sizes, unit, unit // 25)))[:-1]


def schedule(interval: int, options: Options) -> Residual:
    """The schedule of `options`, or else one of the two in the authors' code: the paper gives no values.

    Section III-D: init_value, ascend_range and ascend_steps.
    """
    start, rise, steps = (0.5, 0.1, 50) if interval <= 8 else (0.2, 0.1, 100)
    return Residual(
        start if options.init_value is None else options.init_value,
        rise if options.ascend_range is None else options.ascend_range,
        steps if options.ascend_steps is None else options.ascend_steps,
    )


FRESH = 5
"""Common networks stay below this CCR (section V). Far above it the paper expects accuracy to suffer, and
names no number."""

MOST = 1000
"""Largest interval. A flat buffer has several units for each of its steps."""

LONGEST = 64
"""Largest measured interval: tiny models have absurd CCRs, and a unit must be sent now and then."""


def from_facts(facts: Facts, options: Options, decimals: int = 1) -> Composition:
    """COVAP with the measured interval I = ⌈CCR⌉, so that sending takes no longer than the backward pass.
    `decimals` are those to which the CCR is rounded before.

    Sets a warning if the interval is so long that gradients get stale.
    """
    interval = min(interval_for(facts.ccr, decimals), LONGEST)
    why = f"CCR {facts.ccr:.2f} needs every unit only once in {interval} steps"
    warning = ""
    if interval > FRESH:
        warning = f"gradients get stale: {why}; consider leader_topk or topk"
        why += f"; above {FRESH} gradients get stale, consider leader_topk"
    if options.sharding == "balanced" and options.edges is None:
        options = replace(options, edges=measured_edges(facts, interval))
    return replace(compose(interval, options, why), warning=warning)


def measured_edges(facts: Facts, interval: int) -> tuple[float, ...] | None:
    """Segments for the least step time; `None` if ready times and links have not been measured."""
    if facts.backward is None or facts.network is None or interval == 1:
        return None
    base_s, s_per_mb = (
        time_of(Transfer("all_reduce", size), facts.world, facts.network) for size in (0.0, 1e6)
    )
    line = Line(base_s, (s_per_mb - base_s) * 4e-6)
    return balanced_edges(facts.backward, interval, line)

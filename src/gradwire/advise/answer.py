"""The answer: what bounds a step, what would help and by how much, and the line to write.

Predictions are those of `gradwire.plan`, for the link over which plain all-reduces would last as long as
they did. There are two: all that is not known is as cheap as it may be in one, and as dear as it may be in
the other. That is what gradwire's own work takes, the cost of a codec that was not measured on this machine,
and the latency of a link of which nothing tells it. A range lies around their middle. It contains both, the
model's error (`OFF`), and by how much steps vary: errors that know nothing of each other, whose squares add
up.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from statistics import median
from typing import Any

import numpy as np

from gradwire._api.plan import CANDIDATES, Plan, plan
from gradwire._api.study import Candidate, Told, link_of
from gradwire.advise.observed import Observed, ObservedStep
from gradwire.control.forecast import INSIDE
from gradwire.planning.choice import LEAD, OFF
from gradwire.planning.cluster import Cluster
from gradwire.planning.collectives import Transfer, hops
from gradwire.planning.costs import ENOUGH, NOMINAL, NOMINAL_ELEMENT_S, CodecCost, Cores, Line, Link
from gradwire.planning.interval import bucketed
from gradwire.planning.links import straight_line
from gradwire.planning.shapes import Layer, Profile
from gradwire.planning.step_time import Sent, step_time
from gradwire.quantities import bytes_text, columns, counted, wrapped

LITTLE = 0.25
"""Share of a step up to which a wait does not bound it."""

TOLD = 0.05
"""Share of a step from which on a wait is told where computing is the bound."""

FEW_BYTES = 16e3
"""Bytes of an all-reduce up to which its time does not tell a slow link from a far one: about as many as TCP
sends before it waits for an answer. For small ones gloo waits twice as often as the cost model knows."""

FAST_CODEC, SLOW_CODEC = 0.4, 2.0
"""Factors of `NOMINAL_ELEMENT_S` between which the costs of codecs lie that were measured."""

OWN_S = (2e-3, 4e-3)
"""Processor seconds that gradwire takes in a step beside codecs: (least, most). `plan` has none of them."""

DEAR = (2.0, 3.0)
"""Factor on `plan`'s processor time of a collective, if gradwire runs it on a core that computes: (least,
most). Its threads wake up for each collective, and share the core. 2.4 to 2.7 were found with two and
three ranks that fill two cores."""

SOFTWARE_S = NOMINAL.alpha_s
"""Time that a message takes in software, on top of the delay that the system tells."""

FAR_S = 3e-3
"""Largest delay assumed for an unknown link, in seconds: that of two sites that are near each other."""

BELOW_RATE = 0.5
"""The share of a link's rate below which something is wrong with it."""

FASTEST_BIT_PER_S = 1e13
"""The rate that stands for a link on which nothing is waited for."""

CAPS_MB = (25, 50, 100)
"""Values of DDP's `bucket_cap_mb` that are compared; 25 is its default."""


EXACT_BITS = (0.3, 3.7)
"""Bits of a parameter of which exact gathers bring the change: means of runs with usual settings
(`benchmarks/results/2026-11-28-exact-steps.md`)."""

SHOWN = 3
"""Recipes of a kind that are named."""

MOST_SIZES = 16
"""Sizes of all-reduces through which the line is drawn that tells their latency."""

REMEDIES = {
    "computing": "computing itself has to become faster, or more ranks have to share it",
    "input": "give the DataLoader more workers (num_workers, prefetch_factor), or make samples cheaper",
    "between": "look at what the loop does between optimizer.step() and the next forward pass",
    "optimizer": "make the optimizer's step faster (fused=True, foreach=True), or accumulate for fewer steps",
    "late rank": "give the rank that is late less to do, or a machine like the others",
    "late ranks": "look for what some ranks do in some steps only: longer samples, logging, other programs",
    "no_sync": "accumulate under no_sync(), and send once per optimizer step",
    "buckets": "give DistributedDataParallel larger buckets (bucket_cap_mb)",
    "link rate": "find out why the link is slow: its card, its cable, its switch, or other traffic",
    "latency": "exchange less often: accumulate under no_sync(), or take local steps (gradwire.outer)",
    "bandwidth": "compression costs more than it saves: exchange less often, by accumulation or local steps",
}
"""Changes that help against each cause, where no recipe does."""

NOT_OURS = ("input", "between", "optimizer", "late rank", "late ranks", "link rate")
"""Causes for which a recipe may help, but which come first."""

SHARES = {
    "input": "waits for data",
    "between": "is work between steps",
    "late rank": "waits for the last rank",
    "late ranks": "waits for the last rank",
}
"""Words for the share of a step that a cause takes; all other causes wait for the network."""


@dataclass(frozen=True)
class ImpliedLink:
    """The link over which all-reduces are exposed for as long as they were.

    `sums` are when each all-reduce of a pass is ready, in seconds from the start of backward, and its bytes.
    `latency_s` is how much of the exposed time of a step their latencies take, at most.
    """

    sums: tuple[tuple[float, float], ...]
    backward_s: float
    found_bit_per_s: float
    delay_s: float
    latency_s: float

    @property
    def rate_bit_per_s(self) -> float | None:
        """Rate in bits per second; `None` if communication hides, so that any fast link would do, or if too
        few bytes are sent to tell.
        """
        tells = math.fsum(size for _, size in self.sums) > FEW_BYTES * len(self.sums)
        return self.found_bit_per_s if tells and self.found_bit_per_s < 0.1 * FASTEST_BIT_PER_S else None


@dataclass(frozen=True)
class Cause:
    """A cause for which a step waits, and the seconds."""

    name: str
    text: str
    seconds: float


@dataclass(frozen=True)
class Gain:
    """A change, and the factor by which a step should become faster: expected, least and most.

    `assumed` is True if the cost of its codec was not measured on this machine.
    """

    change: str
    times: float
    low: float
    high: float
    assumed: bool = False

    def __str__(self) -> str:
        assumed = ", its codec assumed" if self.assumed else ""
        return f"{self.change} {self.times:.1f}x ({self.low:.2f} to {self.high:.2f}{assumed})"


@dataclass(frozen=True)
class Advice:
    """The bound of a run's step, and the changes that would help.

    Times are in seconds, of a typical step. `bound` names one of `causes`, the largest, or "computing", or
    "unknown" where the times do not tell. If waiting for the network is not seen, `compute_s` and `exposed_s`
    are `None`. `would_help` has recipes that `auto` would try, from mild to strong; `would_not` the others
    with a reason. `remedy` helps against a bound for which recipes come second. `free` are changes that need
    nothing of gradwire. `write` is empty where nothing of gradwire's would help, or that is unknown;
    `why_not` then says why.
    """

    source: str
    step_s: float
    compute_s: float | None
    optimizer_s: float
    exposed_s: float | None
    input_s: float
    between_s: float
    late_s: float
    gradient_bytes: float
    calls: float
    rate_bit_per_s: float | None
    latency_share: float
    bound: str
    bound_by: str
    remedy: str
    causes: tuple[Cause, ...]
    would_help: tuple[Gain, ...]
    would_not: tuple[tuple[str, str], ...]
    free: tuple[Gain, ...]
    write: str
    why_not: str
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The advice's numbers and texts, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        width = columns()
        calls = counted(round(self.calls), "call") if self.calls else ""
        sent = f"{bytes_text(self.gradient_bytes)} in {calls}" if self.gradient_bytes else calls
        rate = _rate(self.rate_bit_per_s) if self.rate_bit_per_s else ""
        details = ", ".join(filter(None, (sent, rate)))
        parts = []
        if self.compute_s is not None and self.exposed_s is not None:
            parts.append(f"compute {_ms(self.compute_s)}")
            parts += [f"optimizer {_ms(self.optimizer_s)}"] if self.optimizer_s else []
            parts.append(f"all-reduce exposed {_ms(self.exposed_s)}{f' ({details})' if details else ''}")
        else:
            parts.append(f"computing and waiting for {details}" if details else "computing and waiting")
        parts.append(f"input {_ms(self.input_s)}")
        for name, seconds in (("between steps", self.between_s), ("waiting for the last rank", self.late_s)):
            parts += [f"{name} {_ms(seconds)}"] if seconds >= 0.01 * self.step_s else []
        rows = [(f"step {_ms(self.step_s)} ms", ", ".join(parts)), ("bound by", self.bound_by)]
        said = [
            f"{each.change}, about {each.times:.1f}x" if each.high > 1.0 else each.change
            for each in self.free
        ]
        if first := [*filter(None, [self.remedy]), *said]:
            rows.append(("first", "; ".join(first)))
        rows.append(("would help", ", ".join(map(str, self.would_help)) or self.why_not))
        if self.would_not:
            rows.append(("would not", "; ".join(f"{recipe} ({why})" for recipe, why in self.would_not)))
        if self.write:
            rows.append(("write", self.write))
        rows += [("note", each) for each in self.notes]
        return "\n".join(wrapped(text, width, f"{name:<15}", " " * 15) for name, text in rows)


def advise(
    observed: Observed,
    *,
    rate_bit_per_s: float | None = None,
    codecs: Mapping[str, CodecCost] | None = None,
    told: Told | None = None,
) -> Advice:
    """Say what bounds a run's steps, and what would help.

    Args:
        observed: what was read or watched.
        rate_bit_per_s: the rate that the link between ranks should have. Without it, it is that of the
            network card where it was observed, if that is known.
        codecs: the costs of encoding and decoding that were measured on this machine, by recipe.
        told: called with each finished prediction in words, and the share of the work that is done.

    Returns:
        The advice. It says itself what it does not know.

    Raises:
        ValueError: `rate_bit_per_s` is not positive.
    """
    if rate_bit_per_s is not None and not rate_bit_per_s > 0.0:
        raise ValueError(f"rate_bit_per_s={rate_bit_per_s}: a link has a positive rate")
    step_s = observed.most(lambda step: step.step_s)
    exposed_s = observed.exposed_s
    input_s, between_s, optimizer_s = _own_s(observed)
    late_s = 0.0 if observed.is_blind else observed.late.seconds
    link, far = (_link(observed, exposed_s, delay_s) for delay_s in _delays_s(observed))
    compute_s = max(step_s - exposed_s - input_s - between_s - late_s - optimizer_s, 0.0)
    nominal_bit_per_s = rate_bit_per_s or observed.card_bit_per_s
    causes = tuple(_causes(observed, link, nominal_bit_per_s, is_stated=rate_bit_per_s is not None))
    bound = _bound(causes, observed, step_s, exposed_s)
    is_below = any(cause.name == "link rate" for cause in causes)
    free = tuple(_free(observed, link, step_s, exposed_s, nominal_bit_per_s if is_below else None))
    unknown = _unknown(observed, link)
    helps: list[Gain] = []
    others: list[tuple[str, str]] = []
    late: list[Gain] = []
    why_not = f"cannot tell: {unknown}"
    if link is not None and far is not None and not unknown:
        own_s = step_s - exposed_s - observed.recording_s
        predicted = _predicted(observed, (link, far), own_s, codecs or {}, told)
        helps, others, late = _judged(predicted, observed, step_s - observed.recording_s)
        why_not = "" if helps else f"nothing of gradwire's: {_remedy(observed, bound)}"
    return Advice(
        source=observed.source,
        step_s=step_s,
        compute_s=None if observed.is_blind else compute_s,
        optimizer_s=optimizer_s,
        exposed_s=None if observed.is_blind else exposed_s,
        input_s=input_s,
        between_s=between_s,
        late_s=late_s,
        gradient_bytes=math.fsum(observed.buckets),
        calls=observed.calls,
        rate_bit_per_s=None if link is None else link.rate_bit_per_s,
        latency_share=link.latency_s / exposed_s if link is not None and exposed_s > 0.0 else 0.0,
        bound=bound.name,
        bound_by=bound.text,
        remedy=_remedy(observed, bound) if helps and bound.name in NOT_OURS else "",
        causes=causes,
        would_help=tuple(helps),
        would_not=tuple(others),
        free=free,
        write="wire = gradwire.attach(model, optimizer)" if helps else "",
        why_not=why_not,
        notes=tuple(_notes(observed, link, far, helps, late)),
    )


def _own_s(observed: Observed) -> tuple[float, float, float]:
    """Seconds of a step that each rank spends in DataLoaders, between steps, and in the optimizer. If waiting
    for the network is not seen, only the first is known.
    """
    input_s = observed.least(lambda step: step.input_s)
    if observed.is_blind:
        return input_s, 0.0, 0.0
    between_s = observed.least(lambda step: step.between_s)
    return input_s, between_s, observed.least(lambda step: step.optimizer_s)


def _bound(causes: Sequence[Cause], observed: Observed, step_s: float, exposed_s: float) -> Cause:
    """The cause that bounds a step of `step_s` seconds."""
    first = max(causes, key=lambda cause: cause.seconds)
    if first.seconds >= LITTLE * step_s:
        return first
    if observed.is_blind:
        return Cause("unknown", f"unknown: {_unseen(observed)}", 0.0)
    shares = [f"{exposed_s / step_s:.0%} of a step waits for the network"]
    shares += [
        f"{cause.seconds / step_s:.0%} {SHARES[cause.name]}"
        for cause in causes
        if cause.name in SHARES and cause.seconds >= TOLD * step_s
    ]
    return Cause("computing", f"computing; {', '.join(shares)}", 0.0)


def _unseen(observed: Observed) -> str:
    lacking = "DDP's log does not have what it waits for"
    if observed.hook == "gradwire.attach":
        return f"gradwire is attached, and {lacking}. print(wire.report()) says it"
    return f"the script has registered a comm hook ({observed.hook}), and {lacking}"


def _remedy(observed: Observed, bound: Cause) -> str:
    if bound.name == "late rank" and _late_input_s(observed)[0]:
        return f"on that rank, {REMEDIES['input']}"
    return REMEDIES[bound.name]


def _late_input_s(observed: Observed) -> tuple[float, float]:
    """By how many seconds the late rank spends longer in DataLoaders and between steps than other ranks do; 0
    for what is less than half of its lateness.
    """
    late = observed.late

    def longer_s(number: Callable[[ObservedStep], float]) -> float:
        typical = {each.rank: each.typical(number) for each in observed.ranks}
        more_s = typical.pop(late.rank) - median(typical.values())
        return more_s if more_s > 0.5 * late.seconds else 0.0

    return longer_s(lambda step: step.input_s), longer_s(lambda step: step.between_s)


def _delays_s(observed: Observed) -> tuple[float, float]:
    """The one-way delay between ranks, at least and at most."""
    if observed.latency_s is not None:
        return (observed.latency_s + SOFTWARE_S,) * 2
    messages = hops("all_reduce", observed.world)
    if not messages:
        return NOMINAL.alpha_s, FAR_S
    # No all-reduce that was timed took less than its latencies.
    most_s = min((seconds / messages for _, seconds in observed.timed), default=math.inf)
    points = sorted(dict(observed.timed).items())
    if points and points[-1][0] > 2.0 * points[0][0]:
        # Many are of one size: one point of each size is enough for a line.
        line = straight_line(points[:: 1 + len(points) // MOST_SIZES]).line
        return (min(line.base_s / messages, most_s),) * 2
    return min(NOMINAL.alpha_s, most_s), min(FAR_S, most_s)


def _link(observed: Observed, exposed_s: float, delay_s: float) -> ImpliedLink | None:
    """Estimate the link of an observed run from its exposed time, `exposed_s` seconds of a step, and the
    one-way delay `delay_s`; `None` if sizes or ranks are not known.
    """
    if observed.world < 2 or not observed.buckets:
        return None
    messages, calls = hops("all_reduce", observed.world), len(observed.buckets)
    backward_s = observed.most(lambda step: step.backward_s)
    exposed_s /= observed.passes
    sums = tuple(zip(_ready(observed, backward_s), observed.buckets, strict=True))
    latency_s = min(calls * messages * delay_s, exposed_s)
    implied = partial(ImpliedLink, sums, backward_s, delay_s=delay_s, latency_s=observed.passes * latency_s)
    slow, fast = implied(1e3), implied(FASTEST_BIT_PER_S)
    while fast.found_bit_per_s > (1.0 + 1e-6) * slow.found_bit_per_s:
        middle = implied(math.sqrt(slow.found_bit_per_s * fast.found_bit_per_s))
        slow, fast = (middle, fast) if _exposed(observed, middle, sums) > exposed_s else (slow, middle)
    return fast


def _per_node(observed: Observed) -> int:
    """Number of ranks on each node, if there are several nodes of several ranks; else 1."""
    return observed.per_node if 1 < observed.per_node < observed.world else 1


def _ready(observed: Observed, backward_s: float) -> list[float]:
    """When each all-reduce is ready: with its last gradient, or evenly where gradients are not known."""
    ends = list(accumulate(observed.buckets))  # in fewer bits than gradients have, where a hook sends so
    gradients = observed.gradients
    if gradients is None:
        return [backward_s * (place + 1) / len(ends) for place in range(len(ends))]
    held = list(accumulate(gradients.element_bytes * math.prod(shape) for shape in gradients.shapes))
    share = 1.0 if observed.sends_gradients else held[-1] / ends[-1]
    places = [min(bisect_left(held, 0.999 * share * end), len(held) - 1) for end in ends]
    return [min(gradients.ready_s[place], backward_s) for place in places]


def _free(
    observed: Observed,
    link: ImpliedLink | None,
    step_s: float,
    exposed_s: float,
    rate_bit_per_s: float | None,
) -> Iterator[Gain]:
    """Yield changes that need no compression, with the factor by which a step should become faster.

    Args:
        observed: the run.
        link: its link; `None` if it is not known.
        step_s: seconds of a step, of which `exposed_s` wait for the network.
        rate_bit_per_s: the rate that the link should have, if it is far below; else `None`.
    """
    if link is not None and rate_bit_per_s is not None:
        left_s = observed.passes * _exposed(
            observed, replace(link, found_bit_per_s=rate_bit_per_s), link.sums
        )
        yield _about("the link at its rate", step_s / (step_s - exposed_s + min(left_s, exposed_s)), observed)
    if observed.passes > 1.0:
        rest_s = step_s - exposed_s * (1.0 - 1.0 / observed.passes)
        yield _about("no_sync() for all passes but the last", step_s / rest_s, observed)
    if link is not None:
        spared_s, cap_mb = _larger_buckets(observed, link)
        if step_s / (step_s - spared_s) > 1.0 + LEAD:
            yield _about(f"bucket_cap_mb={cap_mb}", step_s / (step_s - spared_s), observed)
    if observed.finds_unused:
        yield Gain("find_unused_parameters=False, as none was unused", 1.0, 1.0, 1.0)


def _larger_buckets(observed: Observed, link: ImpliedLink) -> tuple[float, int]:
    """Seconds that the best of larger buckets should spare in a step, and their size in MB; zeros where
    gradients are not known."""
    if observed.gradients is None or not observed.gradient_bytes or not observed.sends_gradients:
        return 0.0, 0
    numel = [math.prod(shape) for shape in observed.gradients.shapes]
    now_s, found = _exposed(observed, link, link.sums), []
    for cap_mb in CAPS_MB:
        sizes = [4.0 * units for units in bucketed(numel, cap_mb << 18)]
        if len(sizes) < len(link.sums):
            ready_s = _ready(replace(observed, buckets=tuple(sizes)), link.backward_s)
            spared_s = now_s - _exposed(observed, link, tuple(zip(ready_s, sizes, strict=True)))
            found.append((observed.passes * spared_s, cap_mb))
    most_s = max((spared_s for spared_s, _ in found), default=0.0)
    # The smallest of those that are about as good: DDP's default if it is one of them.
    return next(((each, cap) for each, cap in found if each >= 0.95 * most_s > 0.0), (0.0, 0))


def _exposed(observed: Observed, link: ImpliedLink, sums: Sequence[tuple[float, float]]) -> float:
    """Seconds for which all-reduces over `link` last after the end of a backward pass. Links inside nodes
    count as free.

    `sums` says when each is ready, in seconds from the start of the backward pass, and its bytes per rank.
    """
    between = link_of(link.found_bit_per_s, link.delay_s)
    cluster = Cluster(observed.world, between, _per_node(observed), Link(0.0, 0.0))
    units = []
    for ready_s, size_bytes in sums:
        units.append((ready_s, 1, (Sent(cluster.seconds(Transfer("all_reduce", size_bytes))),)))
    return step_time(units, link.backward_s) - link.backward_s


def _causes(
    observed: Observed, link: ImpliedLink | None, nominal_bit_per_s: float | None, *, is_stated: bool
) -> Iterator[Cause]:
    """Yield everything that may bound a step, with its seconds.

    Args:
        observed: the run.
        link: its link; `None` if it is not known.
        nominal_bit_per_s: the rate that the link should have; the user's if it `is_stated`, else the card's.
        is_stated: whether the user has stated that rate.
    """
    step_s, exposed_s = observed.most(lambda step: step.step_s), observed.exposed_s
    input_s, between_s, optimizer_s = _own_s(observed)
    yield Cause("input", f"the input pipeline: a step waits {_ms(input_s)} ms for data", input_s)
    if observed.is_blind:
        return
    outside = "no pass, no DataLoader and no optimizer" if optimizer_s else "no pass and no DataLoader"
    yield Cause("between", f"work between steps: {_ms(between_s)} ms are in {outside}", between_s)
    late = observed.late
    late_s, is_late = late.seconds, f"rank {late.rank} is {_ms(late.seconds)} ms late"
    if late.is_one:
        data_s, idle_s = _late_input_s(observed)
        why = f"; it waits {_ms(data_s)} ms longer for data" if data_s else ""
        why += f"; it spends {_ms(idle_s)} ms longer between steps" if idle_s else ""
        yield Cause("late rank", f"one rank: {is_late}, and all others wait for it{why}", late_s)
    else:
        often = f"rank {late.rank} in {late.times} of {late.steps} steps"
        is_late = f"the last rank is {_ms(late_s)} ms late, {often}"
        yield Cause("late ranks", f"ranks that wait for each other: {is_late}", late_s)
    if optimizer_s >= step_s - exposed_s - input_s - between_s - late_s - optimizer_s:
        yield Cause("optimizer", f"the optimizer: its step takes {_ms(optimizer_s)} ms", optimizer_s)
    latency = 0.0 if link is None or not exposed_s else link.latency_s / exposed_s
    details = [f"latency {latency:.0%}"] if link is not None else []
    details += [is_late] if late_s > 0.01 * step_s else []
    told = f" ({'; '.join(details)})" if details else ""
    apart = "nodes" if _per_node(observed) > 1 else "ranks"
    name, text = "network", f"the network between {apart}{told}"
    if observed.hook and not observed.buckets:
        name, text = "hook", f"the comm hook {observed.hook}: what it computes, and what it sends{told}"
    elif link is not None:
        each_bytes = math.fsum(observed.buckets) / len(observed.buckets)
        sums = f"{counted(len(observed.buckets), 'all-reduce')} of {bytes_text(each_bytes)}"
        spared_s, _ = _larger_buckets(observed, link)
        found = link.rate_bit_per_s
        if observed.passes > 1.0:
            name = "no_sync"
            text = f"gradients that are sent {observed.passes:.0f} times for each optimizer step{told}"
        elif spared_s > 0.5 * exposed_s:
            name, text = "buckets", f"small buckets: {sums}{told}"
        elif each_bytes <= FEW_BYTES:
            name, text = "latency", f"latency between {apart}: {sums}. So few bytes do not tell a link's rate"
        elif found is not None and found < BELOW_RATE * (nominal_bit_per_s or 0.0):
            of = _rate(nominal_bit_per_s or 0.0) + ("" if is_stated else ", assumed by its card")
            name, text = "link rate", f"a link below its rate: {_rate(found)} of {of}{told}"
        elif latency > 0.5:
            name, text = "latency", f"latency between {apart}: {sums}{told}"
        else:
            name, text = "bandwidth", f"bandwidth between {apart}{told}"
    if name not in ("no_sync", "buckets") and len(observed.ranks) < max(observed.world, 2):
        text += ", or a rank that is late: the times of one rank do not tell"
    yield Cause(name, text, exposed_s)


def _unknown(observed: Observed, link: ImpliedLink | None) -> str:
    """Why nothing can be predicted; empty if it can."""
    if observed.world == 1:
        return "there is one rank, so nothing is sent"
    if observed.is_blind:
        return _unseen(observed)
    if observed.hook:
        return f"a comm hook is registered ({observed.hook}), and predictions are about plain DDP"
    if observed.wrapper != "DDP":
        return f"nothing is predicted for {observed.wrapper} yet (docs/where-it-runs.md has its lines)"
    if link is None:
        return "nothing is predicted without the number of ranks and the sizes of gradients"
    if observed.gradients is not None and observed.gradients.element_bytes != 4:
        return "nothing is predicted for gradients that are not in float32"
    if not observed.sends_gradients:
        sent, held = bytes_text(math.fsum(observed.buckets)), bytes_text(observed.gradient_bytes)
        return (
            f"all-reduces carry {sent} and gradients have {held}. So this is not plain DDP: it has a comm "
            "hook, or another wrapper"
        )
    return ""


@dataclass(frozen=True)
class _Predicted:
    """Two plans of the run: one with the least value of everything unknown, one with the largest.

    `codecs` are the costly ones, and `assumed` the recipes whose codecs were not measured. A rank's threads
    get `pace` of a core.
    """

    fast: Plan
    slow: Plan
    codecs: Mapping[str, CodecCost]
    assumed: frozenset[str]
    pace: float


def _predicted(
    observed: Observed,
    links: tuple[ImpliedLink, ImpliedLink],
    compute_s: float,
    codecs: Mapping[str, CodecCost],
    told: Told | None,
) -> _Predicted:
    several = _per_node(observed) > 1
    coded = [text for text in CANDIDATES if text != "dense"]

    def costs(factor: float) -> dict[str, CodecCost]:
        assumed = CodecCost(Line(0.0, factor * NOMINAL_ELEMENT_S), Line(0.0, 0.0))
        return {text: codecs.get(text, assumed) for text in coded}

    def planned(link: ImpliedLink, factor: float, cores: Cores) -> Plan:
        return plan(
            _profile(observed, link),
            workers=observed.world,
            per_node=_per_node(observed),
            rate_bit_per_s=link.found_bit_per_s,
            inside_bit_per_s=INSIDE * link.found_bit_per_s if several else None,
            delay_s=link.delay_s,
            step_s=compute_s,
            backward_s=min(link.backward_s, compute_s),
            codecs=costs(factor),
            cores=cores,
            told=told,
        )

    few, many = _cores(observed)
    return _Predicted(
        planned(links[0], FAST_CODEC, many),
        planned(links[1], SLOW_CODEC, few),
        costs(SLOW_CODEC),
        frozenset(coded) - set(codecs),
        few.pace,
    )


def _cores(observed: Observed) -> tuple[Cores, Cores]:
    """Cores that one rank has for coding and gloo: (pessimistic, optimistic).

    Both are ENOUGH with NCCL, where the GPU does this work. Where the cores are not known, a rank has one in
    the pessimistic case, and enough in the optimistic one.
    """
    if observed.backend == "nccl":
        return ENOUGH, ENOUGH
    if observed.cores_per_rank is None:
        return Cores(1.0, 1.0, DEAR[1]), ENOUGH
    share = observed.cores_per_rank
    few, many = (Cores(share, min(observed.threads, share), factor) for factor in reversed(DEAR))
    return few, many


def _profile(observed: Observed, link: ImpliedLink) -> Profile:
    """Gradients as layers; if they are not known, each all-reduce counts as one layer."""
    if observed.gradients is None:
        ready_s = [at_s for at_s, _ in link.sums]
        shapes: list[tuple[int, ...]] = [(round(size_bytes / 4.0),) for _, size_bytes in link.sums]
    else:
        ready_s, shapes = list(observed.gradients.ready_s), list(observed.gradients.shapes)
    # The arithmetic of a layer is the share of backward after which it is ready: here nanoseconds.
    took_s = np.diff(ready_s, prepend=0.0)
    layers = [
        Layer(str(place), 1 + round(1e9 * seconds), (shape,))
        for place, (seconds, shape) in enumerate(zip(took_s, shapes, strict=True))
    ]
    return Profile("this run", observed.source, tuple(layers[::-1]))


def _judged(
    predicted: _Predicted, observed: Observed, step_s: float
) -> tuple[list[Gain], list[tuple[str, str]], list[Gain]]:
    """Judge the recipes that were predicted for a run whose step takes `step_s` seconds.

    Returns three lists: recipes that would help, from mild to strong; kinds that would not, with a reason;
    and recipes that would help more, with more of the gradient late.
    """
    fast, slow = _least(predicted.fast), _least(predicted.slow)
    most = step_s / predicted.fast.compute_s * (1.0 + LEAD + observed.spread)
    helps: list[Gain] = []
    late: list[Gain] = []
    others: dict[str, str] = {}
    for recipe in CANDIDATES[1:]:
        row = fast[recipe]
        least_s = row.step_s + OWN_S[0] / predicted.pace
        most_s = slow[recipe].step_s + OWN_S[1] / predicted.pace
        times = step_s / math.sqrt(least_s * most_s)
        error = _error(observed, math.sqrt(most_s / least_s))
        low, high = times / error, max(min(error * times, most), times)
        gain = Gain(recipe, times, low, high, recipe in predicted.assumed)
        if predicted.fast.worthwhile and low > 1.0:
            (helps if row.tried else late).append(gain)
        elif times < 1.0 + LEAD:
            others.setdefault(recipe.partition("(")[0], _why_not(slow[recipe], predicted, step_s))
    helped = {gain.change.partition("(")[0] for gain in (*helps, *late)}
    fastest: dict[str, Gain] = {}
    for gain in sorted(helps, key=lambda gain: -gain.times):
        fastest.setdefault(gain.change.partition("(")[0], gain)  # of the forms of a recipe, the faster one
    best = list(fastest.values())[:SHOWN]
    return (
        [gain for gain in helps if gain in best],
        [(kind, why) for kind, why in others.items() if helps and kind not in helped][:SHOWN],
        [gain for gain in late if best and gain.low > best[0].times],
    )


def _error(observed: Observed, unknown: float = 1.0) -> float:
    """Factor by which a prediction may be off; the unknown numbers alone make it off by `unknown`."""
    return math.exp(math.hypot(math.log1p(OFF), math.log(unknown), observed.spread))


def _least(found: Plan) -> dict[str, Candidate]:
    """The faster row of each recipe, on one level or on two."""
    rows: dict[str, Candidate] = {}
    for row in found.candidates:  # the fastest first
        rows.setdefault(row.recipe, row)
    return rows


def _why_not(row: Candidate, predicted: _Predicted, step_s: float) -> str:
    cost, numel = predicted.codecs[row.recipe], predicted.slow.parameters
    dense = _least(predicted.slow)["dense"]
    if row.step_s - cost.encode(numel) - cost.decode(numel) < (1.0 - LEAD) * step_s:
        return "its codec costs more than it saves"
    return "it sends as much" if row.wire_bytes > 0.9 * dense.wire_bytes else "latency stays"


def _notes(
    observed: Observed,
    link: ImpliedLink | None,
    far: ImpliedLink | None,
    helps: Sequence[Gain],
    late: Sequence[Gain],
) -> Iterator[str]:
    """Yield sentences about everything that was assumed or not measured.

    Args:
        observed: the run.
        link: the estimated link, and `far` the one with the longest latency that the run allows; `None` if
            unknown.
        helps, late: recipes that would help, and those that would with more of the gradient late.
    """
    yield from observed.missing
    yield from _about_gathers(observed)
    if link is not None and far is not None and link.delay_s < far.delay_s:
        least, most = _ms(link.delay_s), _ms(far.delay_s)
        yield f"the latency of a message was not found: {least} to {most} ms are assumed; --delay states it"
    if observed.recording_s:
        took = _ms(observed.recording_s)
        yield f"recording took about {took} ms of a step: predictions are about steps without that"
    if observed.gradients is not None and observed.gradients.assumed:
        yield "when each gradient was ready is assumed, between the first and the last"
    if any(gain.assumed for gain in helps):
        yield "costs of codecs are assumed: --codec measured measures them on this machine"
    if late:
        best = max(late, key=lambda gain: gain.times)
        yield f"with more of the gradient late, which costs quality on most models: {best}"


def _about_gathers(observed: Observed) -> Iterator[str]:
    """Yield what FSDP2's own gathers take, and whether exact ones would pay."""
    found, step_s = observed.gathers, observed.most(lambda step: step.step_s)
    if found is None or not observed.world:
        return
    sent = f" {bytes_text(found.size_bytes * (observed.world - 1))}" if found.size_bytes > 0.0 else ""
    said = f"parameters are gathered in {8 * found.element_bytes} bits:{sent} per rank and step"
    if not found.took_s >= 0.0:
        yield f"{said}. How long that takes is not in the trace"
        return
    said += f", during {found.took_s / step_s:.0%} of a step"
    if found.took_s < LITTLE * step_s:
        yield f"{said}: fewer bits would not pay"
    elif found.element_bytes == 2:
        yield (
            f'{said}. gradwire.attach(model, optimizer, "dense", gather="exact") sends what an optimizer '
            f"step has changed, {EXACT_BITS[0]} to {EXACT_BITS[1]} of 16 bits, and every bit stays; a rank "
            "then holds 2 bytes per parameter of the model. gradwire plan --sharded predicts steps"
        )
    else:
        yield (
            f'{said}. gather="int8" sends a quarter, rounded. With param_dtype=torch.bfloat16 gather="exact" '
            "sends what has changed, and rounds nothing more. gradwire plan --sharded predicts steps"
        )


def _about(change: str, times: float, observed: Observed) -> Gain:
    error = _error(observed)
    return Gain(change, times, max(times / error, 1.0), times * error)


def _ms(seconds: float) -> str:
    """Milliseconds, with two digits at least."""
    return f"{1e3 * seconds:.0f}" if seconds >= 0.0095 else f"{1e3 * seconds:.2g}"


def _rate(bit_per_s: float) -> str:
    """Text of a rate in Gbit/s, Mbit/s or kbit/s."""
    for factor, unit in ((1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bit_per_s >= factor:
            return f"{bit_per_s / factor:.3g} {unit}"
    return f"{bit_per_s / 1e3:.3g} kbit/s"

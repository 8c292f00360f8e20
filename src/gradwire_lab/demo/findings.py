"""Claims of the demonstration, checked against this run, and its result in figures and words.

A claim that does not hold comes first, and says by how much. One that a user cares about stands in the
headline, too.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from gradwire_lab.bench.units import bytes_text, ratio_text, seconds_text
from gradwire_lab.demo.curves import ahead, ends_s, lags, on_slow_link, reached, smooth
from gradwire_lab.demo.race import Course

LEAST_AHEAD = 0.9
# Headers that the interface counts: Ethernet, IP, and TCP with its timestamps. An acknowledgement has nothing
# else.
HEADER_BYTES = 14 + 20 + 32
# The cost model leaves out the messages by which gloo's peers announce others to each other.
ANNOUNCED_SHARE = 0.02


@dataclass(frozen=True)
class Check:
    """Result of a claim. `passed` is `None` if this run could not tell; `worse` is the amount by which it
    failed.

    `headline` is the text of the headline if it failed; empty if users do not care, or if the headline's
    number shows it.
    """

    claim: str
    found: str
    wanted: str
    passed: bool | None
    worse: str = ""
    headline: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The check as a dictionary of plain JSON types."""
        return asdict(self)


@dataclass(frozen=True)
class Metric:
    """A figure by which models are compared."""

    key: str
    label: str
    higher_is_better: bool
    percent: bool

    @property
    def unit(self) -> str:
        """With a space before it."""
        return " %" if self.percent else ""

    def number(self, value: float) -> str:
        """Text of a value without its unit."""
        return f"{value * 100:.2f}" if self.percent else f"{value:.3f}"

    def text(self, value: float | None) -> str:
        """Text of a value with its unit; "-" for `None`."""
        return "-" if value is None else self.number(value) + self.unit

    def gap(self, value: float, other: float) -> tuple[str, str]:
        """The size of a difference, and whether `value` is better or worse than the other."""
        size = self.number(abs(value - other))
        better = (value > other) is self.higher_is_better
        return size, "equal" if float(size) == 0.0 else "better" if better else "worse"

    def apart(self, value: float, other: float) -> str:
        """The difference and its sign in words: `worse by 0.14`."""
        size, sign = self.gap(value, other)
        return sign if sign == "equal" else f"{sign} by {size}{' points' if self.percent else ''}"

    def of(self, course: Course) -> float | None:
        """Its value at the end of a course."""
        if self.key == LOSS.key:
            return next((loss for loss in smooth(course.losses)[-1:] if math.isfinite(loss)), None)
        return course.evaluation.get(self.key)


LOSS = Metric("loss", "training loss", higher_is_better=False, percent=False)
_METRICS = (
    Metric("test_accuracy", "test accuracy", higher_is_better=True, percent=True),
    Metric("test_loss", "test loss", higher_is_better=False, percent=False),
)


def metric_of(courses: Sequence[Course]) -> Metric:
    """Accuracy if the workload has one, else the loss on held-out data."""
    known = {key for course in courses for key in course.evaluation}
    return next((metric for metric in _METRICS if metric.key in known), _METRICS[-1])


@dataclass(frozen=True)
class Runs:
    """The courses of one side that were trained to the end, and the times at which their steps were over."""

    courses: list[Course]
    times_s: list[list[float]]

    @classmethod
    def of(cls, courses: Sequence[Course], name: str, steps: int, warmup: int) -> "Runs":
        """The whole runs of `name` among `courses`, of at least `steps` steps. Runs that never used the slow
        link have the times of seed 0; `warmup` is as in `on_slow_link`.
        """
        mine = [course for course in courses if course.name == name]
        first = next((course for course in mine if course.seed == 0), None)
        whole = [course for course in mine if len(course) >= steps]
        return cls(whole, [ends_s(course, warmup, first) for course in whole])

    def values(self, metric: Metric) -> list[float]:
        """Values of `metric` at the end of each run that has one."""
        return [value for value in map(metric.of, self.courses) if value is not None]

    def losses(self) -> list[list[float]]:
        """Smoothed losses of each run, step by step."""
        return [smooth(course.losses) for course in self.courses]

    def whole_s(self) -> list[float]:
        """The time of the whole training, by seed."""
        return [times_s[-1] for times_s in self.times_s if times_s]

    def reached_s(self, target: float) -> list[float | None]:
        """When the training loss was first at or below the target, by seed."""
        return [
            reached(losses, times_s, target)
            for losses, times_s in zip(self.losses(), self.times_s, strict=True)
        ]

    def mean_reached_s(self, target: float) -> float | None:
        """When the mean of the seeds' training losses was first at or below the target, at mean times."""
        losses, times_s = (zip(*of, strict=False) for of in (self.losses(), self.times_s))
        return reached([fmean(each) for each in losses], [fmean(each) for each in times_s], target)


@dataclass(frozen=True)
class Both:
    """Plain DDP and gradwire, with all seeds that were trained to the end."""

    ddp: Runs
    wire: Runs
    steps: int
    warmup: int

    @classmethod
    def of(cls, courses: Sequence[Course], steps: int, warmup: int) -> "Both":
        ddp, wire = (Runs.of(courses, name, steps, warmup) for name in ("ddp", "gradwire"))
        return cls(ddp, wire, steps, warmup)

    @property
    def has_spread(self) -> bool:
        """True if one side has more than one seed; a single seed has no spread."""
        return min(len(self.ddp.courses), len(self.wire.courses)) > 1

    def target(self) -> float | None:
        """The training loss that every seed of plain DDP has in the end."""
        return max(self.ddp.values(LOSS), default=None)


def band(values: Sequence[float], number: Callable[[float], str], unit: str) -> str:
    """Text of the mean, and of the range if there is one. `number` writes a value, and `unit` follows; "-"
    without values.

    >>> band([1.0, 3.0], "{:.1f}".format, " s")
    '2.0 (1.0 to 3.0) s'
    """
    if not values:
        return "-"
    low, mean, high = number(min(values)), number(fmean(values)), number(max(values))
    return (f"{mean} ({low} to {high})" if low != high else mean) + unit


def seconds_band(values: Sequence[float]) -> str:
    """Mean and range, in seconds."""
    return band(values, "{:.1f}".format, " s")


def time_to_loss(both: Both) -> Check:
    """The mean over gradwire's seeds must reach plain DDP's final loss, sooner than plain DDP's mean.

    Seed by seed it would be a matter of chance: of two equal methods, each has the worst seed as often.
    """
    target = both.target()
    claim = "seconds to plain DDP's final training loss"
    if target is None or not both.wire.courses:
        return Check(claim, "not measured", "sooner than plain DDP", None)
    mine_s, ddp_s = both.wire.mean_reached_s(target), both.ddp.mean_reached_s(target)
    claim += f" ({target:.3f})"
    wanted, found = f"below plain DDP's {to_loss_text(both.ddp, target)}", to_loss_text(both.wire, target)
    if mine_s is None or ddp_s is None:
        worse = f"plain DDP's final loss not reached, {LOSS.apart(fmean(both.wire.values(LOSS)), target)}"
        return Check(claim, f"{found} in {both.steps} steps", wanted, _judged(both, passed=False), worse)
    late_s = mine_s - ddp_s
    worse = "" if late_s < 0 else f"worse by {late_s:.1f} s to plain DDP's final loss"
    return Check(claim, found, wanted, _judged(both, passed=late_s < 0), worse)


def time_to_metric(both: Both, metric: Metric) -> Check:
    """Check that gradwire's mean reaches, after all its steps, what every seed of plain DDP has in the end,
    and that this takes less time.
    """
    claim = f"seconds to plain DDP's final {metric.label}"
    ddp, wire = both.ddp.values(metric), both.wire.values(metric)
    if not ddp or not wire:
        return Check(claim, "not measured", "sooner than plain DDP", None)
    target = min(ddp) if metric.higher_is_better else max(ddp)
    claim += f" ({metric.text(target)})"
    wanted = f"below plain DDP's {seconds_band(both.ddp.whole_s())}"
    if not _is_within(fmean(wire), ddp, metric):
        found = f"not reached in {both.steps} steps: {metric.apart(fmean(wire), target)}"
        return Check(claim, found, wanted, _judged(both, passed=False))  # `quality` says how much
    late_s = fmean(both.wire.whole_s()) - fmean(both.ddp.whole_s())
    worse = "" if late_s < 0 else f"worse by {late_s:.1f} s for {both.steps} steps"
    found = seconds_band(both.wire.whole_s())
    passed = _judged(both, passed=late_s < 0)
    return Check(claim, found, wanted, passed, worse, "its training takes longer")


@dataclass(frozen=True)
class Choosing:
    """The race up to the choice and after it, in seconds, step by step beside plain DDP's.

    Until the recipe was decided, steps took `cost_s` longer than plain DDP's of the same number. `lag_s` is
    the largest time by which any step of the race was over later than plain DDP's of the same number: that
    of `step`, from 1. From step `ahead_from` on none was; a plain step takes `step_s`.
    """

    cost_s: float
    lag_s: float
    step: int
    ahead_from: int
    step_s: float

    @classmethod
    def of(cls, courses: Sequence[Course], warmup: int) -> "Choosing | None":
        """Compare the steps of seed 0 that both sides ran on the slow link; `None` if there are none."""
        first = {course.name: course for course in courses if course.seed == 0}
        if not {"ddp", "gradwire"} <= first.keys():
            return None
        ddp, wire = first["ddp"], first["gradwire"]
        steps_s = on_slow_link(wire, warmup)[: ddp.shaped]
        plain_s = on_slow_link(ddp, warmup)[: len(steps_s)]
        if not steps_s or not plain_s:
            return None
        decided = wire.settled_after
        late_s = lags(steps_s, plain_s)
        lag_s, step = max((late, step) for step, late in enumerate(late_s, start=1))
        behind = [step for step, late in enumerate(late_s, start=1) if late > 0.0]
        cost_s = sum(max(0.0, mine - plain) for mine, plain in zip(steps_s[:decided], plain_s, strict=False))
        return cls(cost_s, lag_s, step, max(behind, default=0) + 1, median(plain_s))


def behind_curve(both: Both, courses: Sequence[Course]) -> Check:
    """gradwire may be behind plain DDP's curve by no more than choosing costs, and then not at all.

    A curve is made of steps: less than one is no lag. Once the recipe is decided, its loss must be the lower
    one at equal time.
    """
    claim = "time behind plain DDP's curve"
    cost = Choosing.of(courses, both.warmup)
    shares = [
        share
        for mine, losses, mine_s, other, other_s in zip(
            both.wire.courses,
            both.wire.losses(),
            both.wire.times_s,
            both.ddp.losses(),
            both.ddp.times_s,
            strict=False,
        )
        if (share := ahead((losses, mine_s), (other, other_s), mine.settled_after)) is not None
    ]
    until = f"then below it for at least {LEAST_AHEAD * 100:.0f} % of the time"
    if cost is None or not shares:
        return Check(claim, "not measured", f"no more than choosing takes; {until}", None)
    wanted = f"at most the {cost.cost_s:.1f} s that choosing takes, and a step; {until}"
    found = f"{cost.lag_s:.1f} s at most, in step {cost.step}" if cost.lag_s > 0.0 else "none"
    found += f"; after the choice below it for {band(shares, '{:.0%}'.format, '')}".replace("%", " %")
    over_s, missing = cost.lag_s - cost.cost_s - cost.step_s, 1.0 - fmean(shares)
    if over_s > 0.0:
        worse = f"behind by {cost.lag_s:.1f} s in step {cost.step}, where choosing takes {cost.cost_s:.1f} s"
        said = "it falls behind by more than choosing takes"
        return Check(claim, found, wanted, False, worse, said)
    if missing > 1.0 - LEAST_AHEAD:
        worse = f"behind at equal time for {missing * 100:.0f} % of the time after the choice"
        return Check(claim, found, wanted, False, worse, "it is behind at equal time after its choice")
    return Check(claim, found, wanted, True)


def quality(both: Both, metric: Metric) -> Check:
    """gradwire's mean over seeds must not be worse than plain DDP's worst seed, after as many steps."""
    ddp, wire = both.ddp.values(metric), both.wire.values(metric)
    claim = f"{metric.label} after {both.steps} steps, {_seeds(len(wire))}"
    if not ddp or not wire:
        return Check(claim, "not measured", "not worse than plain DDP's worst seed", None)
    worst, bound = (min(ddp), "below") if metric.higher_is_better else (max(ddp), "above")
    wanted = f"not {bound} plain DDP's worst seed, {metric.text(worst)}"
    apart = metric.apart(fmean(wire), fmean(ddp))
    good = _is_within(fmean(wire), ddp, metric)
    worse = "" if good else f"{apart} in {metric.label} after {both.steps} steps"
    found = f"{metric.text(fmean(wire))}, {apart} than {metric.text(fmean(ddp))}".replace(
        "equal than", "equal to"
    )
    return Check(claim, found, wanted, _judged(both, passed=good), worse, f"its {metric.label} is worse")


def _is_within(mean: float, ddp: Sequence[float], metric: Metric) -> bool:
    return mean >= min(ddp) if metric.higher_is_better else mean <= max(ddp)


def _judged(both: Both, *, passed: bool) -> bool | None:
    return passed if both.has_spread else None


def _seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"mean of {count} seeds"


def replicas(courses: Sequence[Course]) -> Check:
    """Every rank of every gradwire run ended with the same bits."""
    compared = [course.replicas_identical for course in courses if course.name == "gradwire"]
    seen = [same for same in compared if same is not None]
    same = all(seen)
    return Check(
        "replicas of gradwire",
        "not compared" if not seen else "bit-identical on all ranks" if same else "DIFFER",
        "bit-identical",
        same if seen else None,
        "" if same else "replicas differ",
        "its replicas differ",
    )


def predicted_bytes(row: dict[str, Any]) -> float | None:
    """Predicted bytes that a rank sends in a counted step: gradients, and DDP's buffers."""
    sent: float | None = row.get("announced_bytes_per_step") or row["wire_bytes_per_step"]
    return None if sent is None else sent + row.get("buffer_bytes_per_step", 0.0)


def counted_bytes(row: dict[str, Any]) -> Check:
    """Check that the interface carried the predicted bytes, with headers.

    Packets are counted, too, including mere acknowledgements.
    """
    payload, counted = predicted_bytes(row), row["interface_bytes_per_step"]
    claim = f"bytes per rank and step, {NAMES[row['kind']]}"
    within = f"within {ANNOUNCED_SHARE * 100:.0f} % of"
    if not payload or counted is None:
        return Check(claim, "not counted", f"{within} the prediction", None)
    packets = row["interface_packets_per_step"]
    expected = payload + HEADER_BYTES * packets
    excess = counted / expected - 1
    wanted = f"{within} {bytes_text(expected)}: {bytes_text(payload)}, and headers of {packets:.0f} packets"
    good = abs(excess) <= ANNOUNCED_SHARE
    worse = "" if good else f"bytes of {NAMES[row['kind']]} off by {excess * 100:+.1f} %"
    return Check(claim, f"{bytes_text(counted)}: {excess * 100:+.1f} %", wanted, good, worse)


def checks(
    courses: Sequence[Course], measured_rows: Sequence[dict[str, Any]], steps: int, warmup: int
) -> list[Check]:
    """Check all claims that the demonstration must meet; failed ones come first.

    Args:
        courses: all runs.
        measured_rows: figures of the settings, as `row` makes them.
        steps: steps of a whole run.
        warmup: steps at the beginning that do not count for medians.
    """
    by_kind = {row["kind"]: row for row in measured_rows}
    both = Both.of(courses, steps, warmup)
    metric = metric_of(courses)
    found = [
        time_to_loss(both),
        time_to_metric(both, metric),
        quality(both, metric),
        behind_curve(both, courses),
        replicas(courses),
        counted_bytes(by_kind["recipe"]),
        counted_bytes(by_kind["peer"]),
    ]
    return sorted(found, key=lambda check: check.passed is not False)


Document = dict[str, Any]
NAMES = {"bound": "no communication", "peer": "plain DDP", "recipe": "gradwire"}


def row_of(document: Document, kind: str) -> Document:
    """The bench-like row of `bound`, `peer` or `recipe`."""
    found: Document = next(row for row in document["rows"] if row["kind"] == kind)
    return found


def courses_of(document: Document) -> list[Course]:
    return [Course(**course) for course in document["courses"]]


def both_of(document: Document) -> Both:
    """The seeds of both sides that were trained to the end."""
    settings = document["settings"]
    return Both.of(courses_of(document), settings["steps"], settings["warmup"])


def checks_of(document: Document) -> list[Document]:
    """The claims as the document's own numbers tell them."""
    steps, warmup = (document["settings"][key] for key in ("steps", "warmup"))
    found = checks(courses_of(document), document["rows"], steps, warmup)
    return [check.as_dict() for check in found]


def headline(document: Document) -> str:
    """One sentence: the share of plain DDP's time to its final loss, and any disadvantage for users."""
    both = both_of(document)
    target = both.target()
    mine_s, ddp_s = (
        None if target is None else runs.mean_reached_s(target) for runs in (both.wire, both.ddp)
    )
    if mine_s is not None and ddp_s is not None:
        text = f"gradwire reached plain DDP's final loss in {mine_s / ddp_s:.2f} of the time"
    elif target is None or not both.wire.courses:
        text = f"gradwire on {document['settings']['workload']}: the run did not finish"
    else:
        text = f"gradwire did not reach plain DDP's final loss in {both.steps} steps"
    missed = []
    if target is not None and mine_s is not None:
        seeds_s = both.wire.reached_s(target)
        if lacking := seeds_s.count(None):
            missed.append(f"{lacking} of {len(seeds_s)} seeds did not reach it")
    missed += [
        check["headline"]
        for check in document["checks"]
        if check["passed"] is False and check.get("headline")
    ]
    return f"{text}, but {' and '.join(missed)}" if missed else text


def projected(document: Document) -> str:
    """Which of plain DDP's times were not measured on the slow link, in sentences; empty if all were.

    The headline rests on them.
    """
    first, *others = [each for each in courses_of(document) if each.name == "ddp"] or [Course("ddp", 0)]
    said = []
    if first.shaped < len(first):
        said.append(
            f"Plain DDP's time is projected: {first.shaped} of its {len(first)} steps ran on the slow link, "
            "and each of the others counts as their median."
        )
    if any(each.shaped < len(each) for each in others):
        said.append("Plain DDP ran on the slow link with seed 0 alone; its other seeds have those times.")
    return " ".join(said)


def lead(document: Document) -> str:
    """A phrase that names model, workers, data and link."""
    settings = document["settings"]
    facts = settings["workload_facts"]
    size = f"{(facts.get('parameters') or 0) / 1e6:.2f} M parameters"
    where = f"{settings['workers']} workers on one machine, {size}, {facts.get('data', 'unknown data')}"
    return f"{where}, over {link_text(document)}"


def link_text(document: Document) -> str:
    """`a link of 120 Mbit/s`, with a space in it that does not break."""
    settings = document["settings"]
    rate = settings["rate_bit_per_s"]
    speed = "an unshaped link" if rate is None else f"a link of {rate / 1e6:g}\N{NO-BREAK SPACE}Mbit/s"
    delay = f" with {settings['delay']} delay" if settings["delay"] not in ("", "0", "0s", "0ms") else ""
    return speed + delay


def tiles(document: Document) -> list[tuple[str, str, str]]:
    """(figure, its meaning, a figure to compare with) for each tile."""
    row, ddp, bound = (row_of(document, kind) for kind in ("recipe", "peer", "bound"))
    both, metric = both_of(document), metric_of(courses_of(document))
    sides = both.wire, both.ddp
    to_loss = [to_loss_text(runs, both.target()) for runs in sides]
    finals = [band(runs.values(metric), metric.number, metric.unit) for runs in sides]
    to_loss_mean, *lacking = _without_range(to_loss[0]).split("; ")
    reached = "".join(f" ({text})" for text in lacking)
    steps = f"plain DDP: {seconds_text(ddp['step_s'])}; no communication: {seconds_text(bound['step_s'])}"
    return [
        (
            to_loss_mean,
            f"to plain DDP's final training loss{reached}",
            f"plain DDP: {to_loss[1]}" + (", projected" if projected(document) else ""),
        ),
        (seconds_text(row["step_s"]), "per step, in the median", steps),
        (_without_range(finals[0]), f"{metric.label} after {both.steps} steps", f"plain DDP: {finals[1]}"),
        (
            bytes_text(predicted_bytes(row)),
            "sent per rank and step, as predicted",
            f"plain DDP: {bytes_text(predicted_bytes(ddp))}",
        ),
    ]


def _without_range(text: str) -> str:
    return re.sub(r" \(.*\)", "", text)


def to_loss_text(runs: Runs, target: float | None) -> str:
    """Seconds until the mean over seeds was at a loss, the range of seeds, and how many never were."""
    if target is None or not runs.courses:
        return "-"
    mean_s, times_s = runs.mean_reached_s(target), runs.reached_s(target)
    if mean_s is None:
        return "not reached"
    known = [f"{second:.1f}" for second in sorted(second for second in times_s if second is not None)]
    spread = f" ({known[0]} to {known[-1]})" if known and known[0] != known[-1] else ""
    lacking = len(times_s) - len(known)
    return f"{mean_s:.1f}{spread} s" + (f"; not by {lacking} of {len(times_s)} seeds" if lacking else "")


def final_figures(document: Document) -> Document:
    """By seed after all steps: {"heads", "lines"} as texts; differences have their sign."""
    both = both_of(document)
    metrics = (metric_of(courses_of(document)), LOSS)
    heads = ["seed"]
    for metric in metrics:
        heads += [f"plain DDP: {metric.label}", "gradwire", "difference"]
    sides = [{course.seed: course for course in runs.courses} for runs in (both.ddp, both.wire)]
    lines = []
    for seed in sorted(set(sides[0]) | set(sides[1])):
        values = [[metric.of(side[seed]) if seed in side else None for side in sides] for metric in metrics]
        lines.append(_figures_line(str(seed), metrics, values))
    means = [[_mean(runs.values(metric)) for runs in (both.ddp, both.wire)] for metric in metrics]
    return {"heads": heads, "lines": [*lines, _figures_line("mean", metrics, means)]}


def _figures_line(
    name: str, metrics: Sequence[Metric], values: Sequence[Sequence[float | None]]
) -> tuple[str, ...]:
    cells = [name]
    for metric, (ddp, wire) in zip(metrics, values, strict=True):
        cells += [metric.text(ddp), metric.text(wire)]
        if ddp is None or wire is None:
            cells.append("-")
        else:
            size, sign = metric.gap(wire, ddp)
            cells.append(sign if sign == "equal" else f"{size} {sign}")
    return tuple(cells)


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def apart(document: Document) -> str:
    """How far the training losses of both are apart in the end, as a sentence; means over seeds."""
    both = both_of(document)
    ddp, wire = _mean(both.ddp.values(LOSS)), _mean(both.wire.values(LOSS))
    if ddp is None or wire is None:
        return ""
    ends = f"After {both.steps} steps gradwire ends at {LOSS.text(wire)}, plain DDP at {LOSS.text(ddp)}"
    return f"{ends}: {LOSS.apart(wire, ddp)}."


def table_lines(document: Document) -> list[tuple[str, ...]]:
    """Name, step, of which waiting, share of no-communication speed, sent and counted bytes, CPU."""
    return [
        (
            NAMES[row["kind"]],
            seconds_text(row["step_s"]),
            seconds_text(row["exposed_comm_s"]),
            ratio_text(row["scaling"], percent=True),
            bytes_text(predicted_bytes(row)),
            bytes_text(row["interface_bytes_per_step"]),
            seconds_text(row["cpu_s"]),
        )
        for row in document["rows"]
    ]

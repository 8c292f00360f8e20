"""Claims of the demonstration, checked against this run, and its result in figures and words."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from gradwire.lab.bench.units import bytes_text, ratio_text, seconds_text
from gradwire.lab.demo.plans import Plan
from gradwire.lab.demo.race import Course, Result

LEAST_SPEEDUP = 2.5
LEAST_SHARE = 0.9
# Ethernet, IP and TCP headers of every packet, acknowledgements among them.
HEADER_BYTES = 14 + 20 + 32
# These headers, and how gloo's peers announce their messages to each other.
OVERHEAD_SHARE = 0.03


@dataclass(frozen=True)
class Check:
    """`passed` is None where this run could not tell."""

    claim: str
    found: str
    wanted: str
    passed: bool | None

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


@dataclass(frozen=True)
class Metric:
    """The figure by which models are compared."""

    key: str
    label: str
    higher_is_better: bool
    percent: bool

    def text(self, value: float | None) -> str:
        """The value with its unit."""
        if value is None:
            return "-"
        return f"{value * 100:.2f} %" if self.percent else f"{value:.4f}"


_METRICS = (
    Metric("test_accuracy", "test accuracy", higher_is_better=True, percent=True),
    Metric("test_loss", "test loss", higher_is_better=False, percent=False),
)


def metric_of(courses: Sequence[Course]) -> Metric:
    """Accuracy where the workload has one, else the loss on held-out data."""
    known = {key for course in courses for key in course.evaluation}
    return next((metric for metric in _METRICS if metric.key in known), _METRICS[-1])


def speed(row: dict[str, Any]) -> list[Check]:
    """Against DDP, and against no communication."""
    speedup = row["speedup_over_ddp"]
    ratio = speedup["ratio"] if speedup else None
    return [
        Check(
            "steps per second against plain DDP",
            ratio_text(ratio),
            f"at least {LEAST_SPEEDUP:g}x",
            None if ratio is None else ratio >= LEAST_SPEEDUP,
        ),
        Check(
            "share of the speed without communication",
            ratio_text(row["scaling"], percent=True),
            f"at least {LEAST_SHARE:.0%}".replace("%", " %"),
            None if row["scaling"] is None else row["scaling"] >= LEAST_SHARE,
        ),
    ]


def beside_free_ddp(row: dict[str, Any], courses: Sequence[Course]) -> Check:
    """gradwire beside ranks that wait for each other over a link that costs them next to nothing."""
    claim = "share of the speed of plain DDP on an unshaped link"
    free = [time for course in courses if course.name == "ddp" for time in course.step_s[course.shaped :]]
    if not free or not row["step_s"]:
        return Check(claim, "not measured", "for comparison", None)
    share = median(free) / row["step_s"]
    return Check(claim, ratio_text(share, percent=True), "for comparison", None)


def quality(courses: Sequence[Course], steps: int) -> Check:
    """gradwire's mean over seeds must not be worse than DDP's worst seed, after the same number of steps."""
    metric = metric_of(courses)
    values = {
        name: [course.evaluation[metric.key] for course in courses if complete(course, name, metric, steps)]
        for name in ("ddp", "gradwire")
    }
    claim = f"{metric.label} after {steps} steps, {_seeds(len(values['gradwire']))}"
    if not values["ddp"] or not values["gradwire"]:
        return Check(claim, "not measured", "within DDP's own spread", None)
    mean = fmean(values["gradwire"])
    low, high = min(values["ddp"]), max(values["ddp"])
    good = mean >= low if metric.higher_is_better else mean <= high
    wanted = f"DDP's own spread: {metric.text(low)} to {metric.text(high)}"
    return Check(claim, metric.text(mean), wanted, good if len(values["ddp"]) > 1 else None)


def same_time(at_same_time: dict[str, dict[str, float]], courses: Sequence[Course]) -> Check:
    """gradwire must be ahead when both have trained equally long."""
    metric = metric_of(courses)
    ddp, wire = (at_same_time.get(name, {}).get(metric.key) for name in ("ddp", "gradwire"))
    known = ddp is not None and wire is not None
    ahead = known and (wire > ddp if metric.higher_is_better else wire < ddp)  # type: ignore[operator]
    return Check(
        f"{metric.label} after the same training time",
        metric.text(wire),
        f"better than DDP's {metric.text(ddp)}",
        ahead if known else None,
    )


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
    )


def counted_bytes(row: dict[str, Any]) -> Check:
    """The interface must have carried what the cost model predicts and the buffers that DDP broadcasts.

    A recipe that adapts sends more while it chooses: what is predicted for each step counts.
    """
    predicted = row["announced_bytes_per_step"] or row["wire_bytes_per_step"]
    counted = row["interface_bytes_per_step"]
    claim = f"bytes at the interface, {row['name']}"
    wanted = f"within {OVERHEAD_SHARE * 100:.0f} % of the prediction"
    if not predicted or counted is None:
        return Check(claim, "not counted", wanted, None)
    predicted += row["buffer_bytes_per_step"]
    excess = counted / predicted - 1
    headers = HEADER_BYTES * row["interface_packets_per_step"] / predicted
    found = f"{excess * 100:+.1f} %, of which {headers * 100:.1f} % packet headers"
    return Check(claim, found, wanted, abs(excess) <= OVERHEAD_SHARE)


def checks(plan: Plan, result: Result, measured_rows: list[dict[str, Any]]) -> list[Check]:
    """All claims of a run on which the demonstration insists, in the order of the report."""
    by_kind = {row["kind"]: row for row in measured_rows}
    wire, ddp = by_kind["recipe"], by_kind["peer"]
    return [
        *speed(wire),
        beside_free_ddp(wire, result.courses),
        quality(result.courses, plan.steps),
        same_time(result.at_same_time, result.courses),
        replicas(result.courses),
        counted_bytes(wire),
        counted_bytes(ddp),
    ]


def _seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"mean of {count} seeds"


def complete(course: Course, name: str, metric: Metric, steps: int) -> bool:
    """Whether it is a course of `name` that was trained and evaluated to the end."""
    return course.name == name and len(course) >= steps and metric.key in course.evaluation


Document = dict[str, Any]
_NAMES = {"bound": "no communication", "peer": "plain DDP", "recipe": "gradwire"}


def row_of(document: Document, kind: str) -> Document:
    """The bench-like row of `bound`, `peer` or `recipe`."""
    found: Document = next(row for row in document["rows"] if row["kind"] == kind)
    return found


_MODELS = {"resnet_demo": "A small ResNet", "chargpt": "A small GPT"}


def headline(document: Document) -> str:
    """One sentence."""
    row, settings = row_of(document, "recipe"), document["settings"]
    if row["speedup_over_ddp"] is None:
        return f"gradwire on {settings['workload']}: the run did not finish"
    speedup = ratio_text(row["speedup_over_ddp"]["ratio"])
    name = _MODELS.get(settings["workload"], settings["workload"])
    return f"{name} trains {speedup} as fast as with plain DDP over {link_text(document)}"


def lead(document: Document) -> str:
    """A phrase that names model, workers and data."""
    settings = document["settings"]
    facts = settings["workload_facts"]
    size = f"{(facts.get('parameters') or 0) / 1e6:.2f} M parameters"
    return f"{settings['workers']} workers on one machine, {size}, {facts.get('data', 'unknown data')}"


def link_text(document: Document) -> str:
    """`a link of 120 Mbit/s`, with a space in it that does not break."""
    settings = document["settings"]
    rate = settings["rate_bit_per_s"]
    speed = "an unshaped link" if rate is None else f"a link of {rate / 1e6:g}\N{NO-BREAK SPACE}Mbit/s"
    delay = f" with {settings['delay']} delay" if settings["delay"] not in ("", "0", "0s", "0ms") else ""
    return speed + delay


def tiles(document: Document) -> list[tuple[str, str, str]]:
    """Figure, what it is, and what to compare it with."""
    row, ddp = row_of(document, "recipe"), row_of(document, "peer")
    sent, dense = row["wire_bytes_per_step"], ddp["wire_bytes_per_step"]
    metric = metric_of(_courses(document))
    at = document["at_same_time"]
    after = [metric.text(at.get(name, {}).get(metric.key)) for name in ("gradwire", "ddp")]
    return [
        (seconds_text(row["step_s"]), "per step", f"plain DDP: {seconds_text(ddp['step_s'])}"),
        (
            ratio_text(row["scaling"], percent=True),
            "of the speed without any communication",
            f"plain DDP: {ratio_text(ddp['scaling'], percent=True)}",
        ),
        (after[0], f"{metric.label} after the same training time", f"plain DDP: {after[1]}"),
        (
            bytes_text(sent),
            "sent per rank and step, as predicted",
            f"plain DDP: {bytes_text(dense)}",
        ),
    ]


def final_figures(document: Document) -> Document:
    """Metric by seed after all steps: {"label", "seeds": [(seed, ddp, gradwire)], …} as texts."""
    courses = _courses(document)
    metric = metric_of(courses)
    seeds = sorted({course.seed for course in courses})
    steps = document["settings"]["steps"]
    values = {
        (course.name, course.seed): course.evaluation[metric.key]
        for course in courses
        if complete(course, course.name, metric, steps)
    }
    lines = [
        (str(seed), metric.text(values.get(("ddp", seed))), metric.text(values.get(("gradwire", seed))))
        for seed in seeds
    ]
    known = {
        name: [value for (who, _), value in values.items() if who == name] for name in ("ddp", "gradwire")
    }
    means = [metric.text(sum(some) / len(some) if some else None) for some in known.values()]
    return {"label": metric.label, "lines": [*lines, ("mean", *means)]}


def apart(document: Document) -> str:
    """How far the losses of both are apart in the end, as a sentence; seed 0, means of the last 15 steps."""
    ends = [
        fmean(known[-15:])
        for course in document["courses"]
        if course["seed"] == 0 and (known := [loss for loss in course["losses"] if loss is not None])
    ]
    if len(ends) != 2:
        return ""
    return f"In the end the two curves are {abs(ends[0] - ends[1]):.2g} apart, at a loss of {ends[0]:.2g}."


def table_lines(document: Document) -> list[tuple[str, ...]]:
    """Name, step, of which waiting, share of no-communication speed, sent and counted bytes, CPU."""
    return [
        (
            _NAMES[row["kind"]],
            seconds_text(row["step_s"]),
            seconds_text(row["exposed_comm_s"]),
            ratio_text(row["scaling"], percent=True),
            bytes_text(row["wire_bytes_per_step"]),
            bytes_text(row["interface_bytes_per_step"]),
            seconds_text(row["cpu_s"]),
        )
        for row in document["rows"]
    ]


def _courses(document: Document) -> list[Course]:
    return [Course(**course) for course in document["courses"]]

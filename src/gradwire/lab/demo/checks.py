"""What the demonstration claims, and whether this run bears it out."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from gradwire.lab.bench.units import ratio_text
from gradwire.lab.demo.course import Course

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
        """With its unit."""
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
    """What ranks that wait for each other reach on this machine when the link costs them next to nothing."""
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
    """The interface must have carried what the cost model predicts and the buffers that DDP broadcasts."""
    predicted, counted = row["wire_bytes_per_step"], row["interface_bytes_per_step"]
    claim = f"bytes at the interface, {row['name']}"
    wanted = f"within {OVERHEAD_SHARE * 100:.0f} % of the prediction"
    if not predicted or counted is None:
        return Check(claim, "not counted", wanted, None)
    predicted += row["buffer_bytes_per_step"]
    excess = counted / predicted - 1
    headers = HEADER_BYTES * row["interface_packets_per_step"] / predicted
    found = f"{excess * 100:+.1f} %, of which {headers * 100:.1f} % packet headers"
    return Check(claim, found, wanted, abs(excess) <= OVERHEAD_SHARE)


def _seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"mean of {count} seeds"


def complete(course: Course, name: str, metric: Metric, steps: int) -> bool:
    """Whether it is a course of `name` that was trained and evaluated to the end."""
    return course.name == name and len(course) >= steps and metric.key in course.evaluation

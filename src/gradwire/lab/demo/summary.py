"""The demonstration's result in a few words and figures, for terminal and page alike."""

from typing import Any

from gradwire.lab.bench.units import bytes_text, ratio_text, seconds_text
from gradwire.lab.demo.checks import complete, metric_of
from gradwire.lab.demo.course import Course

Document = dict[str, Any]
_NAMES = {"bound": "no communication", "peer": "plain DDP", "recipe": "gradwire"}


def row_of(document: Document, kind: str) -> Document:
    """The bench-like row of `bound`, `peer` or `recipe`."""
    found: Document = next(row for row in document["rows"] if row["kind"] == kind)
    return found


def headline(document: Document) -> str:
    """One sentence."""
    row, settings = row_of(document, "recipe"), document["settings"]
    if row["speedup_over_ddp"] is None:
        return f"gradwire on {settings['workload']}: the run did not finish"
    speedup = ratio_text(row["speedup_over_ddp"]["ratio"])
    return f"{settings['workload']} trains {speedup} as fast as with plain DDP over {link_text(document)}"


def lead(document: Document) -> str:
    """What was trained, in a phrase."""
    settings = document["settings"]
    facts = settings["workload_facts"]
    size = f"{(facts.get('parameters') or 0) / 1e6:.2f} M parameters"
    return f"{settings['workers']} workers on one machine, {size}, {facts.get('data', 'unknown data')}"


def link_text(document: Document) -> str:
    """`a link of 120 Mbit/s`."""
    settings = document["settings"]
    rate = settings["rate_bit_per_s"]
    speed = "an unshaped link" if rate is None else f"a link of {rate / 1e6:g} Mbit/s"
    delay = f" with {settings['delay']} delay" if settings["delay"] not in ("", "0", "0s", "0ms") else ""
    return speed + delay


def tiles(document: Document) -> list[tuple[str, str, str]]:
    """Figure, what it is, and what to compare it with."""
    row, ddp = row_of(document, "recipe"), row_of(document, "peer")
    speedup = row["speedup_over_ddp"]
    sent, dense = row["wire_bytes_per_step"], ddp["wire_bytes_per_step"]
    metric = metric_of(_courses(document))
    at = document["at_same_time"]
    after = [metric.text(at.get(name, {}).get(metric.key)) for name in ("gradwire", "ddp")]
    return [
        (
            ratio_text(speedup["ratio"] if speedup else None),
            "steps per second against plain DDP",
            f"{seconds_text(row['step_s'])} instead of {seconds_text(ddp['step_s'])} per step",
        ),
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

"""Both contestants and the bound take turns on the slow link, in slices of equal time."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from gradwire.lab.bench.process_set import OnStep
from gradwire.lab.bench.setting import Setting
from gradwire.lab.demo.course import Course
from gradwire.lab.demo.plan import Plan


class Live(Protocol):
    """Whoever shows progress."""

    def say(self, text: str) -> None: ...

    def follow(self, name: str, seed: int, total: int, done: int) -> OnStep: ...


@dataclass
class Contestants:
    """The three process sets."""

    bound: Setting
    ddp: Setting
    gradwire: Setting

    @property
    def alive(self) -> bool:
        """Whether the race can go on."""
        return self.bound.alive and self.ddp.alive and self.gradwire.alive


@dataclass
class Result:
    """Everything that was run; courses in the order in which they began."""

    courses: list[Course] = field(default_factory=list)
    at_same_time: dict[str, dict[str, float]] = field(default_factory=dict)
    timelines: dict[str, list[dict[str, object]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0


def race(contestants: Contestants, plan: Plan, live: Live) -> tuple[Course, Course]:
    """Train on the slow link until gradwire has done all its steps; DDP gets the same time, not steps.

    Returns the courses of DDP and gradwire. Steps after the warm-up count for the medians.
    """
    ddp, wire = Course("ddp", 0), Course("gradwire", 0)
    while len(wire) < plan.steps and contestants.alive:
        counted = len(wire) >= plan.warmup
        # The warm-up ends exactly with a slice, so that no slice is half counted.
        count = min(plan.chunk if counted else plan.warmup - len(wire), plan.steps - len(wire))
        slice_s = _train(contestants.gradwire, wire, count, plan, live, counted)
        affordable = _steps_within(slice_s, ddp) if counted else count
        _train(contestants.ddp, ddp, min(affordable, plan.steps - len(ddp)), plan, live, counted)
        contestants.bound.train(max(2, count // 4), counted=counted)  # it varies least, and time is short
    return ddp, wire


def finish(setting: Setting, course: Course, plan: Plan, live: Live, *, shaped: bool) -> None:
    """Train the steps that a course still lacks, then evaluate and compare its replicas."""
    left = plan.steps - len(course)
    if left > 0:
        on_step = live.follow(course.name, course.seed, plan.steps, len(course))
        course.add(setting.train(left, counted=False, on_step=on_step), shaped=shaped)
    setting.check()
    compared = setting.measured.fingerprints
    course.replicas_identical = len(set(compared)) == 1 if compared else None
    course.evaluation = dict(setting.evaluate())


def median_step_s(course: Course, warmup: int) -> float:
    """Of the steps on the slow link, seconds."""
    return median(course.step_s[warmup : course.shaped] or course.step_s)


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    start = time.monotonic()
    work()
    return time.monotonic() - start


def _train(setting: Setting, course: Course, count: int, plan: Plan, live: Live, counted: bool) -> float:
    """One slice; its length in seconds of training."""
    if count < 1:
        return 0.0
    on_step = live.follow(course.name, course.seed, plan.steps, len(course))
    per_rank = setting.train(count, counted=counted, on_step=on_step)
    before = len(course)
    course.add(per_rank, shaped=True)
    return sum(course.step_s[before:])


def _steps_within(slice_s: float, course: Course) -> int:
    """How many steps of this contestant fit into a slice, at least one.

    Ranks could not agree on a duration without a message; they can on a number.
    """
    recent = course.step_s[-10:]
    return max(1, round(slice_s / median(recent))) if recent else 1

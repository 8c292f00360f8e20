"""Both contestants and the bound take turns on the slow link, in slices of equal time.

A `Course` is what one contestant did with one seed; the `Budget` says what still fits into the time.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import Any, Protocol

from gradwire_lab.bench.measurement import Setting
from gradwire_lab.bench.process_set import OnStep
from gradwire_lab.bench.statistics import StepSample, slowest
from gradwire_lab.demo.plans import DemoPlan

LEAST_COMPILE_S = 0.1
"""Compiling for longer than that shows in a curve."""


@dataclass
class Course:
    """Step by step; `shaped` of the first steps ran on the slow link, the rest on an unshaped one.

    Steps count for figures per step after the first `uncounted` ones. After `settled_after` steps the recipe
    was decided for good. `compiled` are the steps, from 0, in which
    kernels were compiled, with the seconds; `recipe` is what ran in the end.
    """

    name: str
    seed: int
    losses: list[float | None] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    shaped: int = 0
    evaluation: dict[str, float] = field(default_factory=dict)
    replicas_identical: bool | None = None
    uncounted: int = 0
    settled_after: int = 0
    compiled: list[tuple[int, float]] = field(default_factory=list)
    recipe: str | None = None

    def add(self, per_rank: list[list[StepSample]], *, shaped: bool) -> None:
        """Append the steps of one slice; the loss is the mean over ranks."""
        if not per_rank:
            return
        self.step_s += slowest(per_rank)
        for samples in zip(*per_rank, strict=True):
            values = [sample.loss for sample in samples if sample.loss is not None]
            self.losses.append(fmean(values) if values else None)
            compile_s = max(sample.compile_s for sample in samples)
            if compile_s > LEAST_COMPILE_S:
                self.compiled.append((len(self.losses) - 1, compile_s))
            if not all(sample.settled for sample in samples):
                self.settled_after = len(self.losses)
        if shaped:
            self.shaped = len(self.step_s)

    @property
    def chosen(self) -> str:
        """The name of what ran in the end, without its options."""
        return (self.recipe or "").partition("(")[0]

    def __len__(self) -> int:
        return len(self.step_s)

    def as_dict(self) -> dict[str, Any]:
        """The course as a dictionary of plain JSON types."""
        return asdict(self)


class Live(Protocol):
    """Shows progress."""

    def say(self, text: str) -> None: ...

    def follow(self, name: str, seed: int, total: int, *, shaped: bool) -> OnStep: ...


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
    timelines: dict[str, list[dict[str, object]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    compile_s: float = 0.0
    seconds: float = 0.0


def race(contestants: Contestants, plan: DemoPlan, live: Live) -> tuple[Course, Course]:
    """Train on the slow link until gradwire has done all its steps; DDP gets the same time, not steps.

    `plan` has the number of steps, and `live` shows progress. Returns the courses of DDP and gradwire. Steps
    count for the medians after the warm-up, and once the recipe is decided; if it is not by half of the
    steps, from there on.
    """
    ddp, wire = Course("ddp", 0), Course("gradwire", 0)
    while len(wire) < plan.steps and contestants.alive:
        warm = len(wire) >= plan.warmup
        counted = warm and (contestants.gradwire.settled or 2 * len(wire) >= plan.steps)
        # The warm-up ends exactly with a slice, so that no slice is half counted.
        count = min(plan.chunk if warm else plan.warmup - len(wire), plan.steps - len(wire))
        slice_s = _train(contestants.gradwire, wire, count, plan, live, counted)
        affordable = _steps_within(slice_s, ddp) if warm else count
        _train(contestants.ddp, ddp, min(affordable, plan.steps - len(ddp)), plan, live, counted)
        contestants.bound.train(max(2, count // 4), counted=counted)  # it varies least, and time is short
    return ddp, wire


def finish(setting: Setting, course: Course, plan: DemoPlan, live: Live, *, shaped: bool) -> None:
    """Train the steps of `plan` that `course` still lacks, then evaluate and compare the replicas of
    `setting`. `shaped` says whether the link is the slow one; `live` shows progress.
    """
    left = plan.steps - len(course)
    if left > 0:
        on_step = live.follow(course.name, course.seed, plan.steps, shaped=shaped)
        course.add(setting.train(left, counted=False, on_step=on_step), shaped=shaped)
    setting.check()
    compared = setting.measured.fingerprints
    course.replicas_identical = len(set(compared)) == 1 if compared else None
    course.evaluation = dict(setting.evaluate())
    course.recipe = (setting.measured.report or {}).get("recipe")


def _train(setting: Setting, course: Course, count: int, plan: DemoPlan, live: Live, counted: bool) -> float:
    """Train one slice of `count` steps, and add it to `course`. Returns its length in seconds of training.
    Steps that are not `counted` do not enter the figures.
    """
    if count < 1:
        return 0.0
    on_step = live.follow(course.name, course.seed, plan.steps, shaped=True)
    per_rank = setting.train(count, counted=counted, on_step=on_step)
    before = len(course)
    course.add(per_rank, shaped=True)
    if not counted:
        course.uncounted = len(course)
    return sum(course.step_s[before:])


def _steps_within(slice_s: float, course: Course) -> int:
    """Number of this contestant's steps that fit into a slice, at least one.

    Ranks can agree on a number of steps without a message, but not on a duration.
    """
    recent = course.step_s[-10:]
    return max(1, round(slice_s / median(recent))) if recent else 1


# An unshaped step of DDP or gradwire against one without communication: copies and system calls remain.
_UNSHAPED_FACTOR = 1.2
# Tracing, writing the report.
_CODA_S = 6.0


class Budget:
    """Time that is left of `seconds`; it begins to run when this is made."""

    def __init__(self, seconds: float) -> None:
        self._end_s = time.monotonic() + seconds
        self.evaluation_s = 0.0
        self._seed_s: float | None = None

    @property
    def left_s(self) -> float:
        """Seconds that are left; negative if the budget is overdrawn."""
        return self._end_s - time.monotonic() - _CODA_S

    def fits_on_slow_link(self, plan: DemoPlan, contestants: Contestants, ddp: Course, wire: Course) -> bool:
        """True if DDP can do the rest of its steps at the slow link's pace in the time that is left, with all
        seeds still to come. `ddp` and `wire` are the courses so far.
        """
        slow_s = (plan.steps - len(ddp)) * median(ddp.step_s[plan.warmup :] or ddp.step_s)
        return slow_s + (plan.seeds - 1) * self._expected_seed_s(plan, contestants, wire) < self.left_s

    def fits_another_seed(self, plan: DemoPlan, contestants: Contestants, wire: Course) -> bool:
        """True if another seed fits into the time that is left: DDP with an unshaped link, gradwire on the
        slow one. `wire` is gradwire's course so far.
        """
        known_s = self._seed_s
        expected_s = known_s if known_s is not None else self._expected_seed_s(plan, contestants, wire)
        return expected_s < self.left_s

    @contextmanager
    def timing_a_seed(self) -> Iterator[None]:
        """Learn what a seed of both really takes."""
        start_s = time.monotonic()
        yield
        self._seed_s = time.monotonic() - start_s

    def _expected_seed_s(self, plan: DemoPlan, contestants: Contestants, wire: Course) -> float:
        bound_s = _step_s(contestants.bound)
        return plan.steps * bound_s * _UNSHAPED_FACTOR + sum(wire.step_s) + 2 * self.evaluation_s


def _step_s(setting: Setting) -> float:
    times = slowest(setting.measured.steps())
    return median(times) if times else 0.0

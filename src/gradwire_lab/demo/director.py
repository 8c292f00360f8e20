"""The course of the demonstration: calibrate, race, finish, repeat with other seeds, look inside one step.

Its result is one JSON-able value; table and report read nothing else.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from gradwire.measure.cache import cores
from gradwire.recipes import recipe
from gradwire_lab.bench.measurement import Measured, Setting
from gradwire_lab.bench.process_set import BenchNetwork
from gradwire_lab.bench.rows import rows
from gradwire_lab.bench.runner import machine
from gradwire_lab.bench.settings import BOUND, BenchEntry
from gradwire_lab.demo.findings import checks
from gradwire_lab.demo.plans import AUTO_RATE, DemoPlan, rate_for_ccr
from gradwire_lab.demo.race import Budget, Contestants, Course, Live, Result, finish, race
from gradwire_lab.emulate import EmulatedLink, parse_delay, parse_rate
from gradwire_lab.workloads.catalogue import workload


def document(
    plan: DemoPlan,
    mode: str,
    link: EmulatedLink,
    result: Result,
    measured_rows: list[dict[str, Any]],
    setup: dict[str, Any],
    measured: list[Measured],
) -> dict[str, Any]:
    """The JSON document of a demonstration: settings, machine, rows, courses, timelines, checks and failures.

    Args:
        plan: the demonstration as asked for.
        mode: how the network is emulated: "root", "user" or "backend".
        link: the link, as it was shaped.
        result: outcome of the race.
        measured_rows: rows as in a bench's document.
        setup: what gradwire's workers reported when they were set up.
        measured: measurements of all contestants, with their failures.
    """
    return {
        "settings": {
            **asdict(plan),
            "rate": f"{link}" if plan.rate == AUTO_RATE else plan.rate,
            "rate_bit_per_s": link.rate_bit_per_s,
            "rate_chosen_here": plan.rate == AUTO_RATE,
            "mode": mode,
            "workload_facts": {"parameters": setup.get("parameters"), **(setup.get("workload") or {})},
        },
        "machine": machine(),
        "rows": measured_rows,
        "courses": [course.as_dict() for course in result.courses],
        "timelines": result.timelines,
        "compile_s": result.compile_s,
        "checks": [
            check.as_dict() for check in checks(result.courses, measured_rows, plan.steps, plan.warmup)
        ],
        "notes": result.notes,
        "seconds": result.seconds,
        "failures": [_failure(item) for item in measured if item.failure is not None],
    }


def _failure(item: Measured) -> dict[str, str]:
    assert item.failure is not None
    return {"name": item.entry.name, "reason": item.failure.reason, "detail": item.failure.detail}


_FREE = EmulatedLink(None, 0.0)
BUSY = 1.0
"""Processes that run or wait, per core and in the mean of a minute, above which it is worth a note.

Installing the demonstration keeps one core busy, and stays below.
"""


def check(plan: DemoPlan) -> None:
    """Raise `ValueError`, or `OSError` for data that cannot be read, where something could not be trained."""
    recipe(plan.recipe)
    data = None if plan.data is None else Path(plan.data)
    workload(plan.workload, data=data).batches(0, plan.workers, 0)


class ShapeableNetwork(BenchNetwork, Protocol):
    """A network whose link can change while processes run."""

    mode: str

    def reshape(self, link: EmulatedLink) -> None: ...


MakeSetting = Callable[[BenchEntry], Setting]


class Director:
    """Runs a `DemoPlan` on a network that starts unshaped."""

    def __init__(self, plan: DemoPlan, network: ShapeableNetwork, live: Live) -> None:
        self._plan = plan
        self._network = network
        self._live = live
        self._result = Result()
        self._slow = _FREE

    def run(self, make: MakeSetting | None = None) -> dict[str, Any]:
        """The document that table and report are made of."""
        start_s = time.monotonic()
        self._look_around()
        with self._contestants(make or self._make) as contestants:
            self._budget = Budget(self._plan.budget_s)  # kernels may have taken a minute
            self._calibrate(contestants)
            ddp, wire = race(contestants, self._plan, self._live)
            self._result.courses += [ddp, wire]
            measured_rows = self._after_race(contestants, ddp, wire)
            self._finish_ddp(contestants, ddp, wire)
            self._other_seeds(contestants, wire)
            self._trace(contestants)
            setup = contestants.gradwire.measured.setup
            failures = [item.measured for item in (contestants.bound, contestants.ddp, contestants.gradwire)]
        self._result.seconds = time.monotonic() - start_s
        return document(
            self._plan, self._network.mode, self._slow, self._result, measured_rows, setup, failures
        )

    def _look_around(self) -> None:
        """Note that other programs use the machine: they make times longer, and not all alike."""
        load = os.getloadavg()[0]
        if load > BUSY * cores():
            self._result.notes.append(
                f"Other programs used the machine when the run began: its load was {load:.1f} on {cores()} "
                "cores. Times are those of a busy machine."
            )

    def _make(self, entry: BenchEntry) -> Setting:
        return Setting(entry, self._plan.task, self._network, self._plan.workers, self._plan.timeout_s)

    @contextmanager
    def _contestants(self, make: MakeSetting) -> Iterator[Contestants]:
        """All three process sets, ready with seed 0, kernels compiled; ended on the way out."""
        self._live.say("Starting three sets of workers: no communication, plain DDP, gradwire")
        with ExitStack() as stack:

            def start(entry: BenchEntry) -> Setting:
                setting = make(entry)
                stack.callback(setting.end)
                return setting

            settings = [start(entry) for entry in (BOUND, self._plan.ddp, self._plan.gradwire)]
            for setting in settings:
                if setting is settings[-1]:
                    self._live.say("Setting up gradwire: on a new machine, kernels are compiled for a minute")
                setting.setup(0)
            self._result.compile_s = settings[-1].measured.compile_s
            yield Contestants(*settings)

    def _calibrate(self, contestants: Contestants) -> None:
        """Shape the link: as asked, or so slow that communication takes `TARGET_CCR` backward passes."""
        plan = self._plan
        rate = None if plan.rate == AUTO_RATE else parse_rate(plan.rate)
        if plan.rate == AUTO_RATE:
            # DDP's own backward pass: a rank that waits for peers computes more slowly than the bound.
            steps = contestants.ddp.train(plan.calibration, counted=False)
            contestants.ddp.setup(0)
            if steps:
                # The first steps allocate; communication hides behind the slowest rank's backward pass.
                backward_s = max(median(step.backward_s for step in rank[2:] or rank) for rank in steps)
                numel = contestants.ddp.measured.setup.get("parameters", 0)
                rate = rate_for_ccr(4.0 * numel, plan.workers, backward_s)
                self._live.say(
                    f"Backward takes {backward_s * 1e3:.0f} ms for {4 * numel / 1e6:.1f} MB of gradients: "
                    f"the link becomes {rate / 1e6:g} Mbit/s"
                )
        self._slow = EmulatedLink(rate, parse_delay(plan.delay))
        self._network.reshape(self._slow)

    def _after_race(self, contestants: Contestants, ddp: Course, wire: Course) -> list[dict[str, Any]]:
        """Evaluate gradwire, and DDP if it has done all its steps, after the race in which they made the
        courses `wire` and `ddp`. Returns the rows of figures, which are frozen: later steps are not on the
        slow link.
        """
        self._live.say("gradwire has finished all steps")
        start_s = time.monotonic()
        finish(contestants.gradwire, wire, self._plan, self._live, shaped=True)
        self._budget.evaluation_s = time.monotonic() - start_s
        if len(ddp) >= self._plan.steps:
            finish(contestants.ddp, ddp, self._plan, self._live, shaped=True)
        measured = [item.measured for item in (contestants.bound, contestants.ddp, contestants.gradwire)]
        return list(rows(measured, self._plan.workers)["rows"])

    def _finish_ddp(self, contestants: Contestants, ddp: Course, wire: Course) -> None:
        """Train the steps that are missing in DDP's course `ddp`, on the slow link if there is time. The loss
        over steps does not depend on the link.
        """
        plan, left = self._plan, self._plan.steps - len(ddp)
        if left <= 0 or not contestants.alive:
            return
        self._result.notes.append(
            f"The learning rate decays over {plan.steps} steps: at equal time plain DDP is not as far in "
            "that, which is part of what it lacks then."
        )
        fits = self._budget.fits_on_slow_link(plan, contestants, ddp, wire)
        if not fits:
            self._network.reshape(_FREE)
            self._result.notes.append(
                f"Plain DDP trained {len(ddp)} steps on the slow link while gradwire trained {plan.steps}; "
                f"its other {left} steps ran on an unshaped link, because the loss over steps does not "
                "depend on the link. Their place on the time axis is projected from the median step."
            )
        self._live.say(
            "Plain DDP finishes its steps " + ("on the slow link" if fits else "on an unshaped link")
        )
        finish(contestants.ddp, ddp, plan, self._live, shaped=fits)

    def _other_seeds(self, contestants: Contestants, wire: Course) -> None:
        """Run both contestants with further seeds, equally many, as long as time allows.

        gradwire runs on the slow link, because an adaptive recipe decides by its measurements there. Plain
        DDP's losses do not depend on the link.
        """
        if self._plan.seeds > 1:
            self._result.notes.append(
                "Other seeds: gradwire ran them over the slow link, its choice included. Plain DDP ran them "
                "on an unshaped link, because the loss over steps does not depend on the link; their times "
                "are those of seed 0, step by step."
            )
        for seed in range(1, self._plan.seeds):
            if not contestants.alive:
                break
            if not self._budget.fits_another_seed(self._plan, contestants, wire):
                self._result.notes.append(
                    f"The time budget of {self._plan.budget_s:.0f} s ended before seed {seed}."
                )
                break
            with self._budget.timing_a_seed():
                self._one_more("ddp", contestants.ddp, seed, _FREE)
                self._one_more("gradwire", contestants.gradwire, seed, self._slow)

        wires = [course for course in self._result.courses if course.name == "gradwire" and course.recipe]
        if len({course.chosen for course in wires}) > 1:
            chosen = "; ".join(f"{course.chosen} with seed {course.seed}" for course in wires)
            self._result.notes.append(f"Not all seeds ended with the same recipe: {chosen}.")

    def _one_more(self, name: str, setting: Setting, seed: int, link: EmulatedLink) -> None:
        shaped = link is self._slow
        self._live.say(f"Seed {seed} of {name}, on " + ("the slow link" if shaped else "an unshaped link"))
        self._network.reshape(link)
        course = Course(name, seed)
        self._result.courses.append(course)
        setting.setup(seed)
        finish(setting, course, self._plan, self._live, shaped=shaped)

    def _trace(self, contestants: Contestants) -> None:
        """Record spans of a typical step on the slow link."""
        if not contestants.alive:
            return
        self._live.say("Looking inside one step of each on the slow link")
        self._network.reshape(self._slow)
        for name, setting in (("ddp", contestants.ddp), ("gradwire", contestants.gradwire)):
            self._result.timelines[name] = setting.trace()

"""The course of the demonstration: calibrate, race, finish, repeat with other seeds, look inside one step.

Its result is one JSON-able value; table and report read nothing else.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from gradwire.lab.bench.measuring import Measured, Setting
from gradwire.lab.bench.process_set import Network
from gradwire.lab.bench.rows import rows
from gradwire.lab.bench.runner import machine
from gradwire.lab.bench.settings import BOUND, Entry, parse_entry
from gradwire.lab.demo.findings import checks
from gradwire.lab.demo.plans import AUTO_RATE, Plan, rate_for_ccr
from gradwire.lab.demo.race import Budget, Contestants, Course, Live, Result, finish, race, timed
from gradwire.lab.emulate import Link, parse_delay, parse_rate
from gradwire.lab.workloads.catalogue import workload
from gradwire.recipes import recipe


def document(
    plan: Plan,
    mode: str,
    link: Link,
    result: Result,
    measured_rows: list[dict[str, Any]],
    setup: dict[str, Any],
    measured: list[Measured],
) -> dict[str, Any]:
    """Settings, machine, rows (as in a bench), courses of all runs, timelines, checks, notes, failures."""
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
        "at_same_time": result.at_same_time,
        "timelines": result.timelines,
        "checks": [check.as_dict() for check in checks(plan, result, measured_rows)],
        "notes": result.notes,
        "seconds": result.seconds,
        "failures": [_failure(item) for item in measured if item.failure is not None],
    }


def _failure(item: Measured) -> dict[str, str]:
    assert item.failure is not None
    return {"name": item.entry.name, "reason": item.failure.reason, "detail": item.failure.detail}


_FREE = Link(None, 0.0)


def check(plan: Plan) -> None:
    """Raise `ValueError`, or `OSError` for data that cannot be read, where something could not be trained."""
    recipe(plan.recipe)
    data = None if plan.data is None else Path(plan.data)
    workload(plan.workload, data=data).batches(0, plan.workers, 0)


class ShapeableNetwork(Network, Protocol):
    """A network whose link can change while processes run."""

    mode: str

    def reshape(self, link: Link) -> None: ...


MakeSetting = Callable[[Entry], Setting]


class Director:
    """Runs a `Plan` on a network that starts unshaped."""

    def __init__(self, plan: Plan, network: ShapeableNetwork, live: Live) -> None:
        self._plan = plan
        self._network = network
        self._live = live
        self._result = Result()
        self._budget = Budget(plan.budget_s)
        self._slow = _FREE

    def run(self, make: MakeSetting | None = None) -> dict[str, Any]:
        """The document that table and report are made of."""
        start_s = time.monotonic()
        with self._contestants(make or self._make) as contestants:
            self._calibrate(contestants)
            ddp, wire = race(contestants, self._plan, self._live)
            self._result.courses += [ddp, wire]
            measured_rows = self._after_race(contestants, ddp, wire)
            self._finish_ddp(contestants, ddp)
            self._other_seeds(contestants)
            self._trace(contestants)
            setup = contestants.gradwire.measured.setup
            failures = [item.measured for item in (contestants.bound, contestants.ddp, contestants.gradwire)]
        self._result.seconds = time.monotonic() - start_s
        return document(
            self._plan, self._network.mode, self._slow, self._result, measured_rows, setup, failures
        )

    def _make(self, entry: Entry) -> Setting:
        return Setting(entry, self._plan.task, self._network, self._plan.workers, self._plan.timeout_s)

    @contextmanager
    def _contestants(self, make: MakeSetting) -> Iterator[Contestants]:
        """All three process sets, ready with seed 0; ended on the way out."""
        self._live.say("Starting three sets of workers: no communication, plain DDP, gradwire")
        with ExitStack() as stack:

            def start(entry: Entry) -> Setting:
                setting = make(entry)
                stack.callback(setting.end)
                return setting

            settings = [start(entry) for entry in (BOUND, self._plan.ddp, self._plan.gradwire)]
            for setting in settings:
                setting.setup(0)
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
        self._slow = Link(rate, parse_delay(plan.delay))
        self._network.reshape(self._slow)

    def _after_race(self, contestants: Contestants, ddp: Course, wire: Course) -> list[dict[str, Any]]:
        """Compare both after the same time, and freeze the figures measured on the slow link."""
        self._live.say("gradwire has finished; evaluating both after the same training time")
        completed = contestants.alive
        finish(contestants.gradwire, wire, self._plan, self._live, shaped=True)
        contestants.ddp.check()
        self._budget.evaluation_s = timed(contestants.ddp.evaluate)
        reached = dict(contestants.ddp.measured.evaluation)
        if completed:
            self._result.at_same_time = {"ddp": reached, "gradwire": dict(wire.evaluation)}
        if len(ddp) >= self._plan.steps:
            ddp.evaluation = reached
        measured = [item.measured for item in (contestants.bound, contestants.ddp, contestants.gradwire)]
        return list(rows(measured, self._plan.workers)["rows"])

    def _finish_ddp(self, contestants: Contestants, ddp: Course) -> None:
        """The steps that DDP did not manage in time; its loss over steps does not depend on the link."""
        plan, left = self._plan, self._plan.steps - len(ddp)
        if left <= 0 or not contestants.alive:
            return
        self._result.notes.append(
            f"The learning rate decays over {plan.steps} steps: after the same training time plain DDP is "
            "still in the middle of that, which is part of what it lacks in accuracy by then."
        )
        fits = self._budget.fits_on_slow_link(plan, contestants, ddp)
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

    def _other_seeds(self, contestants: Contestants) -> None:
        """The spread of DDP over seeds, then of gradwire, as far as there is time.

        Unshaped: with a fixed recipe the link changes no number.
        """
        recipe = _settled_recipe(contestants.gradwire, self._plan)
        runs = [("ddp", contestants.ddp, None), ("gradwire", contestants.gradwire, recipe)]
        if self._plan.seeds > 1:
            self._result.notes.append(
                f"Seeds 1 and up ran on an unshaped link, gradwire with the recipe it had chosen: "
                f"{recipe.name}."
            )
        for name, setting, entry in runs:
            for seed in range(1, self._plan.seeds):
                if not contestants.alive:
                    return
                if not self._budget.fits_another_seed(self._plan, contestants):
                    self._result.notes.append(
                        f"The time budget of {self._plan.budget_s:.0f} s ended before seed {seed} of {name}."
                    )
                    return
                self._one_more(name, setting, entry, seed)

    def _one_more(self, name: str, setting: Setting, entry: Entry | None, seed: int) -> None:
        self._live.say(f"Seed {seed} of {name} on an unshaped link, for the spread of final figures")
        self._network.reshape(_FREE)
        course = Course(name, seed)
        self._result.courses.append(course)
        with self._budget.timing_a_seed():
            setting.setup(seed, entry)
            finish(setting, course, self._plan, self._live, shaped=False)

    def _trace(self, contestants: Contestants) -> None:
        """Record spans of one step on the slow link."""
        if not contestants.alive:
            return
        self._live.say("Looking inside one step of each on the slow link")
        self._network.reshape(self._slow)
        for name, setting in (("ddp", contestants.ddp), ("gradwire", contestants.gradwire)):
            self._result.timelines[name] = setting.trace(4)


def _settled_recipe(setting: Setting, plan: Plan) -> Entry:
    """The recipe that an adaptive one has chosen, as an entry of its own."""
    report = setting.measured.report or {}
    text = report.get("recipe") if report.get("settled", True) else None
    return parse_entry(text or plan.recipe, "recipe")

"""Time that is left, and what fits into it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from gradwire.lab.bench.setting import Setting
from gradwire.lab.bench.statistics import slowest
from gradwire.lab.demo.course import Course
from gradwire.lab.demo.plan import Plan
from gradwire.lab.demo.race import Contestants

# An unshaped step of DDP or gradwire against one without communication: copies and system calls remain.
_UNSHAPED_FACTOR = 1.2
# Tracing, writing the report.
_CODA_S = 5.0


class Budget:
    """Starts to run when it is made."""

    def __init__(self, seconds: float) -> None:
        self._end_s = time.monotonic() + seconds
        self.evaluation_s = 0.0
        self._seed_s: float | None = None

    @property
    def left_s(self) -> float:
        """Seconds; negative when overdrawn."""
        return self._end_s - time.monotonic() - _CODA_S

    def fits_on_slow_link(self, plan: Plan, contestants: Contestants, ddp: Course) -> bool:
        """Whether DDP can do its other steps at the slow link's pace, with all seeds still to come."""
        slow_s = (plan.steps - len(ddp)) * median(ddp.step_s[plan.warmup :] or ddp.step_s)
        return slow_s + 2 * (plan.seeds - 1) * self._expected_seed_s(plan, contestants) < self.left_s

    def fits_another_seed(self, plan: Plan, contestants: Contestants) -> bool:
        """Whether one contestant can run once more, unshaped."""
        expected_s = self._seed_s if self._seed_s is not None else self._expected_seed_s(plan, contestants)
        return expected_s < self.left_s

    @contextmanager
    def timing_a_seed(self) -> Iterator[None]:
        """Learn what a seed really takes."""
        start_s = time.monotonic()
        yield
        self._seed_s = time.monotonic() - start_s

    def _expected_seed_s(self, plan: Plan, contestants: Contestants) -> float:
        bound_s = _step_s(contestants.bound)
        return plan.steps * bound_s * _UNSHAPED_FACTOR + self.evaluation_s


def _step_s(setting: Setting) -> float:
    times = slowest(setting.measured.steps())
    return median(times) if times else 0.0

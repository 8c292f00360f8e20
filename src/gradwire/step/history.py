"""Costs of the last steps, for the report."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import fmean, median

from gradwire.kernels.compiler import compiled_s
from gradwire.measure.clock import Span
from gradwire.step.moods import Outcome
from gradwire.step.step import Step

WINDOW = 50


@dataclass
class Cost:
    """Bytes sent per rank, and seconds, of one step."""

    metered_bytes: float
    predicted_bytes: float
    compress_s: float
    backward_s: float
    exposed_comm_s: float
    before_s: float = 0.0
    inside_bytes: float = 0.0
    computing_by_rank_s: tuple[float, ...] = ()

    @property
    def step_s(self) -> float:
        """Seconds from the end of the previous backward pass to the end of this one."""
        return self.before_s + self.backward_s + self.exposed_comm_s


class History:
    """The last 50 steps under the recipe that runs, and the spans of the last one that was timed.

    Three sums are over all steps. `skipped` is how many did not count, `compile_s` the
    seconds of compiling kernels, and `predicted_bytes` the bytes that a rank should have sent.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.started_s = 0.0
        self.skipped = 0
        self.compile_s = 0.0
        self.predicted_bytes = 0.0
        self._recipe = ""
        self._costs: deque[Cost] = deque(maxlen=WINDOW)
        self._is_timed = True
        self._compress_s = 0.0
        """Seconds of encoding and decoding in the last step that was timed."""

    def go_on(self, former: History) -> None:
        """Continue the sums of `former`, whose steps ran among other ranks."""
        self.skipped, self.compile_s = former.skipped, former.compile_s
        self.predicted_bytes = former.predicted_bytes

    def add(self, step: Step) -> None:
        """Note a step; forgets older ones that ran under another recipe."""
        if step.recipe != self._recipe:
            self._recipe = step.recipe
            self._costs.clear()
        self.compile_s += compiled_s() - step.compiled_before_s
        self.predicted_bytes += step.sent.predicted_bytes
        self._is_timed = step.is_timed
        if step.is_timed:
            self._compress_s = step.trace.compress_s
            self.spans, self.started_s = step.trace.spans, step.started_s
            self.spans.append(Span("backward", "", step.started_s, step.come.last_s))
        backward_s = step.come.last_s - step.started_s
        sent, times = step.sent, (self._compress_s, backward_s)
        by_rank = step.computing_by_rank_s
        bytes_ = sent.metered_bytes, sent.predicted_bytes
        self._costs.append(Cost(*bytes_, *times, 0.0, step.before_s, sent.inside_bytes, by_rank))

    def outcome_known(self, step: Step) -> None:
        """Note whether a step counts."""
        self.skipped += step.outcome is Outcome.NOT_FINITE

    def waited(self, start_s: float, stop_s: float) -> None:
        """Note the time in which the end of the last backward pass waited for the status vote."""
        if self._costs:
            self._costs[-1].exposed_comm_s = stop_s - start_s
        if self._is_timed:
            self.spans.append(Span("wait", "", start_s, stop_s))

    def mean(self, field: str) -> float:
        """Mean of a field of `Cost` over the window; 0 before the first step."""
        return fmean(getattr(cost, field) for cost in self._costs) if self._costs else 0.0

    def median(self, field: str) -> float:
        """Median of a field of `Cost` over the window; 0 before the first step."""
        return median(getattr(cost, field) for cost in self._costs) if self._costs else 0.0

    def computing_by_rank_s(self) -> tuple[float, ...]:
        """Median seconds of computing in a step, by rank; empty where no step of the window had a status
        vote.

        What happens now and then, such as a save or an evaluation, does not show in a median.
        """
        rows = [cost.computing_by_rank_s for cost in self._costs if cost.computing_by_rank_s]
        return tuple(map(median, zip(*rows, strict=True)))

    @property
    def last(self) -> Cost | None:
        """The last step; `None` before the first."""
        return self._costs[-1] if self._costs else None

    def timeline(self) -> list[dict[str, object]]:
        """The last step's spans in seconds from the start of its backward pass."""
        return [
            {
                "what": span.what,
                "unit": span.unit,
                "start_s": span.start_s - self.started_s,
                "stop_s": span.stop_s - self.started_s,
            }
            for span in sorted(self.spans, key=lambda span: span.start_s)
        ]

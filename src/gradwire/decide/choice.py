"""Chooses the recipe by how much of the gradient it leaves late, its predicted time, and its trial.

The rule: the mildest of the recipes that are predicted to reach the target; where none does, the fastest.
Only those within the limit of lateness count, and of these none that does not beat dense by more than noise.

How late a recipe leaves the gradient, in steps' worth of it, is assumed so far. So it orders recipes, and is
shown nowhere.

A recipe that has run on trial counts with the time that was measured. What the trials took beyond the
prediction is put down to codecs and calls, which cost more beside a busy computation than alone, and is added
to the other recipes in proportion to theirs (`Standing.load`).

Seconds of a step count from the start of its backward pass, as in `Facts.dense_s`, unless they are called
`step_s`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from gradwire.planning.spread import error_of, noise_of

if TYPE_CHECKING:  # loaded by those who make them
    from gradwire.planning.forecast import Forecast

LEAD = 0.05
"""The share by which one recipe must be faster than another to count as faster. Half the bytes on a link that
is all latency are faster by nothing that could be measured."""

ERRORS = 2.0
"""The standard errors by which a trial must differ from dense."""

CERTAIN = 3.2
"""The standard errors within which a median is taken to lie. A normal one lies outside with a probability of
0.0014: below 1 % in all of the six looks at a trial that may end it early."""

DOUBT = 1.55
"""Times that noise may be what was found: 13 values tell it to 1/√13 of itself, and two such errors count."""

LATE = 0.3
"""The limit of lateness: steps' worth of gradient that may wait. Casts, near-lossless frames and few bits are
within it. What is later loses quality (`docs/choosing.md`)."""

MOST_EXAMINED = 8
"""Recipes whose codec and fidelity are measured."""


@dataclass(frozen=True)
class Option:
    """One recipe with its prediction, and its time on trial (`None` before).

    It runs as `text`, which differs from `recipe` where it is cut otherwise than it would be by itself.
    `late` is assumed. `fidelity` is the share that it kept of recorded gradients, `None` where nothing was
    measured.
    """

    recipe: str
    text: str
    predicted_s: float
    work_s: float
    """Processor time of codecs and calls in a step (`Forecast.work_s`)."""
    wire_bytes: float
    late: float
    fidelity: float | None = None
    took_s: float | None = None

    @classmethod
    def of(cls, recipe: str, text: str, forecast: Forecast, late: float, fidelity: float | None) -> Option:
        """The option that the cost model predicts."""
        seconds = forecast.step_s() - forecast.backward.before_s
        return cls(recipe, text, seconds, forecast.work_s, forecast.wire_bytes, late, fidelity)


@dataclass(frozen=True)
class Considered:
    """A line of the table that explains a choice.

    Both times are of a whole step; what is predicted is what the cost model said before this recipe ran.
    `share_of_linear` is the speed as a share of that without communication. `measured_step_s` is `None` where
    nothing was tried, and `fidelity` where the recipe did not run on recorded gradients.
    """

    recipe: str
    predicted_step_s: float
    share_of_linear: float
    wire_bytes: float
    fidelity: float | None
    measured_step_s: float | None
    verdict: str
    """"runs", or in a few words why not."""


@dataclass(frozen=True)
class Standing:
    """The options beside dense, which takes `dense_s` as measured, and what is asked of them.

    Those that are `later` than the limit do not run. Their codecs were not measured, and count as nothing. A
    recipe counts as faster than dense from the share `margin` on. A step without communication takes
    `before_s` and `backward_s`. Dense steps vary by `noise`, their relative standard deviation.
    """

    options: tuple[Option, ...]
    before_s: float
    backward_s: float
    dense_s: float
    dense_bytes: float
    dense_predicted_s: float | None = None
    margin: float = LEAD
    target: float = 0.95
    floor: float = 0.5
    noise: float = 0.0
    later: tuple[Option, ...] = ()

    @property
    def load(self) -> float:
        """How much dearer codecs and calls are than predicted, as a share: 0 before the first trial."""
        tried = [each for each in self.options if each.took_s is not None]
        more_s = sum(each.took_s - each.predicted_s for each in tried if each.took_s is not None)
        work_s = sum(each.work_s for each in tried)
        return max(more_s / work_s, 0.0) if work_s > 0.0 else 0.0

    def expected_s(self, option: Option) -> float:
        """The seconds measured on trial; else those predicted, corrected by the trials of other recipes."""
        if option.took_s is not None:
            return option.took_s
        return option.predicted_s + self.load * option.work_s

    def share_of_linear(self, seconds: float) -> float:
        """The speed of a step as a share of that without communication."""
        return (self.before_s + self.backward_s) / max(self.before_s + seconds, 1e-12)

    @property
    def dense_hides(self) -> bool:
        """Whether dense reaches the target."""
        return self.share_of_linear(self.dense_s) >= self.target

    def missed(self, seconds: float) -> str:
        """A clause that says so if a step of `seconds` misses the target by more than `LEAD`; else empty.

        >>> standing = Standing((), 0.0, 1.0, 4.0, 1e6, target=0.9)
        >>> standing.missed(2.0), standing.missed(1.15)
        ('; it missed its target: 50% of linear instead of 90%', '')
        """
        share = self.share_of_linear(seconds)
        if share >= (1.0 - LEAD) * self.target:
            return ""
        return f"; it missed its target: {share:.0%} of linear instead of {self.target:.0%}"

    def beats_dense(self, seconds: float) -> bool:
        """Whether a step of `seconds` is faster than dense by more than noise."""
        return seconds < (1.0 - self.margin) * self.dense_s

    def best(self, *, tried_only: bool = False) -> Option | None:
        """The option that should run; `None` is dense."""
        if self.dense_hides:
            return None
        able = [each for each in self.options if each.fidelity is None or each.fidelity >= self.floor]
        able = [each for each in able if self.beats_dense(self.expected_s(each))]
        able = [each for each in able if each.took_s is not None or not tried_only]
        reaching = [each for each in able if self._reaches(each)]
        if reaching:
            return min(reaching, key=lambda each: (each.late, self.expected_s(each)))
        if not able:
            return None
        least_s = min(map(self.expected_s, able))
        level = [each for each in able if self.expected_s(each) <= (1.0 + LEAD) * least_s]
        return min(level, key=lambda each: (each.late, self.expected_s(each)))

    def offer(self) -> str:
        """A clause on what a higher limit of lateness would gain at best; empty if that is nothing.

        >>> late = Option("covap(interval=2)", "covap(interval=2)", 0.06, 0.0, 1e6, late=0.7)
        >>> Standing((), 0.0, 0.05, 0.1, 4e6, later=(late,)).offer()
        '; auto(late=0.7) may run covap(interval=2): 60 ms at best, and more of the gradient is late'
        """
        best = replace(self, options=self.later).best()
        if best is None:
            return ""
        at_best = f"{(self.before_s + best.predicted_s) * 1e3:.0f} ms at best"
        may_run = f"auto(late={best.late:g}) may run {best.recipe}"
        return f"; {may_run}: {at_best}, and more of the gradient is late"

    def after_trial(self, recipe: str, took_s: float) -> Standing:
        """The standing after `recipe` has run, with steps of `took_s`."""
        tried = [replace(each, took_s=took_s) if each.recipe == recipe else each for each in self.options]
        return replace(self, options=tuple(tried))

    def is_clear(self, recipe: str, took_s: Sequence[float], *, tried_only: bool) -> bool:
        """Whether the same follows wherever the median of such steps may lie, of which some took `took_s`.

        That is at both ends of its confidence interval (`CERTAIN`) and in the middle.
        """
        middle, noise = median(took_s), max(DOUBT * self.noise, noise_of(took_s))
        off = CERTAIN * error_of(noise, 2 * len(took_s))  # of one median, not of a difference of two
        following = [
            self.after_trial(recipe, max(1.0 + each, 0.0) * middle).best(tried_only=tried_only)
            for each in (-off, 0.0, off)
        ]
        return len({None if each is None else each.recipe for each in following}) == 1

    def option(self, recipe: str) -> Option:
        """The one of that text."""
        return next(each for each in self.options if each.recipe == recipe)

    def table(self, running: str) -> tuple[Considered, ...]:
        """The recipes considered, the fastest first, dense among them; `running` is the one that runs."""
        dense = Considered(
            "dense",
            self.before_s + (self.dense_s if self.dense_predicted_s is None else self.dense_predicted_s),
            self.share_of_linear(self.dense_s),
            self.dense_bytes,
            1.0,
            self.before_s + self.dense_s,
            "runs" if running == "dense" else "slower",
        )
        rows = [
            Considered(
                each.recipe,
                self.before_s + (self.expected_s(each) if each.took_s is None else each.predicted_s),
                self.share_of_linear(self.expected_s(each)),
                each.wire_bytes,
                each.fidelity,
                None if each.took_s is None else self.before_s + each.took_s,
                "runs" if each.recipe == running else self.why_not(each, running),
            )
            for each in self.options
        ]
        return tuple(sorted([dense, *rows], key=lambda row: -row.share_of_linear))

    def why_not(self, option: Option, running: str) -> str:
        """Why `option` does not run, in a few words."""
        seconds = self.expected_s(option)
        if self.dense_hides:
            return "dense hides as it is"
        if not self.beats_dense(seconds):
            return "not faster than dense"
        if option.fidelity is not None and option.fidelity < self.floor:
            return f"fidelity below {self.floor:g}"
        if running == "dense":
            return "no trial was faster than dense"
        now = self.option(running)
        if self._reaches(now) and not self._reaches(option):
            return f"misses {self.target:.0%} of linear"
        return "a milder one suffices" if option.late > now.late else "slower"

    def _reaches(self, option: Option) -> bool:
        return self.share_of_linear(self.expected_s(option)) >= self.target


def margin_of(noise: float, steps: int) -> float:
    """The share by which the median of `steps` steps must lie below dense steps, which vary by `noise`.

    >>> margin_of(0.0, 9), round(margin_of(0.12, 9), 3)
    (0.05, 0.141)
    """
    return max(LEAD, ERRORS * error_of(noise, steps))


def shortlist(standing: Standing, families: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The recipes worth examining, by forecasts in which codecs are free; the most promising first.

    A family is one method from mild to strong. Of each that can beat dense at all: the mildest that reaches
    the target, and the next stronger one in case its codec is too dear. Where none reaches it, the first is
    the mildest of those that are as fast as any of the family. Recipes within `LATE` come before all others,
    so that these never crowd them out.
    """
    if standing.dense_hides:
        return ()
    known: Mapping[str, Option] = {each.recipe: each for each in standing.options}
    found: list[Option] = []
    for family in families:
        able = [known[text] for text in family if text in known]
        able = [each for each in able if standing.beats_dense(each.predicted_s)]
        if not able:
            continue
        fit = [standing.share_of_linear(each.predicted_s) >= standing.target for each in able]
        if not any(fit):
            least_s = min(each.predicted_s for each in able)
            fit = [each.predicted_s <= (1.0 + LEAD) * least_s for each in able]
        first = fit.index(True)
        found += able[first : first + 2]

    def promise(each: Option) -> tuple[bool, bool, float]:
        reaches = standing.share_of_linear(each.predicted_s) >= standing.target
        return each.late <= LATE, reaches, -each.late if reaches else -each.predicted_s

    return tuple(each.recipe for each in sorted(found, key=promise, reverse=True)[:MOST_EXAMINED])

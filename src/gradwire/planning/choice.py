"""Choice of the fastest recipe within the limit of lateness, by trials.

The rule: a recipe may run if at most `limit` steps' worth of gradient wait in its memory
(`planning.lateness`). Of these recipes, the mildest one that reaches the target runs. If none reaches it, the
fastest runs; among equals, the milder one. A recipe that is not faster than dense never runs. "Faster" means
by the share `LEAD`, and by `ERRORS` standard errors of the difference of the mean times.

Forecasts order the trials; trials decide. Before its trial, a recipe counts with its predicted time and an
assumed lateness. They decide whether a trial is worth it, and the order: from mild to strong, so that each
recipe answers for its own lateness. After its trial, a recipe counts with its measured numbers.

Seconds of a step count from the start of its backward pass, as in `Facts.dense_s`, unless they are called
`step_s`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from gradwire.planning.change_detection import error_of, middle_of, noise_of

if TYPE_CHECKING:  # loaded by those who make them
    from gradwire.planning.step_time import Forecast

LEAD = 0.05
"""Share by which a recipe must be faster than another one to count as faster. On a link that is all latency,
half the bytes gain nothing measurable."""

ERRORS = 2.0
"""The standard errors by which a time must differ from another."""

CERTAIN = 3.2
"""The standard errors within which a median is taken to lie. A normal one lies outside with a probability of
0.0014: below 1 % in all of the six looks at a trial that may end it early."""

DOUBT = 1.55
"""Factor on the measured noise that allows for its own error: 13 values give it with a relative error of
1/√13, and two such errors count."""

OFF = 0.15
"""The share by which predictions may be off. Recipes within it of the best prediction are worth a trial."""

LATE = 0.15
"""Limit of lateness, in steps' worth of waiting gradient. Up to it, losses stayed within the spread of plain
training over seeds in all trials so far (`docs/recipes.md`). Casts, near-lossless frames and eight bits
are within it; four bits are about at it."""

ALIKE = 0.01
"""Share by which the bytes of two recipes may differ and still count as equal: padding depends on the
units.
"""

ASKED = (1.0, 4.0, 16.0, 64.0)
"""Limits of lateness that an offer may name."""

ASSUMED_OFF = 1.5
"""Factor, over the limit, up to which an assumed lateness may be wrong. Up to there, a trial has to measure
it."""


@dataclass(frozen=True)
class Option:
    """A recipe with its prediction and, after its trial, its measurements (`None` before).

    Args:
        recipe: the recipe as asked for.
        text: the recipe as it runs; it differs from `recipe` if other boundaries are faster.
        predicted_s: predicted seconds of a step.
        wire_bytes: bytes that a step sends.
        assumed: assumed lateness, in steps' worth of gradient.
        took_s: measured seconds of a step; `error_s` is their standard error.
        late: measured lateness, in steps' worth of gradient.
        settled: False if the lateness still rose at the end of the trial.
        calls: collectives of a step.
    """

    recipe: str
    text: str
    predicted_s: float
    wire_bytes: float
    assumed: float
    late: float | None = None
    took_s: float | None = None
    settled: bool = True
    error_s: float = 0.0
    calls: float = 1.0

    @classmethod
    def of(cls, recipe: str, text: str, forecast: Forecast, assumed: float, longer: float = 1.0) -> Option:
        """The option of a recipe as the cost model predicts it.

        Args:
            recipe: name of the recipe.
            text: the recipe with its boundaries, as it would run.
            forecast: its predicted step.
            assumed: the lateness assumed before it is measured, in steps' worth of gradient.
            longer: factor by which predicted times are multiplied.
        """
        seconds = longer * forecast.step_s() - forecast.backward.before_s
        return cls(recipe, text, seconds, forecast.wire_bytes, assumed, calls=forecast.calls)

    @property
    def expected_s(self) -> float:
        """The seconds measured on trial, or else those predicted."""
        return self.predicted_s if self.took_s is None else self.took_s

    @property
    def expected_late(self) -> float:
        """Measured lateness, or the assumed one before the trial. A recipe without memory counts with its
        assumed error, which is not measured.
        """
        return self.late or self.assumed


@dataclass(frozen=True)
class ChoiceRow:
    """A row of the table that explains a choice.

    Both times are of a whole step; the prediction was made before the recipe ran. `share_of_linear` is the
    speed as a share of the speed without communication. `wire_bytes` are bytes that a rank sends in a step.
    `measured_step_s` and `late`, in steps' worth of gradient, are `None` if the recipe did not run.
    """

    recipe: str
    predicted_step_s: float
    share_of_linear: float
    wire_bytes: float
    late: float | None
    measured_step_s: float | None
    verdict: str
    """"runs", or in a few words why not."""


@dataclass(frozen=True)
class Comparison:
    """The options beside dense, and the requirements on them.

    Dense steps take `dense_s`, measured, with the standard error `dense_error_s`; `noise` is the relative
    standard deviation of a step. A step without communication takes `before_s` and `backward_s`. The options
    in `later` exceed the limit of lateness, and are not tried.
    """

    options: tuple[Option, ...]
    before_s: float
    backward_s: float
    dense_s: float
    dense_bytes: float
    dense_predicted_s: float | None = None
    dense_error_s: float = 0.0
    target: float = 0.95
    limit: float = LATE
    noise: float = 0.0
    later: tuple[Option, ...] = ()

    def share_of_linear(self, seconds: float) -> float:
        """The speed of a step as a share of that without communication."""
        return (self.before_s + self.backward_s) / max(self.before_s + seconds, 1e-12)

    @property
    def dense_hides(self) -> bool:
        """True if dense reaches the target."""
        return self.share_of_linear(self.dense_s) >= self.target

    def missed(self, seconds: float) -> str:
        """A clause that says that a step of `seconds` misses the target by more than `LEAD`; empty if it does
        not.

        >>> comparison = Comparison((), 0.0, 1.0, 4.0, 1e6, target=0.9)
        >>> comparison.missed(2.0), comparison.missed(1.15)
        ('; scaling efficiency is 50%, below the target of 90%', '')
        """
        share = self.share_of_linear(seconds)
        if share >= (1.0 - LEAD) * self.target:
            return ""
        return f"; scaling efficiency is {share:.0%}, below the target of {self.target:.0%}"

    def beats_dense(self, option: Option) -> bool:
        """True if the option is faster than dense. After its trial, the difference must also exceed the
        noise.
        """
        off_s = 0.0 if option.took_s is None else math.hypot(option.error_s, self.dense_error_s)
        return is_faster(option.expected_s, self.dense_s, off_s)

    def best(self) -> Option | None:
        """The best of the options tried; `None` stands for dense."""
        return (
            None
            if self.dense_hides
            else self._best_of([each for each in self.options if self._may_stay(each)])
        )

    def foreseen(self) -> Option | None:
        """The option that would run if all were as predicted and assumed; `None` is dense."""
        return None if self.dense_hides else self._best_of(self.options)

    def why_milder(self, chosen: Option) -> str:
        """A clause on why `chosen` is preferred to options that are faster; empty if it is the fastest.

        >>> mild = Option("fp16", "fp16", 1.04, 2e6, assumed=0.001)
        >>> strong = Option("int4", "int4", 1.0, 5e5, assumed=0.1)
        >>> Comparison((mild, strong), 0.0, 1.0, 2.0, 4e6).why_milder(mild)
        '; int4 is faster, and leaves more of the gradient unsent'
        """
        fastest = min(self.options, key=lambda each: each.expected_s)
        if fastest.expected_s >= chosen.expected_s or fastest.expected_late <= chosen.expected_late:
            return ""
        return f"; {fastest.recipe} is faster, and leaves more of the gradient unsent"

    def _may_stay(self, option: Option) -> bool:
        return option.took_s is not None and self._is_within(option) and option.settled

    def _is_within(self, option: Option) -> bool:
        return option.late is None or option.late <= self.limit

    def _best_of(self, options: Sequence[Option]) -> Option | None:
        able = [each for each in options if self.beats_dense(each)]
        if reaching := [each for each in able if self._reaches(each)]:
            return min(reaching, key=lambda each: (each.expected_late, each.expected_s))
        if not able:
            return None
        fastest = min(able, key=lambda each: each.expected_s)
        level = [each for each in able if not _is_faster(fastest, each)]
        return min(level, key=lambda each: (each.expected_late, each.expected_s))

    def next_trial(self) -> Option | None:
        """The option to try next; `None` if no further trial is worth it.

        Candidates: options whose predicted time, allowing for model error, beats the best measured one. They
        must promise to reach the target if that one does not, or to be faster. The mildest candidate comes
        first. If the options tried so far took less than predicted, the predictions of the others are reduced
        by the same factor, because predictions by one model on one link err alike. Communication cannot take
        less than no time.

        Excluded: options assumed to be later than one that was found above the limit, and options that send
        no less than one that was found not to be faster (`_is_outdone`). Of options that send equally many
        bytes, only one is tried at first: another one teaches more.
        """
        share = min(1.0, self._share_taken())
        latest = min((each.assumed for each in self.options if not self._is_within(each)), default=math.inf)
        untried = [
            replace(each, predicted_s=max(share * each.predicted_s, min(each.predicted_s, self.backward_s)))
            for each in self.options
            if each.took_s is None and each.assumed <= latest
        ]
        best = self.best()
        if self.dense_hides or (best is not None and self._reaches(best)):
            return None
        to_beat_s = self.dense_s if best is None else best.expected_s
        able = [
            each
            for each in untried
            if each.predicted_s < (1.0 - LEAD) * to_beat_s and not self._is_outdone(each, best)
        ]
        if not able:
            return None
        reaching = [each for each in able if self._reaches(each)]
        first = reaching or able
        least_s = min(each.predicted_s for each in first)
        worth = [each for each in able if each in reaching or each.predicted_s <= (1.0 + OFF) * least_s]
        new = [each for each in worth if not any(_send_alike(each, tried) for tried in self._tried)]
        return self.option(min(new or worth, key=lambda each: (each.assumed, each.predicted_s)).recipe)

    @property
    def _tried(self) -> list[Option]:
        return [each for each in self.options if each.took_s is not None]

    def _is_outdone(self, option: Option, best: Option | None) -> bool:
        """True if an option that was tried sends no more, in no more collectives, and was not faster than
        `best`, or than dense if there is none.
        """
        return any(
            _sends_no_less(option, tried) and not self._is_ahead(tried, best)
            for tried in self._tried
            if tried is not best
        )

    def _is_ahead(self, tried: Option, best: Option | None) -> bool:
        """True if `tried` is faster than `best`, or than dense if `best` is `None`. An option that exceeds
        the limit of lateness can be faster, and is not the best.
        """
        return self.beats_dense(tried) if best is None else _is_faster(tried, best)

    def _share_taken(self) -> float:
        """Median ratio of measured to predicted time, over the options tried; 1 before the first trial."""
        shares = [each.expected_s / each.predicted_s for each in self._tried]
        return median(shares) if shares else 1.0

    def offer(self) -> str:
        """A clause on the gain of a higher limit of lateness; empty if there is none.

        The limit in it is an argument to pass to `auto`, not a measured lateness.

        >>> late = Option("covap(interval=2)", "covap(interval=2)", 0.06, 1e6, assumed=0.7)
        >>> Comparison((), 0.0, 0.05, 0.1, 4e6, later=(late,)).offer()
        '; auto(late=1) may run covap(interval=2): 60 ms at best, with a larger residual'
        """
        here, best = self.best(), self._best_of(self.later)
        if best is None or (here is not None and best.predicted_s >= (1.0 - LEAD) * here.expected_s):
            return ""
        at_best = f"{(self.before_s + best.predicted_s) * 1e3:.0f} ms at best"
        asked = next(limit for limit in ASKED if limit >= best.assumed)
        may_run = f"auto(late={asked:g}) may run {best.recipe}"
        return f"; {may_run}: {at_best}, with a larger residual"

    def after_trial(
        self, recipe: str, took_s: float, late: float | None, *, settled: bool = True, error_s: float = 0.0
    ) -> Comparison:
        """The comparison after a trial.

        Args:
            recipe: the recipe that has run.
            took_s: seconds of its step.
            late: its lateness, in steps' worth of gradient; `None` if unknown.
            settled: False if the lateness still rose at the end of the trial.
            error_s: standard error of `took_s`.
        """
        tried = [
            replace(each, took_s=took_s, late=late, settled=settled, error_s=error_s)
            if each.recipe == recipe
            else each
            for each in self.options
        ]
        return replace(self, options=tuple(tried))

    def is_clear(self, recipe: str, took_s: Sequence[float], late: float | None) -> bool:
        """True if more steps of a trial would hardly change the decision.

        Args:
            recipe: the recipe on trial.
            took_s: seconds of its steps so far.
            late: its lateness so far, in steps' worth of gradient.

        Compares the decisions at three values of the median: both ends of its confidence interval
        (`CERTAIN`), taken as exact, and its present estimate.
        """
        middle, error_s = middle_of(took_s)
        off = CERTAIN * error_of(max(DOUBT * self.noise, noise_of(took_s)), len(took_s))
        cases = ((max(1.0 - off, 0.0) * middle, 0.0), (middle, error_s), ((1.0 + off) * middle, 0.0))
        after = [self.after_trial(recipe, took, late, error_s=error) for took, error in cases]
        following = [(each.next_trial(), each.best()) for each in after]
        return len({tuple(each and each.recipe for each in both) for both in following}) == 1

    def option(self, recipe: str) -> Option:
        return next(each for each in self.options if each.recipe == recipe)

    def table(self, running: str) -> tuple[ChoiceRow, ...]:
        """Rows of all recipes considered, dense among them, the fastest first. `running` is the text of the
        present one.
        """
        dense = ChoiceRow(
            "dense",
            self.before_s + (self.dense_s if self.dense_predicted_s is None else self.dense_predicted_s),
            self.share_of_linear(self.dense_s),
            self.dense_bytes,
            0.0,
            self.before_s + self.dense_s,
            "runs" if running == "dense" else "slower",
        )
        rows = [
            ChoiceRow(
                each.recipe,
                self.before_s + each.predicted_s,
                self.share_of_linear(each.expected_s),
                each.wire_bytes,
                each.late,
                None if each.took_s is None else self.before_s + each.took_s,
                "runs" if each.recipe == running else self.why_not(each, running),
            )
            for each in self.options
        ]
        return tuple(sorted([dense, *rows], key=lambda row: -row.share_of_linear))

    def why_not(self, option: Option, running: str) -> str:
        """Why `option` does not run, in a few words."""
        if self.dense_hides:
            return "dense hides as it is"
        if not self._is_within(option):
            return f"residual ratio above {self.limit:g}"
        if not option.settled:
            return "its residual still grew"
        if not self.beats_dense(option):
            return "not faster than dense"
        if option.took_s is None:
            return "not worth a trial"
        now = None if running == "dense" else self.option(running)
        if now is not None and self._reaches(now):
            return (
                f"misses the target of {self.target:.0%}"
                if not self._reaches(option)
                else "a milder one suffices"
            )
        level = now is not None and not _is_faster(now, option)
        return "no faster, larger residual" if level else "slower"

    def _reaches(self, option: Option) -> bool:
        return self.share_of_linear(option.expected_s) >= self.target


def is_faster(seconds: float, than_s: float, off_s: float = 0.0) -> bool:
    """True if a step of `seconds` is faster than one of `than_s`: by the share `LEAD`, and by more than
    `off_s`, the standard error of the difference, explains.

    >>> is_faster(0.094, 0.1), is_faster(0.096, 0.1), is_faster(0.094, 0.1, off_s=0.004)
    (True, False, False)
    """
    return seconds < than_s - max(LEAD * than_s, ERRORS * off_s)


def _is_faster(one: Option, than: Option) -> bool:
    """True if the expected time of `one` is below that of `than` by more than the errors of both."""
    return is_faster(one.expected_s, than.expected_s, math.hypot(one.error_s, than.error_s))


def _sends_no_less(one: Option, than: Option) -> bool:
    """True if `one` sends at least as many bytes as `than`, in at least as many collectives."""
    return one.wire_bytes >= (1.0 - ALIKE) * than.wire_bytes and one.calls >= than.calls


def _send_alike(one: Option, other: Option) -> bool:
    return math.isclose(one.wire_bytes, other.wire_bytes, rel_tol=ALIKE)

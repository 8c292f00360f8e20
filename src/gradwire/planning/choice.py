"""Chooses the fastest recipe of those that leave little of the gradient late, by their trials.

The rule: a recipe may run if it leaves at most `limit` steps' worth of gradient waiting (`lateness`).
Of those, the mildest that reaches the target runs; where none does, the fastest, and among equals the milder.
None runs that is not faster than dense. A recipe is faster than another by the share `LEAD`, and by `ERRORS`
standard errors of the difference of their times, as each one's own steps tell it.

Trials decide, and forecasts order them. Before its trial a recipe counts with its predicted time and an
assumed lateness, which say whether a trial is worth it and in which order: from mild to strong, so that each
answers for its own lateness. After its trial it counts with what was measured.

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
"""The share by which one recipe must be faster than another to count as faster. Half the bytes on a link that
is all latency are faster by nothing that could be measured."""

ERRORS = 2.0
"""The standard errors by which a time must differ from another."""

CERTAIN = 3.2
"""The standard errors within which a median is taken to lie. A normal one lies outside with a probability of
0.0014: below 1 % in all of the six looks at a trial that may end it early."""

DOUBT = 1.55
"""Times that noise may be what was found: 13 values tell it to 1/√13 of itself, and two such errors count."""

OFF = 0.15
"""The share by which predictions may be off. Recipes within it of the best prediction are worth a trial."""

LATE = 0.15
"""The limit of lateness: steps' worth of gradient that may wait. Up to it, losses stayed within the spread of
plain training over seeds in all that was tried (`docs/choosing.md`). Casts, near-lossless frames and eight
bits are within it; four bits are about at it."""

ALIKE = 0.01
"""The share by which the bytes of two recipes may differ that send equally many: cut into other units, a
recipe pads otherwise."""

ASKED = (1.0, 4.0, 16.0, 64.0)
"""Limits of lateness to ask for instead."""

ASSUMED_OFF = 1.5
"""Times the limit up to which an assumed lateness may be wrong, so that a trial has to tell."""


@dataclass(frozen=True)
class Option:
    """One recipe with its prediction, and what its trial has measured (`None` before).

    It runs as `text`, which differs from `recipe` where it is cut otherwise than it would be by itself.
    `assumed` and `late` are its lateness, in steps' worth of gradient. A lateness that still rose at the end
    of the trial is not `settled`. `error_s` is the standard error of `took_s`. A step sends `wire_bytes` in
    `calls` collectives.
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
        """The option that the cost model predicts, where steps take `longer` by that factor than it says."""
        seconds = longer * forecast.step_s() - forecast.backward.before_s
        return cls(recipe, text, seconds, forecast.wire_bytes, assumed, calls=forecast.calls)

    @property
    def expected_s(self) -> float:
        """The seconds measured on trial, or else those predicted."""
        return self.predicted_s if self.took_s is None else self.took_s

    @property
    def expected_late(self) -> float:
        """The lateness measured on trial, or else the one assumed. Where nothing is remembered, the assumed
        error says how mild it is: that is not measured."""
        return self.late or self.assumed


@dataclass(frozen=True)
class ChoiceRow:
    """A line of the table that explains a choice.

    Both times are of a whole step; the predicted one is from before this recipe ran. `share_of_linear` is the
    speed as a share of that without communication. `measured_step_s` and `late`, the steps' worth of gradient
    that waited, are `None` where the recipe did not run.
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
    """The options beside dense, which takes `dense_s` as measured, and what is asked of them.

    Those that are `later` than the limit are not tried. A step without communication takes `before_s` and
    `backward_s`. Dense steps vary by `noise`, their relative standard deviation, and `dense_error_s` is the
    standard error of `dense_s`.
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
        """Whether dense reaches the target."""
        return self.share_of_linear(self.dense_s) >= self.target

    def missed(self, seconds: float) -> str:
        """A clause that says so if a step of `seconds` misses the target by more than `LEAD`; else empty.

        >>> comparison = Comparison((), 0.0, 1.0, 4.0, 1e6, target=0.9)
        >>> comparison.missed(2.0), comparison.missed(1.15)
        ('; it missed its target: 50% of linear instead of 90%', '')
        """
        share = self.share_of_linear(seconds)
        if share >= (1.0 - LEAD) * self.target:
            return ""
        return f"; it missed its target: {share:.0%} of linear instead of {self.target:.0%}"

    def beats_dense(self, option: Option) -> bool:
        """Whether it is faster than dense: by more than noise, once it has run."""
        off_s = 0.0 if option.took_s is None else math.hypot(option.error_s, self.dense_error_s)
        return is_faster(option.expected_s, self.dense_s, off_s)

    def best(self) -> Option | None:
        """The option that should run, of those that have been tried; `None` is dense."""
        return (
            None
            if self.dense_hides
            else self._best_of([each for each in self.options if self._may_stay(each)])
        )

    def foreseen(self) -> Option | None:
        """The option that would run if all were as predicted and assumed; `None` is dense."""
        return None if self.dense_hides else self._best_of(self.options)

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

        Worth it are those whose prediction, which may be off, promises more than the best one so far: to
        reach the target where that does not, or to be faster. The mildest of them comes first. Where those
        that ran took less than was predicted, the others promise as much less: predictions of one model on
        one link err alike. Communication cannot take less than nothing.

        None is tried that is assumed to be later than one found above the limit, or that sends no less than
        one found not to be faster (`_is_outdone`). Of those that send equally many bytes one is tried before
        another: a trial tells more where something else travels.
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
        """Whether one that was tried sends no more, in no more collectives, and was not faster than `best`,
        or dense."""
        return any(
            _sends_no_less(option, tried) and not self._is_ahead(tried, best)
            for tried in self._tried
            if tried is not best
        )

    def _is_ahead(self, tried: Option, best: Option | None) -> bool:
        """Whether it is faster than `best`, which it is where too much of the gradient is late."""
        return self.beats_dense(tried) if best is None else _is_faster(tried, best)

    def _share_taken(self) -> float:
        """The time of those that ran over their predictions, in the median; 1 before any has run."""
        shares = [each.expected_s / each.predicted_s for each in self._tried]
        return median(shares) if shares else 1.0

    def offer(self) -> str:
        """A clause on what a higher limit of lateness would gain at best; empty if that is nothing.

        The limit that it names is one to ask for, and no lateness that was found.

        >>> late = Option("covap(interval=2)", "covap(interval=2)", 0.06, 1e6, assumed=0.7)
        >>> Comparison((), 0.0, 0.05, 0.1, 4e6, later=(late,)).offer()
        '; auto(late=1) may run covap(interval=2): 60 ms at best, and more of the gradient is late'
        """
        here, best = self.best(), self._best_of(self.later)
        if best is None or (here is not None and best.predicted_s >= (1.0 - LEAD) * here.expected_s):
            return ""
        at_best = f"{(self.before_s + best.predicted_s) * 1e3:.0f} ms at best"
        asked = next(limit for limit in ASKED if limit >= best.assumed)
        may_run = f"auto(late={asked:g}) may run {best.recipe}"
        return f"; {may_run}: {at_best}, and more of the gradient is late"

    def after_trial(
        self, recipe: str, took_s: float, late: float | None, *, settled: bool = True, error_s: float = 0.0
    ) -> Comparison:
        """The comparison after `recipe` has run, with steps of `took_s` and this lateness."""
        tried = [
            replace(each, took_s=took_s, late=late, settled=settled, error_s=error_s)
            if each.recipe == recipe
            else each
            for each in self.options
        ]
        return replace(self, options=tuple(tried))

    def is_clear(self, recipe: str, took_s: Sequence[float], late: float | None) -> bool:
        """Whether the same follows wherever the median of such steps may lie, of which some took `took_s`.

        That is at both ends of its confidence interval (`CERTAIN`), if it were known to be there, and in the
        middle, as it is known now.
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
        """The recipes considered, the fastest first, dense among them; `running` is the one that runs."""
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
            return f"more than {self.limit:g} steps late"
        if not option.settled:
            return "its lateness still rose"
        if not self.beats_dense(option):
            return "not faster than dense"
        if option.took_s is None:
            return "not worth a trial"
        now = None if running == "dense" else self.option(running)
        if now is not None and self._reaches(now):
            return (
                f"misses {self.target:.0%} of linear"
                if not self._reaches(option)
                else "a milder one suffices"
            )
        level = now is not None and not _is_faster(now, option)
        return "no faster, and later" if level else "slower"

    def _reaches(self, option: Option) -> bool:
        return self.share_of_linear(option.expected_s) >= self.target


def is_faster(seconds: float, than_s: float, off_s: float = 0.0) -> bool:
    """Whether a step is faster than another: by `LEAD`, and by more than `off_s` explains, the standard error
    of the difference.

    >>> is_faster(0.094, 0.1), is_faster(0.096, 0.1), is_faster(0.094, 0.1, off_s=0.004)
    (True, False, False)
    """
    return seconds < than_s - max(LEAD * than_s, ERRORS * off_s)


def _is_faster(one: Option, than: Option) -> bool:
    """Compare times by what both were measured for: more that only one has is no noise of both."""
    return is_faster(one.expected_s, than.expected_s, math.hypot(one.error_s, than.error_s))


def _sends_no_less(one: Option, than: Option) -> bool:
    """Whether it sends as many bytes or more, in as many collectives or more."""
    return one.wire_bytes >= (1.0 - ALIKE) * than.wire_bytes and one.calls >= than.calls


def _send_alike(one: Option, other: Option) -> bool:
    return math.isclose(one.wire_bytes, other.wire_bytes, rel_tol=ALIKE)

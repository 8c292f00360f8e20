"""Trials: some steps of training under a recipe, which measure its time and its lateness.

Steps of a trial are timed like dense ones, from the start of the backward pass to the status vote on the
slowest rank. A trial ends when more steps would hardly change the decision (`Comparison.is_clear`) and its
lateness is known. If the lateness exceeds the limit, it ends at once. Measurements replace predictions and
assumptions. Status votes carry the numbers, so all ranks judge the same ones in the same step.

Unsent gradient moves from one recipe to the next; before a recipe without memory, it is sent first. The
recipe that stays is watched. If its lateness stays above the limit, a milder one follows. If its link or its
step time changes, everything is measured again. The same holds for dense.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count

from gradwire.planning.change_detection import middle_of
from gradwire.planning.choice import Comparison
from gradwire.planning.facts import StepObservation, Watched
from gradwire.quantities import ms_text
from gradwire.recipes.base import Composition, Judge, Watch
from gradwire.recipes.dense import dense
from gradwire.recipes.parse import short, steady

SKIPPED = 2
"""Steps that are not counted: caches are cold, and DDP rebuilds its buckets in the second."""
COUNTED = 9
"""Steps whose median is compared at most."""
FEWEST = 5
"""Least number of steps in a median: two disturbed steps do not matter, and the spread can be estimated. If
the lateness exceeds the limit, one step is enough."""
MOST_TRIALS = 4
"""Trials at most. Then the best of the tried recipes runs, or dense."""
DECIDED = 80
"""Number of steps, including measured dense ones, after which the best of the recipes tried stays, or
dense.
"""
PATIENCE = 1.25
"""Times the limit above which lateness, a median over many looks, is too much where a recipe stays."""

Again = Callable[[], Composition]

_LOG = logging.getLogger("gradwire")


def on_trial(
    text: str, comparison: Comparison, again: Again, number: int = 1, left: int = DECIDED
) -> Composition:
    """The option `text` of `comparison`, on trial.

    Args:
        text: the text by which the recipe runs.
        comparison: all options, with the results of earlier trials.
        again: makes the composition that decides again.
        number: number of the trial, from 1.
        left: steps for this trial and all following ones.

    A checkpoint saved during the trial contains the text. A run that resumes from it keeps the recipe without
    a trial.
    """
    chosen = steady(comparison.option(text).text, "candidate")
    judge = partial(_judge_of, text, comparison, again, number, left)
    why = f"trial {number}: {said_of(comparison, text)}"
    return replace(chosen, why=why, table=comparison.table(text), watch=Watch(judge, every=1, ends=True))


def said_of(comparison: Comparison, text: str) -> str:
    """A few words on the recipe `text`: the time of its steps, and its residual."""
    option, before_s = comparison.option(text), comparison.before_s
    took = f"{ms_text(before_s + option.expected_s)} a step"
    dense_s, alone_s = before_s + comparison.dense_s, before_s + comparison.backward_s
    beside = f"instead of {ms_text(dense_s)} ({ms_text(alone_s)} without communication)"
    if option.took_s is None:
        return f"{text} is predicted to take {took} {beside}"
    late = "" if option.late is None else f"; residual ratio {option.late:.2g}"
    return f"{text}: {took} {beside}{late}"


def _judge_of(
    text: str, comparison: Comparison, again: Again, number: int, left: int, _watched: Watched
) -> Judge:
    took_s: list[float] = []

    def judge(shown: StepObservation) -> Composition | None:
        if shown.previous_s > 0.0:  # the step before ran this composition
            took_s.append(shown.previous_s)
        counted, after = took_s[SKIPPED:], left - len(took_s) - 1
        late = shown.late
        is_too_late = late is not None and late > comparison.limit
        if len(counted) < (1 if is_too_late else FEWEST):
            return None
        is_over = is_too_late or min(COUNTED - len(counted), after) <= 0
        if not is_over and not (shown.late_is_known and comparison.is_clear(text, counted, late)):
            return None
        middle_s, error_s = middle_of(counted)
        known = comparison.after_trial(text, middle_s, late, settled=shown.late_is_known, error_s=error_s)
        following = known.next_trial()
        if following is None or number == MOST_TRIALS or after < SKIPPED + FEWEST + 1:
            return _settled(text, known, again)
        tried = on_trial(following.recipe, known, again, number + 1, after)
        return replace(tried, why=f"{tried.why}; before it, {said_of(known, text)}")

    return judge


def _settled(text: str, known: Comparison, again: Again) -> Composition:
    """The best of the recipes tried, after `text`, by the options and trials in `known`; dense if none is
    left. `again` makes the next decision.
    """
    best = known.best()
    if best is None:
        # Logged, not warned: the choice is right, and every rank would print the warning.
        _LOG.info("back to dense: %s", said_of(known, text))
        dense_s = known.dense_s
        stays = f"dense stays, {ms_text(known.before_s + dense_s)} a step{known.missed(dense_s)}"
        why = f"{stays}; tried {said_of(known, text)}{known.offer()}"
        chosen = replace(dense(), why=why, table=known.table("dense"))
        return watched(chosen, again, known.limit)
    why = said_of(known, best.recipe) + known.missed(best.expected_s) + known.offer()
    chosen = replace(steady(best.text, "candidate"), why=why, table=known.table(best.recipe))
    return watched(chosen, again, known.limit, partial(_milder, best.recipe, known, again))


def _milder(text: str, known: Comparison, again: Again, late: float) -> Composition:
    """The composition that follows `text`, the running recipe, after its lateness has exceeded the limit: the
    best recipe tried that may still stay, or dense.

    Args:
        text: the running recipe.
        known: the options and trials by which it was chosen.
        again: makes the next decision.
        late: its lateness, in steps' worth of gradient.
    """
    tried = known.option(text)
    following = _settled(text, known.after_trial(text, tried.expected_s, late, error_s=tried.error_s), again)
    return replace(following, why=f"the residual ratio was {late:.2g} under {text}; {following.why}")


def watched(
    chosen: Composition, again: Again, limit: float, milder: Callable[[float], Composition] | None = None
) -> Composition:
    """`chosen`, which stays until link or step time change, or its lateness exceeds `limit`.

    Args:
        again: makes the next decision, after new measurements.
        milder: returns the fallback for a lateness above the limit, in steps' worth of gradient. Without it,
            as in a resumed run, everything is measured again.
    """
    judge = partial(_watching, chosen.text, again, limit, milder)
    return replace(chosen, watch=Watch(judge, every=1))


def _watching(
    text: str,
    again: Again,
    limit: float,
    milder: Callable[[float], Composition] | None,
    watched: Watched,
) -> Judge:
    """Judge of a recipe that stays; it sees every step and returns the next composition, or None.

    - If training suffers (`gradwire.planning.health`), dense follows at once, and stays, in resumed runs too.
    - If the lateness exceeds `PATIENCE` times `limit`, `milder` of this lateness follows at once; without
      `milder`, `again()`.
    - If the link or the step time has changed, `again()` follows, once the recipe has run for the number of
      steps in `Tuning`.

    Args:
        text: the recipe that runs.
        again: makes the composition that measures and decides again.
        limit: largest lateness, in steps' worth of gradient.
        milder: returns the fallback for a lateness above the limit.
        watched: facts about the reducer, with its `Tuning`.
    """
    kept = watched.tuning.kept_dense_steps if text == dense().text else watched.tuning.kept_steps
    steps, changed = count(1), False

    def judge(shown: StepObservation) -> Composition | None:
        nonlocal changed
        if shown.unhealthy:
            why = f"step {shown.step}: {shown.unhealthy} under {short(text)}"
            return replace(dense(), why=why, stays=True)
        if shown.late is not None and shown.late > PATIENCE * limit:
            return again() if milder is None else milder(shown.late)
        changed = changed or shown.link_change is not None or shown.step_change_s is not None
        return again() if next(steps) >= kept and changed else None

    return judge

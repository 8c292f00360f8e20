"""A recipe on trial. It stays if its steps are as fast as predicted; else the next best is tried.

A trial is timed as dense steps were, from the start of the backward pass to the verdict on the slowest rank.
It ends when more steps would hardly change the decision (`Standing.is_clear`). The measured time replaces the
recipe's prediction, and corrects those of the others (`gradwire.decide.choice`). Verdicts carry the times, so
all ranks judge the same numbers in the same step.

Unsent gradient moves along from one recipe to the next; before a recipe without memory, it is sent first. The
recipe that stays is watched, even dense: if its link or its steps change, everything is measured anew.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from statistics import median

from gradwire.decide.choice import Option, Standing
from gradwire.planning.facts import Observed, Watched
from gradwire.recipes.base import Composition, Judge, Watch
from gradwire.recipes.dense import dense
from gradwire.recipes.parse import steady

SKIPPED = 2
"""Steps that are not counted: caches are cold, and DDP rebuilds its buckets in the second."""
COUNTED = 9
"""Steps whose median is compared at most."""
FEWEST = 3
"""Steps whose median is compared at least: one that was disturbed does not count."""
MOST_TRIALS = 3
"""Trials at most. Then the best of the tried recipes runs, or dense."""
DECIDED = 40
"""Steps, with those that measure, after which the best of the tried recipes stays, or dense."""
KEPT = 1000
"""Steps that a recipe stays at least. To decide anew takes some 30 dense steps, each a few times as
long where the network binds: below a tenth of the time, even if nothing has changed."""
KEPT_DENSE = 300
"""The same for dense. To decide anew costs less there: most of the steps that measure are dense as well."""

Again = Callable[[], Composition]

_LOG = logging.getLogger("gradwire")


def on_trial(
    text: str, standing: Standing, again: Again, number: int = 1, left: int = DECIDED
) -> Composition:
    """The option `text` of `standing` as trial `number`, with `left` steps for it and all others.

    `again` makes what decides anew.

    A checkpoint saved during the trial carries the text by which it runs. A run that resumes from it keeps
    the recipe without a trial.
    """
    chosen = steady(standing.option(text).text, "candidate")
    judge = partial(_judge_of, text, standing, again, number, left)
    why = f"trial {number}: {said_of(standing, text)}"
    return replace(chosen, why=why, table=standing.table(text), watch=Watch(judge, every=1, ends=True))


def said_of(standing: Standing, text: str) -> str:
    """A few words on the recipe `text`: its predicted time, and what was measured of it."""
    option = standing.option(text)
    before_s = standing.before_s
    took = "" if option.took_s is None else f", on trial it took {_ms(before_s + option.took_s)}"
    kept = "" if option.fidelity is None else f"; it kept {option.fidelity:.1%} of recorded gradients"
    return (
        f"a step is predicted to take {_ms(before_s + option.predicted_s)}{took}; dense takes "
        f"{_ms(before_s + standing.dense_s)}, without communication it is "
        f"{_ms(before_s + standing.backward_s)}{kept}"
    )


def _judge_of(
    text: str, standing: Standing, again: Again, number: int, left: int, _watched: Watched
) -> Judge:
    took_s: list[float] = []

    def judge(shown: Observed) -> Composition | None:
        if shown.previous_s > 0.0:  # the step before ran this composition
            took_s.append(shown.previous_s)
        counted, after = took_s[SKIPPED:], left - len(took_s) - 1
        if len(counted) < FEWEST:
            return None
        is_last = number == MOST_TRIALS or after < SKIPPED + FEWEST + 1
        if min(COUNTED - len(counted), after) > 0 and not standing.is_clear(
            text, counted, tried_only=is_last
        ):
            return None
        known = standing.after_trial(text, median(counted))
        best = known.best(tried_only=is_last)
        return _after(text, known, best, again, partial(on_trial, number=number + 1, left=after))

    return judge


def _after(
    text: str, known: Standing, best: Option | None, again: Again, trying: Callable[..., Composition]
) -> Composition:
    """The composition after a trial of `text`: `best`, by `trying` if it has not run."""
    if best is None:
        # Not a warning: the choice is as it should be, and every rank would print it.
        _LOG.info("back to dense: %s was tried: %s", text, said_of(known, text))
        why = f"{text} was tried: {said_of(known, text)}{known.missed(known.dense_s)}{known.offer()}"
        return watched(replace(dense(), why=why, table=known.table("dense")), again)
    if best.took_s is None:
        following = trying(best.recipe, known, again)
        return replace(following, why=f"{following.why}; before it {text} was tried")
    why = said_of(known, best.recipe) + known.missed(best.took_s)
    return watched(replace(steady(best.text, "candidate"), why=why, table=known.table(best.recipe)), again)


def watched(chosen: Composition, again: Again) -> Composition:
    """`chosen`, which stays until link or steps have changed. Then `again` makes the next decision."""
    return replace(chosen, watch=Watch(partial(_watching, chosen.text, again), every=1))


def _watching(text: str, again: Again, _watched: Watched) -> Judge:
    """Decides anew once the link or the steps have changed, but not within `KEPT` or `KEPT_DENSE` steps.

    Where training suffers (`gradwire.decide.health`), dense follows at once, and stays.
    """
    kept = KEPT_DENSE if text == dense().text else KEPT
    steps, changed = count(1), False

    def judge(shown: Observed) -> Composition | None:
        nonlocal changed
        if shown.unhealthy:
            return replace(dense(), why=f"step {shown.step}: {shown.unhealthy} under {text}")
        changed = changed or shown.link_change is not None or shown.step_change_s is not None
        return again() if next(steps) >= kept and changed else None

    return judge


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"

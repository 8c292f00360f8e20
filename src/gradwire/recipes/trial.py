"""A recipe on trial: it stays if its steps are as fast as it was chosen for, else the next best is tried.

A trial is timed as dense steps were, from the start of the backward pass to the verdict on the slowest rank.
What it took replaces what was predicted, and corrects what is predicted of the others
(`gradwire.decide.choice`). Verdicts carry the times, so all ranks judge the same numbers in the same step.

What is unsent moves along from one recipe to the next. Before one that remembers nothing, such as dense, a
lane that sends everything delivers it.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median

from gradwire.decide.choice import Standing
from gradwire.memory import UNSENT
from gradwire.planning.facts import Observed, Watched
from gradwire.recipes.base import Composition, Judge, Watch
from gradwire.recipes.dense import dense
from gradwire.recipes.handover import sending_unsent
from gradwire.recipes.parse import steady

SKIPPED = 2
"""Steps that are not counted: caches are cold, and DDP rebuilds its buckets in the second."""
COUNTED = 9
"""Steps whose median is compared."""
MOST_TRIALS = 3
"""After which the best of those that were tried runs, or dense."""

_LOG = logging.getLogger("gradwire")


def on_trial(text: str, standing: Standing, number: int = 1) -> Composition:
    """The recipe `text`, an option of `standing`, as trial `number`.

    A checkpoint saved during the trial carries that text. A run that resumes from it keeps the recipe without
    a trial.
    """
    chosen = steady(text, "candidate")
    judge = partial(_judge_of, chosen, text, standing, number)
    why = f"trial {number}: {said_of(standing, text)}"
    return replace(chosen, why=why, table=standing.table(text), watch=_every_step(judge))


def said_of(standing: Standing, text: str) -> str:
    """What is known of the recipe `text`, in a few words."""
    option = standing.option(text)
    before_s = standing.before_s
    took = "" if option.took_s is None else f", on trial it took {_ms(before_s + option.took_s)}"
    return (
        f"a step is predicted to take {_ms(before_s + option.predicted_s)}{took}; dense takes "
        f"{_ms(before_s + standing.dense_s)}, without communication it is "
        f"{_ms(before_s + standing.backward_s)}; it keeps {option.fidelity:.1%} of the gradient"
    )


def _every_step(judge: Callable[[Watched], Judge]) -> Watch:
    return Watch(judge, every=1, ends=True)


def _judge_of(running: Composition, text: str, standing: Standing, number: int, _watched: Watched) -> Judge:
    took_s: list[float] = []

    def judge(shown: Observed) -> Composition | None:
        if shown.previous_s > 0.0:  # the step before ran this composition
            took_s.append(shown.previous_s)
        if len(took_s) < SKIPPED + COUNTED:
            return None
        return _after(running, text, standing.after_trial(text, median(took_s[SKIPPED:])), number)

    return judge


def _after(running: Composition, text: str, known: Standing, number: int) -> Composition:
    """What follows trial `number`, in which `running` was tried."""
    best = known.best(tried_only=number >= MOST_TRIALS)
    if best is None:
        # Not a warning, which a user may have made an error: it would end the step of every rank.
        _LOG.warning("back to dense: %s was tried: %s", text, said_of(known, text))
        plain = replace(dense(), table=known.table("dense"))
        return handed_over(running, plain, f"{text} was tried: {said_of(known, text)}")
    if best.took_s is None:
        following = on_trial(best.recipe, known, number + 1)
        return handed_over(running, following, f"{following.why}; before it {text} was tried")
    settled = replace(steady(best.recipe, "candidate"), table=known.table(best.recipe))
    return handed_over(running, settled, said_of(known, best.recipe))


def handed_over(running: Composition, following: Composition, why: str) -> Composition:
    """`following` after `running`: at once where what is unsent has a place, else after sending it."""
    following = replace(following, why=why)
    return following if not _remembers(running) or _remembers(following) else sending_unsent(following)


def _remembers(composition: Composition) -> bool:
    memory = composition.exchange.memory
    return memory is not None and UNSENT in memory.planes


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"

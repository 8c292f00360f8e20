"""A composition on trial against dense: it stays if its steps are faster, otherwise dense comes back.

Both are timed from the start of the backward pass to the verdict, on the slowest rank, while communication
overlaps with computation. Verdicts carry the times, so all ranks judge the same numbers in the same step.
Before dense comes back, a lane that sends everything delivers what is unsent: dense has no memory to hold it.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from statistics import median

from gradwire.exchange.compose import remember
from gradwire.exchange.dense import Dense
from gradwire.memory import Residual
from gradwire.planning.facts import Observed, Watched
from gradwire.recipes.base import Composition, Judge, Watch
from gradwire.recipes.dense import dense
from gradwire.recipes.local_every import local_every

SKIPPED = 2
"""Steps that are not counted: caches are cold, and DDP rebuilds its buckets in the second."""
COUNTED = 9
"""Steps whose median is compared with dense."""
AGAIN = 10
"""Steps after which dense is proposed again, where something was still unsent."""

_LOG = logging.getLogger("gradwire")


def on_trial(chosen: Composition, dense_s: float) -> Composition:
    """`chosen`, followed by dense unless its steps take less than `dense_s` (`Facts.dense_s`).

    A checkpoint saved during the trial carries the text of `chosen`. A run that resumes from it keeps
    `chosen` without a trial.

    >>> from gradwire.recipes.int4 import int4
    >>> on_trial(int4(), dense_s=0.088).text == int4().text
    True
    """
    return replace(chosen, watch=_every_step(partial(_judge_of, chosen, dense_s)))


def _every_step(judge: Callable[[Watched], Judge]) -> Watch:
    return Watch(judge, every=1, ends=True)


def _judge_of(chosen: Composition, dense_s: float, _watched: Watched) -> Judge:
    took_s: list[float] = []

    def judge(shown: Observed) -> Composition | None:
        if shown.previous_s > 0.0:  # the step before ran this composition
            took_s.append(shown.previous_s)
        if len(took_s) < SKIPPED + COUNTED:
            return None
        chosen_s = median(took_s[SKIPPED:])
        told = f"on trial it took {chosen_s * 1e3:.0f} ms"
        if chosen_s < dense_s:
            return replace(chosen, why=f"{chosen.why}; {told}")
        # Not a warning, which a user may have made an error: it would end the step of every rank.
        dense_took = f"dense took {dense_s * 1e3:.0f} ms"
        _LOG.warning("back to dense: %s, %s, and %s", chosen.text, told, dense_took)
        return back_to_dense(chosen, f"{chosen.text} was tried: {chosen.why}; {told}, and {dense_took}")

    return judge


def back_to_dense(running: Composition, why: str) -> Composition:
    """What follows `running`: dense, at once where nothing can be unsent, else after sending that."""
    plain = replace(dense(), why=why)
    if running.exchange.memory is None:
        return plain
    # Everything travels in every step, as the text says. Whole: 16-bit types would leave what they round off.
    return replace(
        local_every(interval=1),
        exchange=remember(Dense(), Residual(whole=True)),
        why=f"{why}; sending what is unsent",
        watch=_every_step(partial(_proposing, plain)),
    )


def _proposing(plain: Composition, _watched: Watched) -> Judge:
    """Proposes `plain` after the first step and then every `AGAIN` steps.

    The engine installs it once nothing is unsent. That may take longer, because a parameter whose gradient is
    zero on a rank keeps its memory there.
    """
    steps = count()
    return lambda _shown: plain if next(steps) % AGAIN == 0 else None

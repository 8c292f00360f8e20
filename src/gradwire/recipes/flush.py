"""The composition between two others, if the second has no memory for the unsent gradient of the first."""

from dataclasses import dataclass, replace
from itertools import count

from gradwire.exchange.compose import remember
from gradwire.exchange.dense import Dense
from gradwire.memory import Residual
from gradwire.planning.facts import Watched
from gradwire.recipes.base import Composition, Judge, Watch
from gradwire.recipes.local_every import local_every

AGAIN = 10
"""Steps after which the second is proposed again, where something was still unsent."""


def flushing(following: Composition) -> Composition:
    """A dense composition that sends all unsent gradient, and then proposes `following`.

    One step suffices, unless a parameter's gradient is zero on a rank, which keeps its memory there. A
    checkpoint saved meanwhile resumes with `local_every(interval=1)`, which sends the same, and then with
    `following` if its turn had come.

    >>> from gradwire.recipes.dense import dense
    >>> flushing(dense()).text
    'local_every(interval=1)'
    """
    return replace(
        local_every(interval=1),
        # Whole: 16-bit types would leave their rounding errors.
        exchange=remember(Dense(), Residual(whole=True)),
        why=f"{following.why}; sending what is unsent",
        table=following.table,
        stays=following.stays,
        watch=Watch(_Proposing(following), every=1, ends=True),
    )


@dataclass(frozen=True)
class _Proposing:
    """Proposes `following` after the first step, then every `AGAIN` steps. The reducer waits for all ranks.

    A value type, so that the reducer can compare it with the running one.
    """

    following: Composition

    def __call__(self, _watched: Watched) -> Judge:
        steps = count()
        return lambda _shown: self.following if next(steps) % AGAIN == 0 else None

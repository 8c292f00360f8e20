"""Events of a step: values that say what hooks have seen of gradients and optimizers.

Hooks append events in the order in which they happen, and decide nothing. Readers fold them into a small
state: `step/fates.py` says what has become of an exchange, `sources/attempts.py` how many steps were made or
left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from gradwire.unit.context import Fates

Mark: TypeAlias = tuple[Callable[[], Any], int]
"""A weak reference to a gradient, and the version of the gradient, which changes when it is written."""


class KnownOptimizer:
    """An optimizer, as events refer to it.

    `is_given` is True if the user has given it; `names`, or ids, tell its parameters apart.
    """

    def __init__(self, *, is_given: bool, names: frozenset[Any] = frozenset()) -> None:
        self.is_given, self.names = is_given, names


@dataclass(frozen=True, slots=True)
class Look:
    """Look at the gradients of one optimizer."""

    gone: frozenset[str] = frozenset()
    """Parameters whose gradient is `None`, or was before this pass wrote it."""
    first: Mark | None = None
    """The first gradient that is there."""
    are_zero: bool = False
    """True if some are there, and all of these are zeros. Read on the host, on a device only in doubt."""


@dataclass(frozen=True, slots=True)
class PassBegan:
    """A backward pass has entered the model. It will exchange its gradients, or not.

    `looks` are at optimizers that have not used the last exchange, before this pass writes gradients.
    """

    looks: Mapping[KnownOptimizer, Look] = field(default_factory=dict)
    exchanges: bool = True


@dataclass(frozen=True, slots=True)
class PassAdded:
    """A backward pass has ended that exchanged nothing, and has changed gradients.

    `first` is the first gradient of each optimizer that had not used the last exchange.
    """

    first: Mapping[KnownOptimizer, Mark | None]


@dataclass(frozen=True, slots=True)
class Asked:
    """Somebody needs to know what has become of the last exchange. Clearing is `p.grad = None`, which leaves
    no event, so `looks` show it.
    """

    looks: Mapping[KnownOptimizer, Look] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RolledBack:
    """Memory was rolled back by `fates`; `is_dropped` if a whole step was left out."""

    fates: Fates
    is_dropped: bool


@dataclass(frozen=True, slots=True)
class ExchangeBegan:
    """An exchange has begun. It `goes_on` with a step in which no optimizer has stepped yet. Gradients are
    compressed, or sent as they are.
    """

    compresses: bool
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The means are in `p.grad`. `zeros` are optimizers that got nothing but zeros, on the host."""

    zeros: Set[KnownOptimizer] = frozenset()


@dataclass(frozen=True, slots=True)
class StepBegan:
    """An optimizer is about to step; hooks of the user's run first."""

    optimizer: KnownOptimizer


@dataclass(frozen=True, slots=True)
class StepLooked:
    """Hooks of the user's have run, and the optimizer steps with these gradients."""

    optimizer: KnownOptimizer
    look: Look


@dataclass(frozen=True, slots=True)
class StepEnded:
    """A step has returned; `skipped` reads, on the device, whether a scaler has left it out."""

    optimizer: KnownOptimizer
    look: Look = Look()
    skipped: Callable[[], object] | None = None


@dataclass(frozen=True, slots=True)
class StepRaised:
    """The step of an optimizer has begun, and has not ended, and does not run any more."""

    optimizer: KnownOptimizer


@dataclass(frozen=True, slots=True)
class Dropped:
    """The user leaves the step out."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Another state was loaded: earlier exchanges are no matter."""


@dataclass(frozen=True, slots=True)
class Retired:
    """All exchanges are final, until a recipe compresses again."""


@dataclass(frozen=True, slots=True)
class Changed:
    """Other optimizers are followed from now on."""

    optimizers: tuple[KnownOptimizer, ...]


Event: TypeAlias = (
    PassBegan
    | PassAdded
    | Asked
    | RolledBack
    | ExchangeBegan
    | Exchanged
    | StepBegan
    | StepLooked
    | StepEnded
    | StepRaised
    | Dropped
    | Loaded
    | Retired
    | Changed
)

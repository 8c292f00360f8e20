"""Dense steps while kernels are compiled beside training; then what was asked for follows on all ranks."""

from __future__ import annotations

from collections.abc import Callable

from gradwire.planning.facts import Facts
from gradwire.planning.health import Condition
from gradwire.recipes import Composition
from gradwire.step.environment import ReducerEnvironment, Rows
from gradwire.step.step import Step


class KernelsController:
    """Controller under which gradients travel dense, until every rank `has_kernels`. Then `asked` runs.

    All ranks tell so in their rows of one status vote, so they change over in the same step, whatever each of
    them finds in its cache. Nothing is measured: compiling slows these steps down.
    """

    measuring = is_serial = looks_on = False
    late = 0.0
    condition: Condition | None = None
    facts: Facts | None = None

    def __init__(self, asked: Composition, has_kernels: Callable[[], bool]) -> None:
        self._asked, self._has_kernels = asked, has_kernels

    def before(self, step: Step, _env: ReducerEnvironment) -> None:
        """Do nothing: the values of gradients are not needed."""

    def row(self, step: Step, link: tuple[float, ...]) -> tuple[float, ...]:
        """Whether this rank has the kernels. `link` is not used: `asked` learns it anew."""
        return (float(self._has_kernels()),)

    def observe(self, step: Step, rows: Rows, *, committed: bool) -> Composition | None:
        """The composition that was asked for, once all ranks have its kernels."""
        return self._asked if all(has for (has,) in rows) else None

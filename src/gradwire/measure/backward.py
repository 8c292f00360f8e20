"""When a backward pass begins, and when each parameter's gradient is there: what nobody can ask DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn

from gradwire.measure.clock import now_s
from gradwire.measure.stopwatch import HostStopwatch, Stopwatch


class BackwardWatch:
    """Marks on the training thread, which the engine reads before that thread goes on.

    A pass that begins forgets the marks of the one before, so of several passes without synchronisation the
    last counts. Parameters are watched only between `watch` and `release`: a hook costs a microsecond.
    """

    def __init__(self, stopwatch: Stopwatch | None = None, clock: Callable[[], float] = now_s) -> None:
        self._stopwatch, self._clock = stopwatch or HostStopwatch(), clock
        self._begun_s: float | None = None
        self._ended_s: float | None = None
        self._begun: Any = None
        self._ready: dict[str, Any] = {}
        self._hooks: list[Any] = []

    def watch(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Mark from now on when the gradient of each of the named `parameters` has been accumulated."""
        if not self._hooks:
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(partial(self._mark, name))  # type: ignore[no-untyped-call]
                for name, parameter in parameters
                if parameter.requires_grad
            ]

    def release(self) -> None:
        """Watch no parameter any more."""
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()
        self._ready = {}

    def _mark(self, name: str, _parameter: Tensor) -> None:
        self._ready[name] = self._stopwatch.mark()

    def begin(self, _gradient: Tensor | None = None) -> None:
        """The backward pass begins now; the last time counts."""
        self._begun_s, self._begun = self._clock(), self._stopwatch.mark()
        self._ready = {}

    def end(self) -> None:
        """The backward pass has ended, with all that had to be waited for."""
        self._ended_s = self._clock()

    def take_begun_s(self) -> float:
        """When this pass began, once; without a mark (under `join()`), now."""
        begun_s, self._begun_s = self._begun_s, None
        return self._clock() if begun_s is None else begun_s

    def before_s(self, begun_s: float) -> float:
        """Seconds between the end of the pass before and `begun_s`; 0 in the first step."""
        return max(begun_s - self._ended_s, 0.0) if self._ended_s is not None else 0.0

    def ready_s(self) -> dict[str, float]:
        """Seconds from the beginning of this pass until each watched gradient was there."""
        if self._begun is None:
            return {}
        return {name: self._stopwatch.seconds(self._begun, mark) for name, mark in list(self._ready.items())}

"""Ranges for torch's profiler: encode, wire and decode, unit by unit.

Only steps that begin while a profiler runs have them. They are on the worker's thread, which torch's profiler
shows with `profile_all_threads` only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch.autograd import profiler
from torch.futures import Future

from gradwire.comm.base import Pending
from gradwire.measure.clock import Compressing, Trace


class RangedTrace(Trace):
    """A trace of a step that a profiler looks at; `recipe` is named in every range."""

    def compressing(self, what: Literal["encode", "decode"], unit: str) -> Compressing:
        """Time local work, in a profiler range such as "gradwire/encode topk flat buffer 0 unit 3"."""
        return _Ranged(self, what, unit, profiler.record_function(f"gradwire/{what} {self.recipe} {unit}"))


class _Ranged(Compressing):
    __slots__ = ("_range",)

    def __init__(
        self,
        trace: Trace,
        what: Literal["encode", "decode"],
        unit: str,
        range_: profiler.record_function,
    ) -> None:
        super().__init__(trace, what, unit)
        self._range = range_

    def __enter__(self) -> None:
        self._range.__enter__()  # type: ignore[no-untyped-call]  # torch's is not typed
        super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._range.__exit__(None, None, None)


class OnTheWire:
    """A round with a range from now until it ends: on another thread, and so with a future."""

    def __init__(self, inner: Pending, name: str) -> None:
        self._inner, self._over = inner, Future[None]()
        self._range = profiler.record_function(name)
        self._range.__enter__()  # type: ignore[no-untyped-call]  # torch's is not typed
        self._range._call_end_callbacks_on_future(self._over)

    def wait(self) -> None:
        try:
            self._inner.wait()
        finally:
            self._end()

    def then(self, callback: Callable[[], None]) -> None:
        """Call `callback` at the end of the round."""

        def ended() -> None:
            self._end()
            callback()

        self._inner.then(ended)

    def _end(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

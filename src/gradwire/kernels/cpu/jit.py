"""Compilation of kernels: without the interpreter lock, cached on disk, and not callable from C.

Kernels that only other kernels call stay callable from Python: without that, a call crashes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from numba import njit
from numba.core import event

from gradwire.kernels.cpu.cache import KernelCache

Compile = Callable[[Callable[..., Any]], Any]

_njit: Any = njit  # its stub lacks an option


def _compiler(**options: Any) -> Compile:
    jit = _njit(nogil=True, no_cfunc_wrapper=True, **options)

    def compiled(function: Callable[..., Any]) -> Any:
        found = jit(function)
        found._cache = KernelCache(function)  # as `cache=True` puts Numba's own there
        return found

    return compiled


kernel: Compile = _compiler()

inlined: Compile = _compiler(inline="always")
"""Compile a kernel that is typed and optimised anew inside each kernel that calls it."""

reordered: Compile = _compiler(fastmath={"reassoc", "nsz"})
"""Compile a kernel whose sums may be taken in any order, so that they are vectorised."""

_COMPILING = event.TimingListener()
event.register("numba:compile", _COMPILING)


def compiled_s() -> float:
    """Seconds that this process has spent compiling with Numba, a user's own functions included."""
    return float(_COMPILING.duration) if _COMPILING.done else 0.0


@contextmanager
def announced(say: Callable[[], None]) -> Iterator[None]:
    """Context that calls `say` before each kernel that has to be compiled, and is not in the cache."""
    with event.install_listener("numba:compile", _Saying(say)):
        yield


class _Saying(event.Listener):
    def __init__(self, say: Callable[[], None]) -> None:
        self._say = say

    def on_start(self, _event: object) -> None:
        self._say()

    def on_end(self, _event: object) -> None:
        """Do nothing."""

"""How kernels are compiled: without the interpreter lock, once per machine, and not for callers from C.

Kernels that only other kernels call keep their way in from Python: where it is missing, a call crashes.
Numba's cache knows a kernel by its own file: a change here reaches only kernels whose files change, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

Compile = Callable[[Callable[..., Any]], Any]

_OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "no_cfunc_wrapper": True}

kernel: Compile = njit(**_OPTIONS)

inlined: Compile = njit(**_OPTIONS, inline="always")
"""For a part of other kernels that is to be typed and optimised anew in each of them."""

reordered: Compile = njit(**_OPTIONS, fastmath={"reassoc", "nsz"})
"""For sums that may be taken in any order, so that they are vectorised."""

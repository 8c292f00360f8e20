"""Compilation of CPU kernels ahead of the first training step, or loading from the cache."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from gradwire import kernels
from gradwire.kernels import cpu
from gradwire.kernels.cpu.prepared import SIGNATURES


def every() -> frozenset[str]:
    """Subjects of all kernels for the CPU: names of files of `kernels/` that also exist in `cpu/`.

    >>> {"compensation", "topk"} <= every()
    True
    """
    here, there = ({each.name for each in iter_modules(home.__path__)} for home in (kernels, cpu))
    return frozenset(here & there)


def imported() -> frozenset[str]:
    """Subjects of the kernels that this process may call, because their contracts have been imported.

    >>> from gradwire.kernels.topk import topk_indices
    >>> "topk" in imported()
    True
    """
    return _loaded() - _foreseen


def _loaded() -> frozenset[str]:
    return frozenset(name for name in every() if f"{kernels.__name__}.{name}" in sys.modules)


@contextmanager
def foreseeing() -> Iterator[None]:
    """Context in which recipes are built only to be compared: kernels imported meanwhile do not count as
    `imported`.

    Compiling them would hold up the step after the comparison, for up to half a minute.
    """
    before = _loaded()
    try:
        yield
    finally:
        _foreseen.update(_loaded() - before)


def forget_foreseen() -> None:
    """Count all loaded kernels as `imported` from now on: a recipe has been asked for by name."""
    _foreseen.clear()


def prepare(subjects: Collection[str], turn: int = 0) -> None:
    """Compile the kernels of `subjects` now, or load them from the cache. It takes seconds and holds the
    interpreter lock.

    A subject is the name of a file of contracts, such as "topk", and is prepared once per process. Processes
    of one machine should have different `turn`s 0, 1, 2, …: each begins with other subjects, and finds in the
    cache those that others have compiled.

    >>> prepare({"topk"})
    """
    names = sorted(subjects)
    # Multiples of the golden ratio lie far apart, whichever turns are on this machine.
    first = int(turn * 0.618034 % 1.0 * len(names))
    for name in names[first:] + names[:first]:
        if name not in _done:
            for kernel, types in _declared(name):
                kernel.compile(types)
            _done.add(name)


def lacking(subjects: Collection[str]) -> frozenset[str]:
    """Those of `subjects` with a kernel that this process has not prepared, and that is not in the cache.

    It loads Numba, and no kernel.

    >>> prepare({"topk"})
    >>> lacking({"topk"})
    frozenset()
    """
    return frozenset(
        name
        for name in subjects
        if name not in _done
        and not all(kernel._cache.has(types, kernel.targetctx) for kernel, types in _declared(name))
    )


def _declared(name: str) -> list[tuple[Any, str]]:
    """The kernels of the subject `name` that Python calls, with their types in Numba's notation."""
    for home in (kernels, cpu):
        import_module(f"{home.__name__}.{name}")
    return [(kernel, f"({types},)") for kernel, types in SIGNATURES.get(name, ())]


_done: set[str] = set()
_foreseen: set[str] = set()
_JIT = f"{cpu.__name__}.jit"


def compiled_s() -> float:
    """Seconds that this process has spent compiling with Numba, functions of the user included.

    Counted from the first kernel on, because Numba is not loaded before.
    """
    return float(sys.modules[_JIT].compiled_s()) if _JIT in sys.modules else 0.0


def announced(say: Callable[[], None]) -> AbstractContextManager[None]:
    """Context that calls `say` before each kernel that has to be compiled, and is not in the cache."""
    found: AbstractContextManager[None] = import_module(_JIT).announced(say)
    return found

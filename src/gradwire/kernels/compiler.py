"""Kernels compiled, or loaded from the cache, before a training step waits for them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from pkgutil import iter_modules

from gradwire import kernels
from gradwire.kernels import cpu
from gradwire.kernels.cpu.prepared import SIGNATURES


def every() -> frozenset[str]:
    """The subjects of all kernels for the CPU: files of `kernels/` that have one of their name in `cpu/`.

    >>> {"folding", "topk"} <= every()
    True
    """
    here, there = ({each.name for each in iter_modules(home.__path__)} for home in (kernels, cpu))
    return frozenset(here & there)


def imported() -> frozenset[str]:
    """The subjects of the kernels that this process may call: it has imported their contracts.

    >>> from gradwire.kernels.topk import topk_indices
    >>> "topk" in imported()
    True
    """
    return _loaded() - _foreseen


def _loaded() -> frozenset[str]:
    return frozenset(name for name in every() if f"{kernels.__name__}.{name}" in sys.modules)


@contextmanager
def foreseeing() -> Iterator[None]:
    """Recipes are built meanwhile to be compared, not to run: kernels that come with them are not `imported`.

    To compile them would hold up the step that follows a comparison, for up to half a minute.
    """
    before = _loaded()
    try:
        yield
    finally:
        _foreseen.update(_loaded() - before)


def forget_foreseen() -> None:
    """All that is loaded may be called from now on: somebody has asked for a recipe."""
    _foreseen.clear()


def prepare(subjects: Collection[str], turn: int = 0) -> None:
    """Compile (or load from the cache) kernels now: it takes seconds, and holds the interpreter lock.

    `subjects` are names of files of contracts, such as "topk": their kernels are prepared, once in a process.
    Processes of one machine that do this at the same time begin at different subjects, if there are enough,
    when each has a `turn` of its own, 0, 1, 2 and so on. What one of them has compiled, the others find in
    the cache.

    >>> prepare({"topk"})
    """
    names = sorted(subjects)
    # Multiples of the golden ratio lie far apart, whichever turns are on this machine.
    first = int(turn * 0.618034 % 1.0 * len(names))
    for name in names[first:] + names[:first]:
        if name not in _done:
            for home in (kernels, cpu):
                import_module(f"{home.__name__}.{name}")
            for kernel, types in SIGNATURES.get(name, ()):
                kernel.compile(f"({types},)")
            _done.add(name)


_done: set[str] = set()
_foreseen: set[str] = set()
_JIT = f"{cpu.__name__}.jit"


def compiled_s() -> float:
    """Seconds that this process has spent compiling with Numba, a user's own functions included.

    Counted from the first kernel on: until then Numba is not loaded.
    """
    return float(sys.modules[_JIT].compiled_s()) if _JIT in sys.modules else 0.0


def announced(say: Callable[[], None]) -> AbstractContextManager[None]:
    """Call `say` before each kernel that is compiled meanwhile, and not merely loaded from the cache."""
    found: AbstractContextManager[None] = import_module(_JIT).announced(say)
    return found
